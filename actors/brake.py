"""Slows an actor down when its rollouts fail, and stops it when none ends well: prompts must not burn in seconds.

After the n-th failure in a row no rollout is started for `min(FIRST_S * 2**n, LONGEST_S)` seconds. One rollout that
ends well resets it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

FIRST_S: Final = 0.01
LONGEST_S: Final = 1.0
"""So that an environment that always fails ends the actor, with its cause, after about a minute."""


class TooManyFailures(RuntimeError):
    """Rollout after rollout failed; the message has the last reason."""


class Brake:
    """Counts failures in a row. One thread only."""

    def __init__(self, max_in_a_row: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._max_in_a_row = max_in_a_row
        self._now_s = now_s
        self._in_a_row = 0
        self._until_s = 0.0

    def success(self) -> None:
        self._in_a_row, self._until_s = 0, 0.0

    def failure(self, reason: str) -> None:
        """Raises TooManyFailures for the one that is too many."""
        self._in_a_row += 1
        if self._in_a_row >= self._max_in_a_row:
            raise TooManyFailures(
                f"{self._in_a_row} rollouts in a row failed, none ended well in between; the last one: {reason}"
            )
        self._until_s = self._now_s() + min(FIRST_S * 2.0**self._in_a_row, LONGEST_S)

    def holds_s(self) -> float:
        """Seconds until the next rollout may be started; 0 = now."""
        return max(0.0, self._until_s - self._now_s())
