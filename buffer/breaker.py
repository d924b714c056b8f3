"""A teacher whose leases fail one after the other is given no work for a while, then one item to show that it can.

    CLOSED --`failures` items failed in a row--> OPEN --back-off over--> one probe item at a time
       ^---any scores that are good----------------+        |  ^--- probe failed: back-off doubled, up to a bound
       ^---pardoned: the items were at fault-------+        +-- probe came to nothing: the next one at once

What counts is distinct items since the last good scores, and only those that failed nowhere else: an item that several
teachers failed says something about the item, not about them (`pardon`).
"""

from __future__ import annotations

from typing import Final

MAX_REMEMBERED: Final = 64
"""Items held against a teacher; that it failed more of them changes nothing."""


class Breaker:
    """Of one teacher process. Times are readings of the core's clock."""

    __slots__ = ("_against", "_back_off_s", "_failures", "_first_s", "_longest_s", "_open_until_s", "_probe")

    def __init__(self, *, failures: int, backoff_s: float, backoff_max_s: float) -> None:
        """`failures` 0: it never opens."""
        self._failures = failures
        self._first_s = backoff_s
        self._longest_s = backoff_max_s
        self._back_off_s = backoff_s
        """The present one, or the next."""
        self._against: list[str] = []
        """Items."""
        self._open_until_s: float | None = None
        """When open: a probe may be sent from then on."""
        self._probe: int | None = None
        """Its lease."""

    def __repr__(self) -> str:
        return f"Breaker(until={self._open_until_s}, probe={self._probe}, against={len(self._against)})"

    @property
    def is_open(self) -> bool:
        return self._open_until_s is not None

    @property
    def against(self) -> str:
        """The items held against the teacher."""
        return ", ".join(self._against)

    def lets(self, now_s: float) -> bool:
        """May the teacher be given an item?"""
        return self._open_until_s is None or (now_s >= self._open_until_s and self._probe is None)

    def told(self, now_s: float) -> str:
        """Why it is held back; empty: it is not."""
        if self._open_until_s is None:
            return ""
        when = "on trial with one item" if self._probe is not None else "waits for an item to be tried with"
        if now_s < self._open_until_s:
            when = f"tried again in {self._open_until_s - now_s:.1f} s"
        return f"failed {len(self._against)} items in a row, {when}"

    def sent(self, lease_id: int) -> bool:
        """A lease was given to it. Is it a probe?"""
        if self._open_until_s is None:
            return False
        self._probe = lease_id
        return True

    def succeeded(self) -> bool:
        """Good scores came. Was it open?"""
        was_open = self.is_open
        self._against.clear()
        self._close()
        return was_open

    def failed(self, now_s: float, lease_id: int, item: str) -> bool:
        """A lease failed for which no other teacher can be cited. Has it opened?"""
        if item not in self._against and len(self._against) < MAX_REMEMBERED:
            self._against.append(item)
        if self._open_until_s is None:
            if not self._failures or len(self._against) < self._failures:
                return False
            self._open_until_s = now_s + self._back_off_s
            return True
        if self._probe == lease_id:
            self._probe = None
            self._back_off_s = min(2 * self._back_off_s, self._longest_s)
            self._open_until_s = now_s + self._back_off_s
        return False

    def pardon(self, item: str) -> None:
        """Other teachers failed it too."""
        if item in self._against:
            self._against.remove(item)
            if len(self._against) < self._failures:
                self._close()

    def came_to_nothing(self, lease_id: int) -> None:
        """A lease ended that says nothing about the teacher."""
        if self._probe == lease_id:
            self._probe = None

    def _close(self) -> None:
        self._open_until_s = None
        self._probe = None
        self._back_off_s = self._first_s
