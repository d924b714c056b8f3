"""Failed rollouts: the reason that is reported, and a brake on starting new ones.

After the n-th failure in a row no rollout is started for `min(FIRST_S * 2**n, LONGEST_S)` seconds, so that prompts are
not used up within seconds. One rollout that ends well resets this.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from stillhouse.protocol.messages import FailureReason
from stillhouse.protocol.printable import in_one_line


class Failure(NamedTuple):
    """`error`: class of the environment's exception, for env_error. `detail`: one line for the log."""

    reason: FailureReason
    detail: str
    error: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.error}): {self.detail}" if self.error else f"{self.reason}: {self.detail}"


def of_environment(error: BaseException) -> Failure:
    """The failure for an exception that the environment raised, with its file and line."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    where = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return Failure("env_error", in_one_line(str(error)) + where, in_one_line(type(error).__name__))


FIRST_S: Final = 0.01
LONGEST_S: Final = 1.0
"""Short enough that an environment that always fails ends the actor, with the cause, after about a minute."""


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
        """Raises TooManyFailures when the limit is reached."""
        self._in_a_row += 1
        if self._in_a_row >= self._max_in_a_row:
            raise TooManyFailures(
                f"{self._in_a_row} rollouts in a row failed, none ended well in between; the last one: {reason}"
            )
        self._until_s = self._now_s() + min(FIRST_S * 2.0**self._in_a_row, LONGEST_S)

    def holds_s(self) -> float:
        """Seconds until the next rollout may start; 0 = now."""
        return max(0.0, self._until_s - self._now_s())
