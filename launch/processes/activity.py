"""What processes do, as this machine sees it: whether they work or hang, and how much memory they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import psutil

from launch.processes.backend import Vitals

LOOK_S: Final = 1.0
"""How often it is looked whether those that are waited for do anything."""
IDLE_S: Final = 3.0
"""How long nobody may do anything when the time is up."""
LONGEST: Final = 5.0
"""So many times as long a wait may take while somebody does."""
LEAST_SHARE: Final = 0.01
"""Of a core: a process that computed less since the last look does nothing. Heartbeats and polls are below."""
SAMPLING_SHARE: Final = 0.02
"""Largest share of one core that sampling memory may take."""
BUSY: Final = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
STOPPED: Final = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class Activity:
    """Compares signs of life, by name, with those of the last look."""

    def __init__(self) -> None:
        self._cpu_s: dict[str, float] = {}
        self._looked_s = time.monotonic()

    def moved(self, vitals: Mapping[str, Vitals]) -> bool:
        """Has one of them computed since the last look, or does it want to, or wait for a disk? The first look at a
        process says yes."""
        now_s = time.monotonic()
        share_s, self._looked_s = LEAST_SHARE * (now_s - self._looked_s), now_s
        moved = False
        for name, (cpu_s, wants_cpu, _) in vitals.items():
            former_s = self._cpu_s.get(name, -1.0)
            if cpu_s < former_s:  # it is another process
                former_s = -1.0
            moved |= wants_cpu or cpu_s - former_s > share_s
            self._cpu_s[name] = cpu_s
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

    def over(self, vitals: Callable[[], Mapping[str, Vitals]]) -> bool:
        """`vitals`: of those that are waited for now."""
        now_s, waited_s = time.monotonic(), self.waited_s
        if now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            self._moved_s = now_s if self._activity.moved(vitals()) else self._moved_s
        return waited_s > self._timeout_s and (now_s - self._moved_s > IDLE_S or waited_s > LONGEST * self._timeout_s)


def vitals_of(pid: int) -> Vitals | None:
    """Signs of life of a process of this machine; None: it is gone."""
    try:
        process = psutil.Process(pid)
        times, status = process.cpu_times(), process.status()
    except psutil.Error:
        return None
    return Vitals(times.user + times.system, status in BUSY, status in STOPPED)


def tree_memory_bytes() -> int:
    """Sum of PSS (proportional set size) over this process and all its descendants; where the system does not know
    PSS (not Linux), of resident memory, which counts shared pages once per process."""
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
    """The largest sum that was sampled."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._due_s = 0.0
        self.peak_bytes = 0

    def sample_when_due(self) -> None:
        if time.monotonic() > self._due_s:
            self.sample()

    def sample(self) -> None:
        """With many processes a sample costs a good part of a second of CPU: then they are taken further apart."""
        began_s = time.process_time()
        self.peak_bytes = max(self.peak_bytes, tree_memory_bytes())
        cost_s = time.process_time() - began_s
        self._due_s = time.monotonic() + max(self._every_s, cost_s / SAMPLING_SHARE)
