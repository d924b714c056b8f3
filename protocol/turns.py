"""Turns on a device that several processes share (`launch.share = turns`): one of them computes there, and has its
memory there, at a time.

    learner   trains -> copies the weights, is out of the way -> the actors take the weights -> the turn is over
    actor     writes while it has something to write
    teacher   scores while it has something to score

The turn is a lock on a file in the run's folder. Nobody hands it out: whoever wants it tries again every POLL_S, and
who gave it back waits YIELD_S before it tries again, so that the others are first. The kernel frees the lock of a
process that dies, and so the turn of a dead one is over at once; the next one waits AFTER_DEATH_S, because the launcher
may have to end the server of the dead one, whose memory it is. No wait is longer than its caller says.

fcntl's locks belong to a process: a fork does not inherit them, and all threads of a process have the turn together.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from stillhouse.protocol.atomic_file import not_a_link
from stillhouse.tracing import events

FILE: Final = "turn"
"""In the run's folder."""
POLL_S: Final = 0.005
YIELD_S: Final = 4 * POLL_S
LINGER_S: Final = 0.05
"""A worker's turn ends when it has had nothing to do for this long: the next item is often on its way."""
AFTER_DEATH_S: Final = 3.0
LONGEST_WAIT_S: Final = 900.0
"""Longest wait for the turn where a worker cannot do anything else."""
_NAME_BYTES: Final = 64


class TurnTimeout(Exception):
    """Another process kept the device for longer than the caller was ready to wait."""


@runtime_checkable
class SharesDevice(Protocol):
    """What has memory on a device, and can do without it for a while. Nothing of it computes meanwhile."""

    def give_back(self) -> None:
        """Free the memory on the device: weights, which are kept elsewhere, and caches, which are lost. Called when
        nothing is under way. Idempotent."""
        ...

    def take_again(self, *, weights_only: bool = False) -> None:
        """Have the memory again. `weights_only`: what new weights need, in the turn of the learner that sends them;
        nothing begins to compute. Idempotent."""
        ...


class Turn:
    """This process's part in the turns of one run. Thread-safe. One per process and file: closing any descriptor of the
    file frees the lock."""

    def __init__(self, path: Path, name: str) -> None:
        """`name`: of this process, for the messages of others."""
        self._name = f"{name[:_NAME_BYTES]:<{_NAME_BYTES}}".encode()[:_NAME_BYTES]
        self._file = not_a_link(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._holders = 0
        """How often this process has it, in all its threads."""
        self._wanted_s: float | None = None
        self._died_s: float | None = None
        """When it saw that the former holder had died."""
        self._taken_s, self._given_s, self._began_ns = 0.0, -YIELD_S, 0
        self.stats = {"turns_total": 0.0, "turn_s_total": 0.0, "turn_wait_s_total": 0.0}

    @property
    def holder(self) -> str:
        """Name of the process that has the turn."""
        return self._said or "another process"

    @property
    def _said(self) -> str:
        return os.pread(self._file, _NAME_BYTES, 0).decode(errors="replace").strip()

    def try_take(self) -> bool:
        """Take the turn, or have it once more. False: another process has it."""
        with self._lock:
            now_s = time.monotonic()
            if self._holders:
                self._holders += 1
                return True
            wanted_s = self._wanted_s = now_s if self._wanted_s is None else self._wanted_s
            if now_s - self._given_s < YIELD_S:
                return False
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # as the system says it
                return False
            if self._died_s is None and self._said:  # whoever gives it back takes the name away
                self._died_s = now_s
            if self._died_s is not None and now_s - self._died_s < AFTER_DEATH_S:
                return False  # and keeps the lock
            os.pwrite(self._file, self._name, 0)
            self._holders, self._wanted_s, self._died_s = 1, None, None
            self._taken_s, self._began_ns = now_s, events.now_ns()
            self.stats["turns_total"] += 1
            self.stats["turn_wait_s_total"] += now_s - wanted_s
            return True

    def take(self, timeout_s: float = LONGEST_WAIT_S, meanwhile: Callable[[float], object] = time.sleep) -> None:
        """Wait for the turn. `meanwhile(seconds)` passes that time, and may raise. Raises TurnTimeout."""
        deadline_s = time.monotonic() + timeout_s
        while not self.try_take():
            if time.monotonic() > deadline_s:
                raise TurnTimeout(f"{self.holder} kept the device for {timeout_s:.0f} s (launch.share = turns)")
            meanwhile(POLL_S)

    def give_back(self) -> None:
        """Once for each time that it was taken."""
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._given_s = time.monotonic()
                self.stats["turn_s_total"] += self._given_s - self._taken_s
                events.done("turn", "turn", self._began_ns)
                os.pwrite(self._file, b" " * _NAME_BYTES, 0)
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Ends the turn, too."""
        os.close(self._file)


class EngineTurns:
    """The turns of a worker's engine. `mine` is for the worker's thread, `lent` for the one that receives weights."""

    def __init__(self, turn: Turn, engine: SharesDevice) -> None:
        """The engine has its memory, and the process has the turn, the first one."""
        self._turn, self._engine = turn, engine
        self._taken, self._wanted, self._wanted_s = True, False, time.monotonic()
        self._busy = threading.Lock()

    @property
    def taken(self) -> bool:
        return self._taken

    def mine(self, *, wanted: bool) -> bool:
        """Whether the engine may compute now. Never waits. `wanted`: it has something to do."""
        if not self._busy.acquire(blocking=False):
            return self._taken  # weights are arriving, and what is so stays so
        try:
            self._wanted = wanted
            if wanted:
                self._wanted_s = time.monotonic()
                if not self._taken and self._turn.try_take():
                    self._taken = True  # first: a worker that fails here ends, and with it its turn
                    self._engine.take_again()
            elif self._taken and time.monotonic() - self._wanted_s > LINGER_S:
                self._engine.give_back()
                self._taken = False
                self._turn.give_back()
            return self._taken
        finally:
            self._busy.release()

    def wait_s(self, longest_s: float) -> float:
        """How long the worker may wait for something else: shortly where the turn is to begin or to end."""
        return longest_s if self._taken == self._wanted else POLL_S

    @contextmanager
    def lent(self) -> Generator[None]:
        """New weights, in the `with` block. The learner has the turn and waits for the end of this; if it is this
        process's own, the engine goes on as it does without turns."""
        with self._busy:
            if self._taken:
                yield
                return
            self._engine.take_again(weights_only=True)
            try:
                yield
            finally:
                self._engine.give_back()

    @property
    def stats(self) -> dict[str, float]:
        return dict(self._turn.stats)


class Alone:
    """In place of EngineTurns where nobody shares the device."""

    taken: Final = True
    stats: Final[dict[str, float]] = {}

    def mine(self, *, wanted: bool) -> bool:
        return True

    def wait_s(self, longest_s: float) -> float:
        return longest_s

    @contextmanager
    def lent(self) -> Generator[None]:
        yield


ALONE: Final = Alone()
