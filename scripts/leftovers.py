"""Fail if a process that a test run started is still there:  leftovers.py VARIABLE VALUE

Whatever the tests start inherits the environment variable, so nothing is judged by its name."""

from __future__ import annotations

import os
import sys
import time

import psutil

PATIENCE_S = 5.0


def leftovers(variable: str, value: str) -> list[psutil.Process]:
    """Processes with this variable, other than this one and those it descends from."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:  # gone meanwhile, or another user's
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
