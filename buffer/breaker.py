"""Circuit breaker: a teacher that fails one lease after another gets no work for a while, then one item as a trial.

    CLOSED --`failures` items failed in a row--> OPEN --back-off over--> one probe item at a time
       ^---any scores that are good----------------+        |  ^--- probe failed: back-off doubled, up to a bound
       ^---pardoned: the items were at fault-------+        +-- probe inconclusive: the next one at once

The breaker counts distinct items since the last good scores, and only those that no other teacher failed: when several
teachers fail an item, the item is at fault (`pardon`).
"""

from __future__ import annotations

from typing import Final

MAX_REMEMBERED: Final = 64
"""Limit on the failed items remembered per teacher; more of them would change nothing."""


class Breaker:
    """Circuit breaker of one teacher process. Times are readings of the core's clock."""

    __slots__ = ("_against", "_back_off_s", "_failures", "_first_s", "_longest_s", "_open_until_s", "_probe")

    def __init__(self, *, failures: int, backoff_s: float, backoff_max_s: float) -> None:
        """`failures` 0: it never opens."""
        self._failures = failures
        self._first_s = backoff_s
        self._longest_s = backoff_max_s
        self._back_off_s = backoff_s
        """Back-off under way, or the next one."""
        self._against: list[str] = []
        """Items counted as failed."""
        self._open_until_s: float | None = None
        """Set while open: time from which a probe may be sent."""
        self._probe: int | None = None
        """Lease id of the probe that is out."""

    @property
    def is_open(self) -> bool:
        return self._open_until_s is not None

    @property
    def against(self) -> str:
        """Items counted as failed, as text."""
        return ", ".join(self._against)

    def allows(self, now_s: float) -> bool:
        """Return True if the teacher may receive an item."""
        return self._open_until_s is None or (now_s >= self._open_until_s and self._probe is None)

    def reason(self, now_s: float) -> str:
        """Reason why the teacher receives no work; empty if it does."""
        if self._open_until_s is None:
            return ""
        when = "on trial with one item" if self._probe is not None else "waits for an item to be tried with"
        if now_s < self._open_until_s:
            when = f"tried again in {self._open_until_s - now_s:.1f} s"
        return f"failed {len(self._against)} items in a row, or took longer than buffer.lease_s; {when}"

    def sent(self, lease_id: int) -> bool:
        """Note that a lease was granted. Returns True if it is a probe."""
        if self._open_until_s is None:
            return False
        self._probe = lease_id
        return True

    def succeeded(self) -> None:
        """Close the breaker: good scores came."""
        self._against.clear()
        self._close()

    def failed(self, now_s: float, lease_id: int, item: str) -> bool:
        """Count a failed lease of an item that no other teacher failed. Returns True if the breaker has opened."""
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
        """Forget a failed item, because other teachers failed it too."""
        if item in self._against:
            self._against.remove(item)
            if len(self._against) < self._failures:
                self._close()

    def inconclusive(self, lease_id: int) -> None:
        """Note that a lease ended which says nothing about the teacher."""
        if self._probe == lease_id:
            self._probe = None

    def _close(self) -> None:
        self._open_until_s = None
        self._probe = None
        self._back_off_s = self._first_s
