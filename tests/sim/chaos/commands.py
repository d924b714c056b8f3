"""Commands to the proxy over its local socket, and their client: one JSON line each way."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from tests.patience import PATIENCE_S
from tests.sim.chaos.meddling import Meddling

Direction: TypeAlias = Literal["up", "down"]
"""up: from the worker to the buffer."""
ALL: Final = "*"
ROOT: Final = Path(__file__).parents[3]


class Break(msgspec.Struct, frozen=True, tag=True):
    """End all connections of these peers: in order (FIN), or by a reset (RST)."""

    name: str = ALL
    reset: bool = False


class Weather(msgspec.Struct, frozen=True, tag=True):
    """For `seconds` from now, on all connections of `name`, new ones included; replaces what was said before."""

    seconds: float
    name: str = ALL
    blackhole: bool = False
    """Connections are accepted, nothing passes."""
    delay_s: float = 0.0
    """Each message waits so long, and half of it more or less by chance: those of different connections overtake each
    other."""
    bytes_per_s: float = 0.0
    """0: no limit."""


class Meddle(msgspec.Struct, frozen=True, tag=True):
    """Do this to the next `count` messages of one peer in one direction."""

    kind: Meddling
    name: str
    direction: Direction
    count: int = 1
    seed: int = 0


class Look(msgspec.Struct, frozen=True, tag=True):
    """Asks for what the proxy has seen so far."""


Command: TypeAlias = Break | Weather | Meddle | Look


class Seen(msgspec.Struct, frozen=True):
    """The answer to every command."""

    connections: dict[str, int]
    """Open ones, by peer; unknown before its Hello."""
    accepted_total: int
    useful_s: dict[str, float]
    """Peer -> time.monotonic() of its last message that was work done, not talk."""
    meddled: dict[str, int]
    """Number of messages meddled with, by kind."""
    mechanisms: dict[str, int]
    """Greetings seen, by mechanism."""
    errors: tuple[str, ...]
    """Errors of the proxy itself. There should be none."""


class Proxy:
    """The proxy's process, seen from outside."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, address: str) -> None:
        self.process = process
        self.address = address
        """ZeroMQ endpoint to connect to in place of the buffer's."""
        self._control = control
        self._lines = control.makefile("rb")

    def tell(self, command: Command) -> Seen:
        self._control.sendall(msgspec.json.encode(command) + b"\n")
        return msgspec.json.decode(self._lines.readline(), type=Seen)

    def look(self) -> Seen:
        return self.tell(Look())

    def close(self) -> None:
        self._lines.close()
        self._control.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(PATIENCE_S)


@contextmanager
def running_proxy(
    upstream_port: int,
    *,
    upstream_host: str = "127.0.0.1",
    listen_host: str = "127.0.0.1",
    tap: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Generator[Proxy]:
    """A proxy in front of that port. `tap`: where it writes down the batches that pass
    (tests.sim.chaos.tap)."""
    folder = tempfile.mkdtemp(prefix="chaos-")  # a socket's path must be short; a test's own folder may not be
    path = Path(folder) / "control"
    arguments = ["--control", str(path), "--listen", listen_host, "--upstream", f"{upstream_host}:{upstream_port}"]
    arguments += ["--tap", str(tap)] if tap is not None else []
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.sim.chaos.proxy", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        stdout=subprocess.PIPE,
    )
    proxy: Proxy | None = None
    try:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        assert address, f"the proxy did not start, exit code {process.wait(PATIENCE_S)}"
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        control.settimeout(PATIENCE_S)
        control.connect(str(path))
        proxy = Proxy(process, control, address)
        yield proxy
    finally:
        if proxy is not None:
            proxy.close()
        elif process.poll() is None:
            process.kill()
            process.wait(PATIENCE_S)
        if process.stdout is not None:
            process.stdout.close()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
