"""Memory of the whole process tree, counted so that shared pages count once."""

from __future__ import annotations

import time
from typing import Final

import psutil

SAMPLING_SHARE: Final = 0.02
"""Of one core, at most, for sampling."""


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
