"""CPU seconds of a run's processes by role, from /proc (Linux only), and of a bench's own processes."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Final

import psutil

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def role_cpu_s(run_folder: Path, launcher_pid: int) -> dict[str, float]:
    """Role -> CPU seconds so far of its live processes. A worker is known by the log in the run folder that it writes
    to (logs/actor-0.log: actor)."""
    found: dict[str, float] = {}
    logs = str(run_folder.resolve() / "logs")
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            output = (process / "fd" / "1").readlink()
            fields = (process / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended, or is another user's
        if int(process.name) == launcher_pid:
            role = "launcher"
        elif str(output.parent) == logs:
            role = re.sub(r"-\d+$", "", output.stem)
        else:
            continue
        found[role] = found.get(role, 0.0) + (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return found


def own_cpu_s() -> float:
    """CPU seconds so far of this process and all that it started, and that still run."""
    total_s = time.process_time()
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system
    return total_s
