"""Splits the learner's wall time: busy, or waiting for one named cause. The shares sum to 1."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

import msgspec

from stillhouse.tracing import events

WaitCause: TypeAlias = Literal["data", "scoring", "weights", "eval", "checkpoint"]
"""data: tokens are not generated yet; scoring: the teachers have not scored them yet; weights: publishing; eval:
evaluation rollouts; checkpoint: writing one."""
WAIT_CAUSES: tuple[WaitCause, ...] = get_args(WaitCause)


class WaitReport(msgspec.Struct, frozen=True):
    """One stretch of wall time. wall_s = busy_s + sum of wait_s."""

    wall_s: float
    busy_s: float
    wait_s: dict[WaitCause, float]
    """All causes, 0 for those that did not occur."""

    @property
    def busy_fraction(self) -> float:
        """1 if no time has passed."""
        return self.busy_s / self.wall_s if self.wall_s > 0 else 1.0

    @property
    def wait_fraction(self) -> dict[WaitCause, float]:
        return {cause: wait_s / self.wall_s if self.wall_s > 0 else 0.0 for cause, wait_s in self.wait_s.items()}

    def plus(self, other: WaitReport) -> WaitReport:
        wait_s: dict[WaitCause, float] = {cause: self.wait_s[cause] + other.wait_s[cause] for cause in WAIT_CAUSES}
        return WaitReport(self.wall_s + other.wall_s, self.busy_s + other.busy_s, wait_s)

    def gauges(self) -> dict[str, float]:
        """`busy_fraction`, `wait_<cause>_fraction`, and the seconds behind them as totals, for the heartbeat."""
        waits = {f"wait_{cause}_fraction": fraction for cause, fraction in self.wait_fraction.items()}
        totals = {f"wait_{cause}_s_total": wait_s for cause, wait_s in self.wait_s.items()}
        return {"busy_fraction": self.busy_fraction, "busy_s_total": self.busy_s, **waits, **totals}


class WaitClock:
    """Every moment counts for exactly one account: the innermost open wait, or busy. One thread only."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Starts immediately. `now_s` reads a monotonic clock."""
        self._now_s = now_s
        self._open: list[WaitCause] = []
        self._open_ns: list[int] = []
        """When each began, for the trace."""
        self._since_s = now_s()
        self._total_s: dict[WaitCause | Literal["busy"], float] = dict.fromkeys(("busy", *WAIT_CAUSES), 0.0)
        self._taken_s = dict(self._total_s)

    @contextmanager
    def waiting(self, cause: WaitCause) -> Generator[None]:
        """Time inside counts for `cause`. The time of a nested wait does not count for the outer one."""
        self._book()
        self._open.append(cause)
        self._open_ns.append(events.now_ns())
        depth = len(self._open)
        try:
            yield
        finally:
            self._book()
            assert len(self._open) == depth, "waits end in the reverse order of their beginning"
            events.done("learner", f"wait: {self._open.pop()}", self._open_ns.pop())

    def blame(self, cause: WaitCause) -> None:
        """Count the innermost open wait for `cause` from now on: the learner may find out the cause while it waits.
        Raises ValueError without an open wait."""
        if not self._open:
            raise ValueError(f"cannot blame {cause!r}: the learner is busy, expected an open wait")
        self._book()
        if (former := self._open[-1]) != cause:
            events.done("learner", f"wait: {former}", self._open_ns[-1])
            self._open_ns[-1] = events.now_ns()
        self._open[-1] = cause

    def total(self) -> WaitReport:
        """Times since the clock was made."""
        self._book()
        return _report(self._total_s)

    def take(self) -> WaitReport:
        """Times since the last `take`, or since the clock was made."""
        self._book()
        taken_s, self._taken_s = self._taken_s, dict(self._total_s)
        return _report({account: total_s - taken_s[account] for account, total_s in self._total_s.items()})

    def _book(self) -> None:
        now_s = self._now_s()
        self._total_s[self._open[-1] if self._open else "busy"] += now_s - self._since_s
        self._since_s = now_s


def _report(account_s: dict[WaitCause | Literal["busy"], float]) -> WaitReport:
    wait_s: dict[WaitCause, float] = {cause: account_s[cause] for cause in WAIT_CAUSES}
    return WaitReport(wall_s=account_s["busy"] + sum(wait_s.values()), busy_s=account_s["busy"], wait_s=wait_s)
