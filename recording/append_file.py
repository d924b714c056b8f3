"""Files of reports that a full disk does not end the training with: rows that cannot be written are counted, and
writing goes on, whole rows only, once it can.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

TELL_EVERY_S: Final = 60.0
"""At most one error line in so long, however many rows fail."""


class Unwritten:
    """Rows of reports that could not be written, by file. One thread."""

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()
        self._failing: set[str] = set()
        self._told_s: float | None = None
        self._told_rows = 0
        self._told_of_failing = False

    @property
    def rows_total(self) -> int:
        return sum(self._rows.values())

    @property
    def rows_by_file(self) -> dict[str, int]:
        return dict(self._rows)

    def count(self, file: str, rows: int, error: OSError) -> None:
        """`rows` of `file` were not written, because of `error`."""
        self._rows[file] += rows
        self._failing.add(file)
        now_s = time.monotonic()
        if self._told_s is None or now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            self._told_of_failing = True
            self._tell(f": {error}; training goes on, and later rows are written once there is room")

    def written(self, file: str) -> None:
        """`file` could be written to."""
        if file not in self._failing:
            return
        self._failing.discard(file)
        if not self._failing and self._told_of_failing:
            self._told_of_failing = False
            self._tell("; all reports are written again")

    def close(self) -> None:
        """The last word, if more rows were lost than have been told of."""
        if self.rows_total > self._told_rows:
            self._tell(" in all")

    def _tell(self, rest: str) -> None:
        self._told_rows = self.rows_total
        by_file = ", ".join(f"{file} {rows}" for file, rows in sorted(self._rows.items()))
        log.error("metrics not written: %d rows (%s)%s", self.rows_total, by_file, rest)


class AppendFile:
    """Grows by whole rows: what a failed write left of one is cut off again. Each row is with the system when `append`
    returns. One thread; nobody else writes to the file."""

    def __init__(self, path: Path, unwritten: Unwritten, *, first: bytes = b"") -> None:
        """`first` has to be in the file before any row; it is tried again with each one until it is."""
        self._path = path
        self._unwritten = unwritten
        self._owed = first
        self._descriptor: int | None = None
        self._whole_bytes = 0
        self._torn = False
        self._closed = False
        self.append(b"", rows=0)

    def append(self, data: bytes, *, rows: int) -> bool:
        """Write `data`, which is `rows` rows; False if it could not be (counted and told by `Unwritten`)."""
        if self._closed:
            raise ValueError(f"{self._path} is closed; expected no row after that")
        try:
            self._write(self._owed + data)
        except OSError as error:
            self._unwritten.count(self._path.name, rows, error)
            return False
        self._owed = b""
        self._unwritten.written(self._path.name)
        return True

    def close(self) -> None:
        descriptor, self._descriptor, self._closed = self._descriptor, None, True
        if descriptor is None:
            return
        try:
            os.close(descriptor)
        except OSError as error:  # network file systems tell of a full disk here
            self._unwritten.count(self._path.name, 0, error)

    def _write(self, data: bytes) -> None:
        """All of it or nothing. Raises OSError."""
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._whole_bytes = os.fstat(self._descriptor).st_size
        if self._torn:
            self._cut(self._descriptor)
        try:
            done = 0
            while done < len(data):
                done += os.write(self._descriptor, data[done:])
        except OSError as error:
            self._torn = True
            try:
                self._cut(self._descriptor)
            except OSError:
                raise error from None  # cut before the next row
            raise
        self._whole_bytes += len(data)

    def _cut(self, descriptor: int) -> None:
        os.ftruncate(descriptor, self._whole_bytes)
        self._torn = False
