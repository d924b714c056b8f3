"""What is examined before a run, and what a check of it reports. A start, `--check` and the doctor share both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from stillhouse.launch.checks.preflight import Checked
from stillhouse.launch.config.run import RunConfig

Status: TypeAlias = Literal["ok", "warning", "failed", "skipped"]
SHOWN: Final[dict[Status, str]] = {"ok": "ok", "warning": "warning", "failed": "FAILED", "skipped": "skipped"}


class Finding(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One line of the report."""

    check: str
    status: Status
    measured: str
    """What was found; why, for a check that was skipped."""
    subject: str = ""
    """Which one of several: a key, a pool, a worker, a GPU."""
    normal: str = ""
    """What it should be."""
    advice: str = ""
    """What to do about it."""
    figures: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """The measurements as numbers, for machines. Names end in the unit."""

    def line(self) -> str:
        """For the doctor's table."""
        what = f"{self.check} ({self.subject})" if self.subject else self.check
        normal = f"; normal: {self.normal}" if self.normal and self.status != "skipped" else ""
        return f"{SHOWN[self.status]:<8} {what}: {self.measured}{normal}{self._advice()}"

    def text(self) -> str:
        """For a start and `--check`, which name a key first."""
        normal = f"; normal: {self.normal}" if self.normal and self.status != "ok" else ""
        return f"{self.subject or self.check}: {self.measured}{normal}{self._advice()}"

    def _advice(self) -> str:
        return f"; do: {self.advice}" if self.advice and self.status in ("warning", "failed") else ""


def of_message(check: str, status: Status, message: str) -> Finding:
    """A finding of a message that begins with what it is about, as those of a ConfigError do."""
    subject, colon, measured = message.partition(": ")
    if not colon:
        subject, measured = "", message
    return Finding(check=check, status=status, subject=subject, measured=measured)


class Impossible(Exception):
    """A check cannot be made here; the message is the reason."""


class Case:
    """One run before its start."""

    def __init__(
        self, config: RunConfig, run_path: Path, checked: Checked | None, mistakes: tuple[str, ...] = ()
    ) -> None:
        """`config`: as the launcher resolved it; if it refused it, with the models that could be found. `run_path`: the
        folder that the run would have, which may not exist. `mistakes`: why such a run would not start."""
        self.config: Final = config
        self.run_path: Final = run_path
        self.mistakes: Final = mistakes
        self._checked = checked

    @property
    def checked(self) -> Checked:
        """Raises Impossible for a configuration that the launcher refuses."""
        if self._checked is None:
            raise Impossible("the configuration is refused, see above")
        return self._checked


CaseT = TypeVar("CaseT", bound=Case, contravariant=True)


def _no_longer(config: RunConfig) -> float:
    return 0.0


class Check(NamedTuple, Generic[CaseT]):
    """One check. `examine` may raise Impossible, and ConfigError for mistakes."""

    name: str
    examine: Callable[[CaseT], Iterator[Finding]]
    refuses: bool = False
    """A start is refused where it fails; it is warned of what else fails."""
    longer_s: Callable[[RunConfig], float] = _no_longer
    """Seconds that it may take beyond those of any check."""
