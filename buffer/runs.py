"""A map from whole numbers to values that costs memory by the run, not by the number.

Neighbours with equal values are one entry: [first, last] -> value. What is numbered in the order of its issue and
comes to one and the same end is remembered for good at no cost, and what ends otherwise costs an entry or two.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class Runs(Generic[ValueT]):
    """Values are compared by `==`, and must not change."""

    __slots__ = ("_firsts", "_lasts", "_values")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        """Rising, as the next."""
        self._lasts: list[int] = []
        self._values: list[ValueT] = []

    def __repr__(self) -> str:
        return f"Runs({self.n_numbers} numbers in {self.n_runs} runs)"

    @property
    def n_runs(self) -> int:
        """What the memory goes by."""
        return len(self._firsts)

    @property
    def n_numbers(self) -> int:
        return sum(self._lasts) - sum(self._firsts) + self.n_runs

    def __contains__(self, number: int) -> bool:
        return self._find(number) is not None

    def get(self, number: int) -> ValueT | None:
        """None for a number that has no value."""
        at = self._find(number)
        return None if at is None else self._values[at]

    def put(self, number: int, value: ValueT) -> None:
        """In place of the value it may have."""
        self.discard(number)
        at = bisect_right(self._firsts, number)
        follows = at > 0 and self._lasts[at - 1] == number - 1 and self._values[at - 1] == value
        precedes = at < len(self._firsts) and self._firsts[at] == number + 1 and self._values[at] == value
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
        """Numbers `first` to `last`, above all that have a value; nothing when there are none. Raises ValueError."""
        if first > last:
            return
        if self._lasts and self._lasts[-1] >= first:
            raise ValueError(f"numbers from {first} on: expected them above {self._lasts[-1]}")
        if self._lasts and self._lasts[-1] == first - 1 and self._values[-1] == value:
            self._lasts[-1] = last
        else:
            self._insert(len(self._firsts), first, last, value)

    def discard(self, number: int) -> None:
        """Fine for a number that has no value."""
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
        """The run with the lowest numbers. Raises IndexError when there is none."""
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
