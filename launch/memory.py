"""Memory of the whole process tree, counted so that shared pages count once."""

from __future__ import annotations

import psutil


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
