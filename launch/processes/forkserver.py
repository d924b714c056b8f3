"""The fork server of workers (protocol.fork_server): imports torch and transformers once, then forks each worker.

    python -m stillhouse.launch.processes.forkserver CONTROL_FD LIFELINE_FD LAUNCHER_PID RUN_DIR MODULE...

The launcher starts it before anything else. It has one thread and touches no device, so that forking is safe; both are
checked before every fork, and an unsafe fork is refused (the launcher then spawns)."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import msgspec

from stillhouse.launch.config.files import read_config
from stillhouse.launch.workers.roles import redirect_output, run_role
from stillhouse.launch.workers.start_role import StartRole, WorkFolder
from stillhouse.protocol.children import die_with_parent, threads_lost_by_fork
from stillhouse.protocol.context import ExitCode
from stillhouse.protocol.fork_server import ForkServer


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


class ChildExited(msgspec.Struct, frozen=True, tag="Exited"):
    """Here -> launcher: a worker ended; a negative code is the signal that killed it."""

    pid: int
    code: int


ToForkserver: TypeAlias = StartRole | Signal | Ping
FromForkserver: TypeAlias = Warm | Forked | ForkRefused | ChildExited | Pong


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


def main() -> None:
    control_fd, lifeline_fd, launcher_pid = (int(arg) for arg in sys.argv[1:4])
    folder, modules = WorkFolder(Path(sys.argv[4])), sys.argv[5:]
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(launcher_pid)
    config = read_config(folder.config_path)

    def become(message: dict[str, Any]) -> NoReturn:
        start = msgspec.convert(message, StartRole)
        redirect_output(folder.log_path(start.name))
        gc.enable()
        run_role(start, config, folder.path, lifeline_fd)

    with socket.socket(fileno=control_fd) as control:
        preload(modules)
        try:
            ForkServer(control, become, refusal).serve()
        except (BrokenPipeError, ConnectionResetError):
            os._exit(ExitCode.FAILED)  # the launcher is gone; the kernel kills the children


if __name__ == "__main__":
    main()
