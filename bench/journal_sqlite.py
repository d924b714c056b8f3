"""The journal's store on SQLite in WAL mode, for comparison (`bench/journal.py`)."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from stillhouse.buffer.config import Sync
from stillhouse.buffer.journal.database import StoreCorrupt, StoreUnwritable

PART_BYTES: Final = 64 << 20
"""SQLite's rows end at 1 GB."""
PAGE_BYTES: Final = 4 << 10
CHECKPOINT_PAGES: Final = 4096
"""16 MiB of WAL are copied into the database at a time."""
WAL_LIMIT_BYTES: Final = 64 << 20
"""After an image is written the WAL is truncated to this size."""

_SCHEMA: Final = """
CREATE TABLE meta (id INTEGER PRIMARY KEY CHECK (id = 0), crc INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE image (id INTEGER PRIMARY KEY, next_turn INTEGER NOT NULL, crc INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE log (id INTEGER PRIMARY KEY, last INTEGER NOT NULL, crc INTEGER NOT NULL, body BLOB NOT NULL);
"""


class SqliteStore:
    """Opens or makes `folder/journal.sqlite`. Raises StoreCorrupt; StoreUnwritable also when another process has it."""

    def __init__(self, folder: Path, *, sync: Sync) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "journal.sqlite"
        self._next_part = 0
        self.log_bytes = 0
        """In the log, framing left out."""
        try:
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=0.0, check_same_thread=False)
        except sqlite3.OperationalError as error:
            raise StoreUnwritable(f"{self.path}: {error}") from error
        try:
            self._prepare(sync)
        except BaseException:
            self._db.close()
            raise

    def __repr__(self) -> str:
        return f"SqliteStore({self.path}, log={self.log_bytes >> 10} KiB)"

    @property
    def file_bytes(self) -> int:
        """Size of the database and its WAL on disk."""
        wal = self.path.with_name(self.path.name + "-wal")
        return sum(file.stat().st_size for file in (self.path, wal) if file.exists())

    def _prepare(self, sync: Sync) -> None:
        try:
            for pragma in (
                f"page_size = {PAGE_BYTES}",
                "locking_mode = EXCLUSIVE",  # also: the index of the WAL is in memory, not in a file of its own
                "journal_mode = WAL",
                f"synchronous = {'FULL' if sync == 'disk' else 'NORMAL'}",
                f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
                f"journal_size_limit = {WAL_LIMIT_BYTES}",
            ):
                self._db.execute(f"PRAGMA {pragma}")
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'log'").fetchone():
                self._transact([(statement, ()) for statement in _SCHEMA.strip().split("\n")])
        except sqlite3.OperationalError as error:
            raise StoreUnwritable(f"{self.path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise StoreCorrupt(f"{self.path}: {error}") from error

    # -------------------------------------------------------------------------------------------------- writing

    def begin(self, meta: bytes) -> None:
        """Forget everything, and note what the run begins with."""
        statements = [(f"DELETE FROM {table}", ()) for table in ("meta", "image", "log")]
        self._transact([*statements, ("INSERT INTO meta VALUES (0, ?, ?)", (zlib.crc32(meta), meta))])
        self._next_part = self.log_bytes = 0

    def append(self, bodies: Sequence[bytes]) -> None:
        """Commit turns, all or none."""
        rows = [
            (i, last, zlib.crc32(part), part)
            for i, (last, part) in enumerate((p for body in bodies for p in _parts(body)), self._next_part)
        ]
        self._transact([("INSERT OR REPLACE INTO log VALUES (?, ?, ?, ?)", row) for row in rows])
        self._next_part += len(rows)
        self.log_bytes += sum(map(len, bodies))

    def put_image(self, body: bytes) -> None:
        """In place of the former image and of all turns."""
        rows = [(i, self._next_part, zlib.crc32(part), part) for i, (_, part) in enumerate(_parts(body))]
        self._transact(
            [
                ("DELETE FROM image", ()),
                *[("INSERT INTO image VALUES (?, ?, ?, ?)", row) for row in rows],
                ("DELETE FROM log", ()),
            ]
        )
        self.log_bytes = 0

    def close(self) -> None:
        """May be called again."""
        self._db.close()

    def _transact(self, statements: Sequence[tuple[str, Sequence[object]]]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for statement, values in statements:
                self._db.execute(statement, values)
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise StoreUnwritable(str(error)) from error

    def turns(self) -> Iterator[bytes]:
        for (body,) in self._db.execute("SELECT body FROM log ORDER BY id"):
            yield body


def _parts(body: bytes) -> Iterator[tuple[bool, bytes]]:
    """(is it the last one, bytes)"""
    if len(body) <= PART_BYTES:
        yield True, body
        return
    for start in range(0, len(body), PART_BYTES):
        yield start + PART_BYTES >= len(body), body[start : start + PART_BYTES]
