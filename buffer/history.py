"""Memory of what is over: which numbers (tasks, leases, batches) ended how, and which rollouts have ended.

`Runs` maps whole numbers to values at a cost per run of equal neighbours, not per number: [first, last] -> value. What
is numbered in the order of its issue and ends the same way is remembered forever at no cost; every exception costs an
entry or two. A segment that comes late, or twice, is recognised by `EndedRollouts`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Final, Generic, TypeAlias, TypeVar

ValueT = TypeVar("ValueT")


class Runs(Generic[ValueT]):
    """A map from whole numbers to values, which are compared by `==` and must not change."""

    __slots__ = ("_firsts", "_lasts", "_values")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        """Ascending, as are `_lasts`."""
        self._lasts: list[int] = []
        self._values: list[ValueT] = []

    @property
    def n_runs(self) -> int:
        """Number of entries, which determines the memory used."""
        return len(self._firsts)

    @property
    def n_numbers(self) -> int:
        return sum(self._lasts) - sum(self._firsts) + self.n_runs

    def __contains__(self, number: int) -> bool:
        return self._find(number) is not None

    def get(self, number: int) -> ValueT | None:
        """Value of a number; None if it has none."""
        at = self._find(number)
        return None if at is None else self._values[at]

    def put(self, number: int, value: ValueT) -> None:
        """Set the value of a number."""
        self.discard(number)
        at = bisect_right(self._firsts, number)
        follows = at > 0 and self._lasts[at - 1] >= number - 1 and self._values[at - 1] == value
        precedes = at < len(self._firsts) and self._firsts[at] <= number + 1 and self._values[at] == value
        if follows and precedes:
            self._lasts[at - 1] = self._lasts[at]
            self._delete(at)
        elif follows:
            self._lasts[at - 1] = number
        elif precedes:
            self._firsts[at] = number
        else:
            self._insert(at, number, number, value)

    def append_range(self, first: int, last: int, value: ValueT) -> None:
        """Set the value of `first` to `last`, if there are any. Raises ValueError unless they lie above all others."""
        if first > last:
            return
        if self._lasts and self._lasts[-1] >= first:
            raise ValueError(f"numbers from {first} on: expected them above {self._lasts[-1]}")
        if self._lasts and self._lasts[-1] == first - 1 and self._values[-1] == value:
            self._lasts[-1] = last
        else:
            self._insert(len(self._firsts), first, last, value)

    def discard(self, number: int) -> None:
        """Remove the value of a number, if it has one."""
        at = self._find(number)
        if at is None:
            return
        first, last = self._firsts[at], self._lasts[at]
        if first == last:
            self._delete(at)
        elif number == first:
            self._firsts[at] = number + 1
        else:
            self._lasts[at] = number - 1
            if number < last:
                self._insert(at + 1, number + 1, last, self._values[at])

    def forget_lowest(self) -> None:
        """Remove the run with the lowest numbers. Raises IndexError when there is none."""
        self._delete(0)

    def _find(self, number: int) -> int | None:
        at = bisect_right(self._firsts, number) - 1
        return at if at >= 0 and number <= self._lasts[at] else None

    def _insert(self, at: int, first: int, last: int, value: ValueT) -> None:
        self._firsts.insert(at, first)
        self._lasts.insert(at, last)
        self._values.insert(at, value)

    def _delete(self, at: int) -> None:
        del self._firsts[at], self._lasts[at], self._values[at]


MAX_RUNS_REMEMBERED: Final = 65_536
"""Limit on runs of tasks whose rollouts had equally many segments; at least as many rollouts, and about 4 MiB."""
_ROLLOUT_ID: Final = re.compile(r"(train|eval)-(-?\d{1,20})-(\d{1,20})-(\d{1,20})", re.ASCII)

Series: TypeAlias = tuple[str, int, int]
"""Kind, sample index, attempt."""


class EndedRollouts:
    """Number of accepted segments of each rollout that is over. When the memory is full, the lowest task ids of the
    series that takes up most of it are forgotten."""

    def __init__(self) -> None:
        self._series: dict[Series, Runs[int]] = {}
        """Segments by task id."""
        self._n_runs = 0

    @property
    def n_runs(self) -> int:
        """Number of entries, which determines the memory used."""
        return self._n_runs

    def put(self, rollout_id: str, n_segments: int) -> None:
        """Remember a rollout. Raises ValueError for an id that no ticket can have."""
        found = _parsed(rollout_id)
        if found is None:
            raise ValueError(f"rollout id {rollout_id!r}: expected kind-task-sample-attempt")
        series, task_id = found
        runs = self._series.get(series)
        if runs is None:
            runs = self._series[series] = Runs()
        before = runs.n_runs
        runs.put(task_id, n_segments)
        self._n_runs += runs.n_runs - before
        while self._n_runs > MAX_RUNS_REMEMBERED:
            self._forget_one()

    def get(self, rollout_id: str) -> int | None:
        """Number of segments; None for a rollout that is not remembered. The id may be any text."""
        found = _parsed(rollout_id)
        if found is None:
            return None
        runs = self._series.get(found[0])
        return None if runs is None else runs.get(found[1])

    def _forget_one(self) -> None:
        series = max(self._series, key=lambda series: self._series[series].n_runs)
        runs = self._series[series]
        runs.forget_lowest()
        self._n_runs -= 1
        if runs.n_runs == 0:
            del self._series[series]


def _parsed(rollout_id: str) -> tuple[Series, int] | None:
    """Series and task id; None for text that differs from what `make_ticket` writes, e.g. by a leading zero."""
    found = _ROLLOUT_ID.fullmatch(rollout_id)
    if found is None:
        return None
    kind, (task_id, sample, attempt) = found[1], map(int, found.groups()[1:])
    if f"{kind}-{task_id}-{sample}-{attempt}" != rollout_id:
        return None
    return (kind, sample, attempt), task_id
