"""How long a test waits for what must come: a limit that grows with how slow this machine was measured to be.

A wait ends with its event. The limit is there only so that a test fails instead of hanging: it is far more than a quiet
machine needs, and is multiplied by `SLOWNESS` for a machine that is slow or busy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

VARIABLE: Final = "STILLHOUSE_TEST_SLOWNESS"
"""The environment variable that tells it to the workers of xdist and to the processes that tests start."""
REFERENCE_S: Final = 0.2
"""What the work of `measure` takes on one quiet core of the machine for which the limits were chosen."""


def measure() -> float:
    """How many times slower than the reference this machine computes and starts processes now; at least 1."""
    started_s, number = time.perf_counter(), 0
    for i in range(1_000_000):
        number = (number * 31 + i) % 1_000_003
    for _ in range(2):
        subprocess.run([sys.executable, "-c", "import json, socket"], check=True)
    return max(1.0, (time.perf_counter() - started_s) / REFERENCE_S)


def _known_or_measured() -> float:
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{measure():.2f}"
    return float(os.environ[VARIABLE])


SLOWNESS: Final = _known_or_measured()
PATIENCE_S: Final = 120.0 * SLOWNESS
"""The limit of a wait for one event: a message, a process that starts or ends, a few steps of a run."""
RUN_PATIENCE_S: Final = 300.0 * SLOWNESS
"""The limit of a wait for the end of a whole run."""


class Limit:
    """The end of one wait. When it is reached on a machine that is slower by now, it is moved accordingly."""

    def __init__(self, limit_s: float = PATIENCE_S) -> None:
        self._started_s, self._limit_s, self._slowness = time.monotonic(), limit_s, SLOWNESS

    def __str__(self) -> str:
        return f"{self._limit_s:.0f} s"

    @property
    def passed(self) -> bool:
        if time.monotonic() - self._started_s <= self._limit_s:
            return False
        former, self._slowness = self._slowness, max(self._slowness, measure())
        self._limit_s *= self._slowness / former
        return time.monotonic() - self._started_s > self._limit_s


def eventually(condition: Callable[[], bool], what: str | Callable[[], str], limit_s: float = PATIENCE_S) -> None:
    """Wait until the condition holds. After the limit, fail with `what` was waited for."""
    limit = Limit(limit_s)
    while not condition():
        assert not limit.passed, f"not within {limit}: {what if isinstance(what, str) else what()}"
        time.sleep(0.02)
