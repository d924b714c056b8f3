"""Append-only report files that survive a full disk: rows that cannot be written are counted, and writing continues
with whole rows once there is room again."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

LOG_EVERY_S: Final = 60.0
"""Shortest time between two error lines, however many rows fail."""


class Unwritten:
    """Counts report rows that could not be written, by file, and logs them. Not thread-safe."""

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()
        self._failing: set[str] = set()
        self._logged_s: float | None = None
        self._logged_rows = 0
        self._failure_logged = False

    @property
    def rows_total(self) -> int:
        return sum(self._rows.values())

    def count(self, file: str, rows: int, error: OSError) -> None:
        """Count `rows` of `file` that were not written because of `error`."""
        self._rows[file] += rows
        self._failing.add(file)
        now_s = time.monotonic()
        if self._logged_s is None or now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            self._failure_logged = True
            self._log(f": {error}; training goes on, and later rows are written once there is room")

    def written(self, file: str) -> None:
        """Note that `file` could be written to."""
        if file not in self._failing:
            return
        self._failing.discard(file)
        if not self._failing and self._failure_logged:
            self._failure_logged = False
            self._log("; all reports are being written again")

    def close(self) -> None:
        """Log the final count, if rows were lost since the last error line."""
        if self.rows_total > self._logged_rows:
            self._log(" in all")

    def _log(self, rest: str) -> None:
        self._logged_rows = self.rows_total
        by_file = ", ".join(f"{file} {rows}" for file, rows in sorted(self._rows.items()))
        log.error("metrics not written: %d rows (%s)%s", self.rows_total, by_file, rest)


class AppendFile:
    """A file that grows by whole rows: the rest of a row whose write failed is cut off again. A row has been passed to
    the operating system when `append` returns. Not thread-safe, and the only writer of its file."""

    def __init__(self, path: Path, unwritten: Unwritten, *, first: bytes = b"") -> None:
        """`first`: data that must precede all rows. If it cannot be written now, it is written with the next row."""
        self._path = path
        self._unwritten = unwritten
        self._owed = first
        self._descriptor: int | None = None
        self._whole_bytes = 0
        self._torn = False
        self._closed = False
        self.append(b"", rows=0)

    def append(self, data: bytes, *, rows: int) -> bool:
        """Write `data`, which contains `rows` rows. Returns False if that failed; `Unwritten` counts and logs the
        loss."""
        if self._closed:
            raise ValueError(f"got a row for {self._path}, which is closed; expected none after close()")
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
        except OSError as error:  # network file systems report a full disk here
            self._unwritten.count(self._path.name, 0, error)

    def _write(self, data: bytes) -> None:
        """Write all of `data` or nothing. Raises OSError."""
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
            )
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
                raise error from None  # _torn: it is cut before the next row
            raise
        self._whole_bytes += len(data)

    def _cut(self, descriptor: int) -> None:
        os.ftruncate(descriptor, self._whole_bytes)
        self._torn = False
