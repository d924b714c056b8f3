"""Deletes the blobs to which an image does not refer, some with each commit.

The sweep goes over the blobs in the order of their numbers, up to the first one that came after the image. When another
image counts before it has reached the end, it goes on by what that one refers to, and then once more from the start.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Any, Final

from stillhouse.buffer.journal.parts import blob_key, number_in

LOOKED_AT: Final = 128
"""Parts of blobs that a commit looks at."""
LOOKED_AT_EACH: Final = 4
"""Parts that it also looks at for each that it adds, so that the sweep is faster than what comes."""


class Sweep:
    """Position of the sweep, and what it spares."""

    def __init__(self) -> None:
        self._referred = array("Q")
        self._end = 0
        self._at: int | None = None
        """Next blob to look at; None: there is nothing to do."""
        self._again = False
        """What it has passed was not compared with the newest image."""

    def begin(self, referred: array[int], end: int) -> None:
        """Delete the blobs before `end` that are not among these, which ascend."""
        self._again = self._at is not None
        self._referred, self._end, self._at = referred, end, self._at or 0

    def step(self, transaction: Any, n_added: int) -> int | None:
        """Look at some more parts. Returns where to go on, for `done` once the transaction is committed."""
        if self._at is None:
            return None
        cursor = transaction.cursor()
        cursor.set_range(blob_key(self._at))
        for _ in range(LOOKED_AT + LOOKED_AT_EACH * n_added):
            key = cursor.key()  # empty after the last one
            if not key or (number := number_in(key)) >= self._end:
                return None
            at = bisect_left(self._referred, number)
            if at < len(self._referred) and self._referred[at] == number:
                cursor.next()
            else:
                cursor.delete()  # and stand at the next one
        key = cursor.key()
        return number_in(key) if key else None

    def done(self, at: int | None) -> None:
        """Note how far a committed `step` came."""
        if at is None and self._again:
            at, self._again = 0, False
        self._at = at
