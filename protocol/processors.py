"""The processors that this process and those that it starts may use, and how busy they are. They may be fewer than the
machine has: by affinity (taskset, Slurm), and by the limits of control groups (containers, systemd)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from stillhouse.protocol.control_groups import groups_with


def _by_affinity() -> float:
    return float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def usable_cores(root: Path = Path("/")) -> float:
    """Cores that processes started here may use together, by affinity and control groups. `root`: of proc and sys."""
    return min(_by_affinity(), *_cpu_limits(root))


def has_quota(root: Path = Path("/")) -> bool:
    """Whether they are fewer because of a control group: then the machine may be idle while they are used up."""
    return usable_cores(root) < _by_affinity()


def _cpu_limits(root: Path) -> Iterator[float]:
    yield math.inf
    for group in groups_with("cpu", root):
        yield from _limit_of(group)


def _limit_of(group: Path) -> Iterator[float]:
    with suppress(OSError, ValueError):  # the group has no limit, or "max"
        quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        yield int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((group / f"cpu.cfs_{what}_us").read_text(encoding="utf-8") for what in ("quota", "period"))
        if int(quota) > 0:  # -1: no limit
            yield int(quota) / int(period)


def share_used() -> float:
    """Share of the processors that this process may run on that anybody used since the last call; in [0, 1]. The first
    call says nothing."""
    shares = psutil.cpu_percent(percpu=True)
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(shares))
    used = [shares[i] for i in own if i < len(shares)] or shares  # some containers show fewer, numbered from 0
    return sum(used) / len(used) / 100
