"""Processes that check responses (`actors.rewards.check_process`), shared by all rollouts of an actor's process.

What the student writes can keep a check busy for hours: `9^{9^{9^9}}` is a formula. A thread that computes it can be
stopped by nothing, a process can. Two run per process of the actor, begin with the first check, and are replaced when
they end."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

PROGRAM: Final = Path(__file__).with_name("check_process.py")
N_PROCESSES: Final = 2
START_S: Final = 60.0
"""Longest time for a process to begin: it imports sympy, on a machine that may be busy."""
KEPT_VARIABLES: Final = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "NLTK_DATA")
"""Environment variables that a process gets. One that reads what the student wrote has no business with keys."""


class CheckerLost(Exception):
    """There is no answer. `too_hard`: because the process computed for too long."""

    def __init__(self, reason: str, message: str, *, too_hard: bool = False) -> None:
        """`reason`: what is counted."""
        super().__init__(message)
        self.reason = reason
        self.too_hard = too_hard


class Checker:
    """One process. One thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._warm: set[str] = set()

    def ask(self, request: dict[str, Any], wait_s: float) -> dict[str, Any]:
        """The process's answer. Raises CheckerLost, and the next request has a new process; RuntimeError where the
        package cannot be imported in it."""
        if request["check"] not in self._warm:
            self._exchange({"check": request["check"]}, START_S)
            self._warm.add(request["check"])
        return self._exchange(request, wait_s)

    def _exchange(self, request: dict[str, Any], wait_s: float) -> dict[str, Any]:
        if self._process is None:
            self._process = _start()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = _read_line(self._process.stdout.fileno(), wait_s)
            answer = json.loads(line)
        except (OSError, ValueError, TimeoutError) as error:
            ended = self.close(grace_s=1.0)
            too_hard = ended in (-signal.SIGXCPU, -signal.SIGPROF)
            raise CheckerLost(
                "checker_lost", f"the checking process gave no answer ({error})", too_hard=too_hard
            ) from error
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self, grace_s: float = 0.0) -> int | None:
        """End the process. Returns how it ended."""
        process, self._process = self._process, None
        self._warm.clear()
        if process is None:
            return None
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        return process.returncode


def _start() -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return subprocess.Popen(
        # -I: neither the working directory nor the user's packages can put a module in its way.
        [sys.executable, "-I", str(PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )


def _read_line(descriptor: int, wait_s: float) -> bytes:
    """Raises TimeoutError, and ValueError at the end of the stream."""
    deadline_s, line = time.monotonic() + wait_s, b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))
        if not readable:
            raise TimeoutError(f"after {wait_s:g} s")
        part = os.read(descriptor, 1 << 16)
        if not part:
            raise ValueError("it ended")
        line += part
    return line


class Checkers:
    """A few processes; a request takes whichever is free. Thread-safe."""

    def __init__(self, n_processes: int = N_PROCESSES) -> None:
        self._free: queue.LifoQueue[Checker] = queue.LifoQueue()  # the same one again, while one suffices
        self._all = [Checker() for _ in range(n_processes)]
        for checker in reversed(self._all):
            self._free.put(checker)
        self._closed = threading.Event()

    def ask(self, request: dict[str, Any], *, wait_s: float) -> dict[str, Any]:
        """Blocks. `wait_s`: for a free process, and again for its answer. Raises CheckerLost."""
        try:
            checker = self._free.get(timeout=wait_s)
        except queue.Empty:
            raise CheckerLost("checkers_busy", f"no checking process was free within {wait_s:g} s") from None
        try:
            return checker.ask(request, wait_s)
        finally:
            self._free.put(checker)

    def close(self) -> None:
        """End the processes that nothing is asked of. The others end with this process; a later request begins anew."""
        idle: list[Checker] = []
        with contextlib.suppress(queue.Empty):
            while True:
                idle.append(self._free.get_nowait())
        for checker in reversed(idle):
            checker.close()
            self._free.put(checker)


CHECKERS: Final = Checkers()
atexit.register(CHECKERS.close)
