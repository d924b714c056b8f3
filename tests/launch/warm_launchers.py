"""A process that has imported the launcher, its fork server and the fake workers, and forks itself for each of them: in
a process of their own each would take a second or two to import the same.

    python warm_launchers.py CONTROL_FD      the protocol of protocol.fork_server

What is forked has the arguments, environment, descriptors and session that a started program would have. Tests of those
themselves start the real ones (`start_launcher(warm=False)`)."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Final, NoReturn

import fake_launcher

from stillhouse.launch.processes import forkserver, local
from stillhouse.launch.workers import roles
from stillhouse.protocol.children import fork_with_defaults
from stillhouse.protocol.fork_server import ForkServer

MAINS: Final[Mapping[str, Callable[[], Any]]] = {module.__name__: module.main for module in (forkserver, roles)}
STREAMS: Final = (0, 1, 2)
LATE: Final = (
    *(f"stillhouse.launch.report.{name}" for name in ("status", "summary_table", "teacher_accuracy")),
    "stillhouse.launch.workers.supervisor",
)
"""What launch.run imports late."""


def go_on_as(
    main: Callable[[], Any], words: list[str], environment: Mapping[str, str], keep: Collection[int]
) -> NoReturn:
    """In a forked process: be the program `main` with these words, without the descriptors of the parent."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
            if descriptor not in (*STREAMS, *keep):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        gc.enable()
        logging.root.handlers.clear()
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = words
        code = main() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


class Forked:
    """A child of the launcher by a fork: what LocalProcesses uses of subprocess.Popen."""

    def __init__(
        self,
        command: list[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        env: Mapping[str, str],
        start_new_session: bool,
        pass_fds: Collection[int] = (),
        bufsize: int = -1,
    ) -> None:
        assert command[1:3] == ["-P", "-m"] and start_new_session
        theirs, ours = os.pipe() if stdin == subprocess.PIPE else (os.open(os.devnull, os.O_RDONLY), None)
        self.returncode: int | None = None
        self.pid = fork_with_defaults((signal.SIGTERM,))
        if self.pid == 0:
            os.setsid()
            for descriptor, stream in zip((theirs, stdout.fileno(), stderr.fileno()), STREAMS, strict=True):
                os.dup2(descriptor, stream)
            go_on_as(MAINS[command[3]], command[3:], env, pass_fds)
        os.close(theirs)
        self.stdin = None if ours is None else io.FileIO(ours, "w")

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        until_s = time.monotonic() + timeout
        while self.returncode is None:
            pid, end = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(end)
            elif time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            else:
                time.sleep(0.01)
        return self.returncode


def become(message: dict[str, Any]) -> NoReturn:
    output = os.open(message["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    go_on_as(fake_launcher.main, message["words"], message["environment"], ())


def main() -> None:
    local.__dict__["subprocess"] = SimpleNamespace(**vars(subprocess) | {"Popen": Forked})
    with socket.socket(fileno=int(sys.argv[1])) as control:
        forkserver.preload(["fake_roles", *LATE])
        ForkServer(control, become).serve()


if __name__ == "__main__":
    main()
