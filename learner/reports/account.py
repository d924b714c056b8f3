"""learner.json, the learner's account of the run for the launcher's summary: the file, and what a learner that goes on
carries over from the one before it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import msgspec

from protocol.atomic_file import write_atomic
from protocol.messages import WeightVersion
from recording.append_file import Unwritten

log = logging.getLogger(__name__)

ACCOUNT_FILE: Final = "learner.json"


class _Former(msgspec.Struct, frozen=True):
    """The parts of an account that are carried over."""

    eval: tuple[dict[str, Any], ...] = ()
    reverse_kl_first: float | None = None


class AccountFile:
    """Written whole or not at all, beside and renamed. A write that fails is counted and leaves the former account."""

    def __init__(self, folder: Path, unwritten: Unwritten, *, resume: WeightVersion | None = None) -> None:
        """`resume`: the version that the learner goes on from. Of the account that is there, evaluations up to its
        step are of this run's history, and so is the reverse KL of the first step if any step is; the rest belongs to
        an abandoned branch."""
        self._file = folder / ACCOUNT_FILE
        self._unwritten = unwritten
        former = _read(self._file) if resume is not None else None
        self._eval: tuple[dict[str, Any], ...] = ()
        self._reverse_kl_first: float | None = None
        if former is not None and resume is not None:
            self._eval = tuple(point for point in former.eval if point["step"] <= resume.step)
            self._reverse_kl_first = former.reverse_kl_first if resume.step > 0 else None

    def write(self, account: dict[str, Any]) -> bool:
        """Write `account`, this learner's own, together with what is carried over; of two evaluations of one step the
        later one. False if it could not be written."""
        points = {point["step"]: point for point in (*self._eval, *account["eval"])}
        whole = {**account, "eval": [points[step] for step in sorted(points)]}
        if self._reverse_kl_first is not None:
            whole["reverse_kl_first"] = self._reverse_kl_first
        try:
            write_atomic(self._file, msgspec.json.format(msgspec.json.encode(whole), indent=2))
        except OSError as error:
            self._unwritten.count(self._file.name, 1, error)
            return False
        self._unwritten.written(self._file.name)
        return True


def _read(file: Path) -> _Former | None:
    try:
        former = msgspec.json.decode(file.read_bytes(), type=_Former)
        if all(isinstance(point.get("step"), int) for point in former.eval):
            return former
        log.error("%s has an evaluation without its step; nothing is carried over from it", file)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError) as error:
        log.error("%s cannot be read, and nothing is carried over from it: %s", file, error)
    return None
