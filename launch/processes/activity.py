"""Does a process do anything? What a wait goes by where seconds would say more of the machine than of the process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

import psutil

LOOK_S: Final = 1.0
"""How often it is looked whether those that are waited for do anything."""
IDLE_S: Final = 3.0
"""How long nobody may do anything when the time is up."""
LONGEST: Final = 5.0
"""So many times as long a wait may take while somebody does."""
LEAST_SHARE: Final = 0.01
"""Of a core: a process that computed less since the last look does nothing. Heartbeats and polls are below."""
BUSY: Final = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)


class Activity:
    """Looks at processes now and then."""

    def __init__(self) -> None:
        self._cpu_s: dict[int, float] = {}
        self._looked_s = time.monotonic()

    def moved(self, pids: Iterable[int]) -> bool:
        """Has one of them computed since the last look, or does it want to, or wait for a disk? The first look at a
        process says yes."""
        now_s = time.monotonic()
        share_s, self._looked_s = LEAST_SHARE * (now_s - self._looked_s), now_s
        moved = False
        for pid in pids:
            try:
                process = psutil.Process(pid)
                times, status = process.cpu_times(), process.status()
            except psutil.Error:
                continue
            cpu_s = times.user + times.system
            moved |= status in BUSY or cpu_s - self._cpu_s.get(pid, -1.0) > share_s
            self._cpu_s[pid] = cpu_s
        return moved


class Patience:
    """One wait for other processes. It is over after its time, when nobody who is waited for has done anything lately:
    who computes or waits for a disk is slow, not stuck, and has LONGEST times as long."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._activity = Activity()
        self._began_s = self._looked_s = self._moved_s = time.monotonic()

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began_s

    def over(self, pids: Callable[[], Iterable[int]]) -> bool:
        """`pids`: of those that are waited for now."""
        now_s, waited_s = time.monotonic(), self.waited_s
        if now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            self._moved_s = now_s if self._activity.moved(pids()) else self._moved_s
        return waited_s > self._timeout_s and (now_s - self._moved_s > IDLE_S or waited_s > LONGEST * self._timeout_s)


def is_stopped(pid: int) -> bool:
    """SIGSTOP, or its relatives, hold it."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False
