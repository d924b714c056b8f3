"""Messages between the process that examines and the one that prints."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from stillhouse.launch.checks.finding import Finding


class CheckBegun(msgspec.Struct, frozen=True, tag=True):
    """A check has begun, and ends within `deadline_s`."""

    check: str
    deadline_s: float


class CheckEnded(msgspec.Struct, frozen=True, tag=True):
    """A check has reported everything."""

    check: str


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What the examining process is told on its standard input."""

    arguments: tuple[str, ...]
    """The command line of the run."""
    only: tuple[str, ...]
    """Names of the checks to make; empty: all."""
    done: tuple[str, ...]
    """Checks that a former process has made, or died of."""
    timeout_s: float
    scratch: str
    """Folder for files that nobody needs afterwards."""


ExaminerMessage: TypeAlias = CheckBegun | Finding | CheckEnded
