"""What processes do, as this machine sees it: whether they work or hang, and how much memory they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import psutil

from stillhouse.launch.processes.backend import Vitals

LOOK_S: Final = 1.0
"""Time between two looks at the processes that are waited for."""
IDLE_S: Final = 3.0
"""A wait whose time is up ends once none of the processes has done anything for this long."""
LONGEST: Final = 5.0
"""A wait whose time is up may go on while processes work, up to this multiple of its time."""
LEAST_SHARE: Final = 0.01
"""Share of a core: a process that used less since the last look is idle. Heartbeats and polling stay below it."""
MEMORY_EVERY_S: Final = 5.0
"""Time between two samples of the memory of all processes; more if samples are expensive."""
SAMPLING_SHARE: Final = 0.02
"""Largest share of one core that sampling memory may take."""
BUSY: Final = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
STOPPED: Final = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class Activity:
    """Compares the vitals of processes, by name, with those of the last look."""

    def __init__(self) -> None:
        self._cpu_s: dict[str, float] = {}
        self._looked_s = time.monotonic()

    def moved(self, vitals: Mapping[str, Vitals]) -> bool:
        """Whether one of them has computed since the last look, wants to, or waits for a disk. True at the first look
        at a process."""
        now_s = time.monotonic()
        share_s, self._looked_s = LEAST_SHARE * (now_s - self._looked_s), now_s
        moved = False
        for name, (cpu_s, wants_cpu, _) in vitals.items():
            former_s = self._cpu_s.get(name, -1.0)
            if cpu_s < former_s:  # a new process under the same name
                former_s = -1.0
            moved |= wants_cpu or cpu_s - former_s > share_s
            self._cpu_s[name] = cpu_s
        return moved


class Patience:
    """One wait for other processes. It is over when its time is up and none of them has done anything lately. A process
    that computes or waits for a disk is slow, not stuck, so it gets up to LONGEST times as long."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._activity = Activity()
        self._began_s = self._looked_s = self._moved_s = time.monotonic()

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began_s

    def over(self, vitals: Callable[[], Mapping[str, Vitals]]) -> bool:
        """`vitals` returns the vitals of the processes that are waited for now."""
        now_s, waited_s = time.monotonic(), self.waited_s
        if now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            self._moved_s = now_s if self._activity.moved(vitals()) else self._moved_s
        return waited_s > self._timeout_s and (now_s - self._moved_s > IDLE_S or waited_s > LONGEST * self._timeout_s)


def vitals_of(pid: int) -> Vitals | None:
    """Vitals of a process on this machine; None when it is gone."""
    try:
        process = psutil.Process(pid)
        times, status = process.cpu_times(), process.status()
    except psutil.Error:
        return None
    return Vitals(times.user + times.system, status in BUSY, status in STOPPED)


def tree_memory_bytes() -> int:
    """Sum of PSS (proportional set size, which counts shared pages once) over this process and all its descendants.
    Where the system has no PSS (not Linux), the sum of resident memory."""
    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        try:
            memory = process.memory_full_info()
        except psutil.Error:  # it ended between the listing and the look
            continue
        total += int(getattr(memory, "pss", memory.rss))
    return total


class MemoryGauge:
    """The largest sampled memory of the process tree."""

    def __init__(self) -> None:
        self._due_s = 0.0
        self.peak_bytes = 0

    def sample_when_due(self) -> None:
        if time.monotonic() > self._due_s:
            self.sample()

    def sample(self) -> None:
        """With many processes a sample costs a good part of a second of CPU; samples are then taken further apart."""
        began_s = time.process_time()
        self.peak_bytes = max(self.peak_bytes, tree_memory_bytes())
        cost_s = time.process_time() - began_s
        self._due_s = time.monotonic() + max(MEMORY_EVERY_S, cost_s / SAMPLING_SHARE)
