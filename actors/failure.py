"""Why a rollout failed: under which reason it is counted, and what is told to people."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import NamedTuple

from protocol.messages import FailureReason
from protocol.printable import in_one_line


class Failure(NamedTuple):
    """`error`: class of the environment's exception, for env_error. `detail` is for people, on one line."""

    reason: FailureReason
    detail: str
    error: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.error}): {self.detail}" if self.error else f"{self.reason}: {self.detail}"


def of_environment(error: BaseException) -> Failure:
    """An exception that the environment let out, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    where = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return Failure("env_error", in_one_line(str(error)) + where, in_one_line(type(error).__name__))
