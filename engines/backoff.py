"""Waits between attempts."""

from __future__ import annotations

import random
from collections.abc import Iterator


def backoffs(first_s: float = 0.05, longest_s: float = 2.0) -> Iterator[float]:
    """Endless waits between attempts, in seconds: doubling, with jitter so that clients do not retry together."""
    wait_s = first_s
    while True:
        yield wait_s * random.uniform(0.5, 1.0)
        wait_s = min(2 * wait_s, longest_s)
