"""Hosts on one machine: a network namespace each, linked through a switch with delay and loss. Linux, root.

    ns of host i   eth0 10.77.0.(i + 1)/24  ===veth===  p<i>   ns of the switch, where tests.hosts.switch runs

Nothing appears outside the namespaces, and deleting them deletes all of it.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from tests.patience import PATIENCE_S

ROOT: Final = Path(__file__).parents[2]
CLONE_NEWNET: Final = 0x40000000
_libc: Final = ctypes.CDLL(None, use_errno=True)
NO_OFFLOAD: Final = """
import array, fcntl, socket, struct
values = array.array("B", struct.pack("II", 0x17, 0))  # ETHTOOL_STXCSUM off, and segmentation with it
request = struct.pack("16sP", b"eth0", values.buffer_info()[0])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    fcntl.ioctl(control, 0x8946, request)  # SIOCETHTOOL
"""
"""A virtual link leaves checksums to a card that is not there; the switch passes frames on as they are."""


class NotPermitted(Exception):
    """This machine makes no network namespaces; the message says which command failed and why."""


class Network:
    """Hosts by name. Made by `hosts`."""

    def __init__(self, token: str, names: Sequence[str]) -> None:
        self._token = token
        self._names = list(names)

    def address(self, host: str) -> str:
        return f"10.77.0.{self._names.index(host) + 1}"

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        """To be run: the arguments, on that host. It becomes them; the process id stays."""
        return ["ip", "netns", "exec", self._namespace(host), *arguments]

    @contextmanager
    def entered(self, host: str) -> Generator[None]:
        """This thread is on that host meanwhile, and so are threads and processes that it starts."""
        there, back = Path("/run/netns", self._namespace(host)), Path("/proc/thread-self/ns/net")
        with there.open("rb") as inside, back.open("rb") as outside:
            _enter(inside.fileno())
            try:
                yield
            finally:
                _enter(outside.fileno())

    def cut_off(self, host: str) -> None:
        """Pull the cable at the switch: what is on its way is lost, and nobody is told."""
        self._switch_port(host, "down")

    def connect(self, host: str) -> None:
        self._switch_port(host, "up")

    def make(self, stack: ExitStack, *, delay_ms: float, loss: float, seed: int) -> None:
        """Everything that is made is undone by the stack. Raises NotPermitted."""
        for host in ("switch", *self._names):
            run_ip("netns", "add", self._namespace(host))
            stack.callback(run_ip, "netns", "delete", self._namespace(host), check=False)
            run_ip("-n", self._namespace(host), "link", "set", "lo", "up")
        for number, host in enumerate(self._names):
            inside, switch = self._namespace(host), self._namespace("switch")
            run_ip("-n", switch, "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", inside)
            run_ip("-n", inside, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run(self.command(host, [sys.executable, "-c", NO_OFFLOAD]))
            run_ip("-n", switch, "link", "set", f"p{number}", "up")
            run_ip("-n", inside, "link", "set", "eth0", "up")
        self._start_switch(stack, ["--delay-ms", str(delay_ms), "--loss", str(loss), "--seed", str(seed)])

    def _start_switch(self, stack: ExitStack, arguments: Sequence[str]) -> None:
        ports = [f"p{number}" for number in range(len(self._names))]
        command = [sys.executable, "-m", "tests.hosts.switch", "--ports", *ports, *arguments]
        process = stack.enter_context(
            subprocess.Popen(self.command("switch", command), env=environment(), stdout=subprocess.PIPE)
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise NotPermitted("the switch did not start; see its error above")

    def _namespace(self, host: str) -> str:
        return f"stillhouse-{self._token}-{host}"

    def _switch_port(self, host: str, state: str) -> None:
        run_ip("-n", self._namespace("switch"), "link", "set", f"p{self._names.index(host)}", state)


@contextmanager
def hosts(names: Sequence[str], *, delay_ms: float, loss: float, seed: int = 0) -> Generator[Network]:
    """The network while it is entered. Raises NotPermitted."""
    network = Network(secrets.token_hex(3), names)
    with ExitStack() as stack:
        network.make(stack, delay_ms=delay_ms, loss=loss, seed=seed)
        yield network


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of every process on a host."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(more or {})}


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, CLONE_NEWNET) != 0:
        raise NotPermitted(f"setns: {os.strerror(ctypes.get_errno())}")


def run_ip(*arguments: str, check: bool = True) -> None:
    _run(["ip", *arguments], check=check)


def _run(command: Sequence[str], *, check: bool = True) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except FileNotFoundError as error:
        raise NotPermitted(f"{command[0]} is not installed: {error}") from error
    if check and done.returncode != 0:
        raise NotPermitted(f"`{' '.join(command)}`: {done.stderr.strip()}")
