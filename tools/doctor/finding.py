"""What a check of the doctor reports, and the messages from the process that examines to the one that prints."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

Status: TypeAlias = Literal["ok", "warning", "failed", "skipped"]
SHOWN: Final[dict[Status, str]] = {"ok": "ok", "warning": "warning", "failed": "FAILED", "skipped": "skipped"}


class Finding(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One line of the report."""

    check: str
    status: Status
    measured: str
    """What was found; why, for a check that was skipped."""
    subject: str = ""
    """Which one of several: a pool, a worker, a GPU."""
    normal: str = ""
    """What it should be."""
    advice: str = ""
    """What to do about it."""
    figures: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """The measurements as numbers, for machines. Names end in the unit."""

    def line(self) -> str:
        """For people."""
        what = f"{self.check} ({self.subject})" if self.subject else self.check
        parts = [self.measured]
        if self.normal and self.status != "skipped":
            parts.append(f"normal: {self.normal}")
        if self.advice and self.status in ("warning", "failed"):
            parts.append(f"do: {self.advice}")
        return f"{SHOWN[self.status]:<8} {what}: {'; '.join(parts)}"


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A check has begun, and ends within `deadline_s`."""

    check: str
    deadline_s: float


class Ended(msgspec.Struct, frozen=True, tag=True):
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


News: TypeAlias = Begun | Finding | Ended
