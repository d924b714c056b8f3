"""The fork server: imports torch and transformers once, then forks each worker within milliseconds.

    python -m stillhouse.launch.processes.forkserver CONTROL_FD LIFELINE_FD LAUNCHER_PID RUN_DIR MODULE...

The launcher starts it before anything else. It has one thread and touches no device, so that forking is safe; both are
checked before every fork, and an unsafe fork is refused (the launcher then spawns). Messages on the control socket are
JSON objects, one per line:

    launcher -> StartRole, Signal, Ping     here -> Warm, Forked, ForkRefused, Exited, Pong

It ends when the launcher closes the socket. SIGTERM does not end it: when a whole process group is terminated, the
learner still has a checkpoint to write. However it ends, its children get SIGKILL (launch.processes.lifeline).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from stillhouse.launch.config.files import read_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.workers.roles import redirect_output, run_role
from stillhouse.launch.workers.start_role import StartRole, WorkFolder
from stillhouse.protocol.children import die_with_parent, kill_group, reap, threads_lost_by_fork
from stillhouse.protocol.context import ExitCode

READ_BYTES: Final = 65536


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Launcher -> here: send `signum` to the worker. The launcher cannot do it safely: only the process that reaps the
    worker knows whether the pid is still the worker's."""

    pid: int
    signum: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Launcher -> here: are you alive?"""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Here -> launcher: the answer to a Ping."""


class Warm(msgspec.Struct, frozen=True, tag=True):
    """Here -> launcher: all modules are imported."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """Here -> launcher: the worker runs."""

    name: str
    incarnation: str
    pid: int


class ForkRefused(msgspec.Struct, frozen=True, tag=True):
    """Here -> launcher: forking is unsafe; the worker was not started."""

    name: str
    incarnation: str
    reason: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """Here -> launcher: a worker ended; a negative code is the signal that killed it."""

    pid: int
    code: int


ToForkserver: TypeAlias = StartRole | Signal | Ping
FromForkserver: TypeAlias = Warm | Forked | ForkRefused | Exited | Pong


def refusal() -> str | None:
    """Reason why forking this process would be unsafe now, or None."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a CUDA context exists in the fork server"
    if (n := threads_lost_by_fork()) > 1:
        return f"the fork server has {n} threads, expected 1"
    return None


def preload(modules: list[str]) -> None:
    """Import `modules`, then freeze their objects: a garbage collection in a child would otherwise write to the shared
    pages, and thereby copy them."""
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


class ForkServer:
    """The loop: requests in, forks and exit codes out. One thread; waits for the socket or for SIGCHLD."""

    def __init__(self, control: socket.socket, lifeline_fd: int, folder: WorkFolder, config: RunConfig) -> None:
        self._control = control
        self._lifeline_fd = lifeline_fd
        self._folder = folder
        self._config = config
        self._children: set[int] = set()
        self._decoder = msgspec.json.Decoder(ToForkserver)
        self._unread = b""
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)

    def serve(self) -> None:
        """Run until the launcher closes the control socket."""
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)  # a handler must exist for the wake-up fd to fire
        signal.set_wakeup_fd(self._wake.fileno())
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            open_ = True
            while open_:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._woken in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(READ_BYTES)
                self._reap()
                if self._control in ready:
                    open_ = self._read()
        for pid in self._children:
            kill_group(pid)

    def send(self, message: FromForkserver) -> None:
        self._control.sendall(msgspec.json.encode(message) + b"\n")

    def _read(self) -> bool:
        received = self._control.recv(READ_BYTES)
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            message: ToForkserver = self._decoder.decode(line)
            match message:
                case StartRole():
                    self._fork(message)
                case Signal(pid, signum):
                    self._signal(pid, signum)
                case Ping():
                    self.send(Pong())
        return bool(received)

    def _signal(self, pid: int, signum: int) -> None:
        if pid in self._children:
            if signum == signal.SIGKILL:
                kill_group(pid)
            os.kill(pid, signum)

    def _fork(self, start: StartRole) -> None:
        if (reason := refusal()) is not None:
            self.send(ForkRefused(start.name, start.incarnation, reason))
            return
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(start, parent_pid)
        self._children.add(pid)
        self.send(Forked(start.name, start.incarnation, pid))

    def _become(self, start: StartRole, parent_pid: int) -> None:
        """Turn the forked child into the worker; does not return."""
        try:
            os.setsid()
            die_with_parent(parent_pid)
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(signum, signal.SIG_DFL)
            for inherited in (self._control, self._woken, self._wake):
                inherited.close()
            redirect_output(self._folder.log_path(start.name))
            gc.enable()
        except BaseException:
            traceback.print_exc()
            os._exit(ExitCode.FAILED)
        run_role(start, self._config, self._folder.path, self._lifeline_fd)

    def _reap(self) -> None:
        for pid in tuple(self._children):
            if (code := reap(pid)) is not None:
                self._children.discard(pid)
                self.send(Exited(pid, code))


def main() -> None:
    control_fd, lifeline_fd, launcher_pid = (int(arg) for arg in sys.argv[1:4])
    folder, modules = WorkFolder(Path(sys.argv[4])), sys.argv[5:]
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(launcher_pid)
    with socket.socket(fileno=control_fd) as control:
        server = ForkServer(control, lifeline_fd, folder, read_config(folder.config_path))
        preload(modules)
        try:
            server.send(Warm())
            server.serve()
        except (BrokenPipeError, ConnectionResetError):
            os._exit(ExitCode.FAILED)  # the launcher is gone; the kernel kills the children


if __name__ == "__main__":
    main()
