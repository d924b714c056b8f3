"""Does a process do anything? What a wait goes by where seconds would say more of the machine than of the process."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

LEAST_SHARE = 0.01
"""Of a core: a process that computed less since the last look does nothing. Heartbeats and polls are below."""
BUSY = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)


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


def is_stopped(pid: int) -> bool:
    """SIGSTOP, or its relatives, hold it."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False
