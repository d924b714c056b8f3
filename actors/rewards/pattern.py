"""The reward `pattern`, and regular expressions that end.

Python's own `re` has no time limit and keeps Python's lock while it searches, so one bad pattern would stop a whole
actor. The package `regex` gives up after a while, and lets other threads run meanwhile."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any, Final

from stillhouse.actors.rewards.base import Answered, Reward, Verdict, unscored
from stillhouse.actors.row_options import row_may_set

_regex: Final[Any] = importlib.import_module("regex")


class BoundedPattern:
    """A regular expression (syntax of Python's `re`, and what the package `regex` adds) with a time limit. Raises
    ValueError for one that cannot be compiled."""

    def __init__(
        self, pattern: str, timeout_s: float, *, option: str, groups: int | None = None, dotall: bool = False
    ) -> None:
        """`option`: its name, for messages. `groups`: how many it must have. `dotall`: a dot is any character."""
        if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance] - from a configuration
            raise ValueError(f"{option}: got {pattern!r}, expected a regular expression")
        try:
            self._pattern = _regex.compile(pattern, _regex.DOTALL if dotall else 0)
        except _regex.error as error:
            raise ValueError(f"{option} {pattern!r} is not a regular expression: {error}") from error
        if groups is not None and self._pattern.groups != groups:
            raise ValueError(f"{option} {pattern!r} has {self._pattern.groups} groups, expected {groups}")
        self._timeout_s = timeout_s
        self._option = option

    async def found(self, text: str, *, full: bool = False) -> bool:
        """Whether it matches somewhere in the text, or the whole of it. Raises TimeoutError."""
        method = self._pattern.fullmatch if full else self._pattern.search
        return await asyncio.to_thread(self._bounded, method, text) is not None

    async def last_group(self, text: str) -> str | None:
        """The first group of the last match. Raises TimeoutError."""
        return await asyncio.to_thread(self.last_group_here, text)

    def last_group_here(self, text: str) -> str | None:
        """The same, on the caller's thread."""
        found = self._bounded(self._pattern.findall, text)
        return found[-1] if found else None

    def _bounded(self, method: Any, text: str) -> Any:
        try:
            return method(text, timeout=self._timeout_s, concurrent=True)
        except TimeoutError as error:
            raise TimeoutError(
                f"{self._option} took longer than {self._timeout_s:g} s to search {len(text)} characters"
            ) from error


@row_may_set("pattern", "full")
def pattern_reward(pattern: str, full: bool = False, timeout_s: float = 1.0) -> Reward:
    """1.0 for a response in which `pattern` is found (`full`: which it matches as a whole), else 0.0. A search that
    takes longer than `timeout_s` leaves the response unscored."""
    bounded = BoundedPattern(pattern, positive("timeout_s", timeout_s), option="pattern")
    if full not in (True, False):
        raise ValueError(f"full: got {full!r}, expected true or false")

    async def judged(answered: Answered) -> Verdict:
        try:
            return Verdict(float(await bounded.found(answered.response, full=full)))
        except TimeoutError:
            return unscored("pattern_timeout")

    return judged


def positive(option: str, value: object) -> float:
    """Raises ValueError for anything but a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{option}: got {value!r}, expected a number above 0")
    return float(value)
