"""Fails if a process that a test run started is still running:  leftovers.py VARIABLE VALUE

All processes of the tests inherit the environment variable, so process names do not matter."""

from __future__ import annotations

import os
import sys
import time

import psutil

PATIENCE_S = 5.0


def leftovers(variable: str, value: str) -> list[psutil.Process]:
    """Processes with this variable, except this one and its ancestors."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:  # ended meanwhile, or owned by another user
            continue
        if ours and process.pid not in own:
            found.append(process)
    return found


def main() -> int:
    deadline_s = time.monotonic() + PATIENCE_S
    while (found := leftovers(*sys.argv[1:3])) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    for process in found:
        print(f"left behind by the tests: pid {process.pid}: {' '.join(process.cmdline())}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
