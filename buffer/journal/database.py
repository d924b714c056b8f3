"""The journal's LMDB database, opened by one process at a time: transactions, and reading parts by their keys."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import lmdb

from stillhouse.buffer.config import Sync
from stillhouse.buffer.journal.parts import HEAD, LOG, blob_key, checked, log_key, number_in

MAP_BYTES: Final = 16 << 30
"""Initial size of the memory map: address space, not memory. Doubled when the database needs more."""


class StoreUnwritable(Exception):
    """The transaction was not written: disk full, file too large, read-only or broken."""


class StoreCorrupt(Exception):
    """Committed data cannot be read back."""


class Database:
    """Opens or creates the database in `folder`. Raises StoreCorrupt, or StoreUnwritable, e.g. when another process
    has it open."""

    def __init__(self, folder: Path, *, sync: Sync) -> None:
        self.path = folder / "data.mdb"
        self._sync = sync == "disk"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.is_symlink():
                raise StoreUnwritable(f"{self.path} is a link, expected the journal's own file; remove it")
            self._lock_fd = os.open(folder / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StoreUnwritable(str(error)) from error
        try:
            self._env: Any = self._opened()
        except BaseException:
            os.close(self._lock_fd)
            raise

    def _opened(self) -> Any:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            env = lmdb.open(
                str(self.path.parent), map_size=MAP_BYTES, sync=self._sync, metasync=self._sync, lock=False, mode=0o600
            )
        except OSError as error:
            raise StoreUnwritable(f"{self.path} is locked by another process: {error}") from error
        except lmdb.DiskError as error:
            raise StoreUnwritable(f"{self.path}: {error}") from error
        except lmdb.Error as error:
            raise StoreCorrupt(f"{self.path}: {error}") from error
        # Reading a page beyond the end of the file would be a bus error. Zeros are detected by their checksum.
        expected_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        if self.path.stat().st_size < expected_bytes:
            os.truncate(self.path, expected_bytes)
        return env

    def close(self) -> None:
        """Close the database. May be called twice."""
        self._env.close()
        lock_fd, self._lock_fd = self._lock_fd, -1  # its number may soon be another file's
        if lock_fd >= 0:
            os.close(lock_fd)

    def _transact(self, write: Callable[[Any], object]) -> None:
        """Run `write(transaction)` and commit. It is run again after the database was enlarged for it."""
        while True:
            try:
                with self._env.begin(write=True) as transaction:
                    write(transaction)
                return
            except lmdb.MapFullError:
                self._env.set_mapsize(2 * self._env.info()["map_size"])
            except lmdb.PanicError as error:  # the environment is unusable now: open the file again
                self._env.close()
                self._env = self._opened()
                raise StoreUnwritable(str(error)) from error
            except lmdb.Error as error:
                raise StoreUnwritable(str(error)) from error

    def _get(self, key: bytes) -> bytes | None:
        try:
            with self._env.begin() as transaction:
                return transaction.get(key)
        except lmdb.Error as error:
            raise StoreCorrupt(f"{self.path}: {error}") from error

    def _first(self) -> int | None:
        """Number of the oldest part of the log that is left."""
        try:
            with self._env.begin() as transaction:
                cursor = transaction.cursor()
                found = cursor.set_range(LOG) and cursor.key().startswith(LOG)
                return int.from_bytes(cursor.key()[1:], "big") if found else None
        except lmdb.Error as error:
            raise StoreCorrupt(f"{self.path}: {error}") from error

    def _count(self, first_part: int) -> int:
        """Number of parts of the log from this one on."""
        try:
            with self._env.begin() as transaction:
                cursor = transaction.cursor()
                n = 0
                found = cursor.set_range(log_key(first_part))
                while found and cursor.key().startswith(LOG):
                    n += 1
                    found = cursor.next()
                return n
        except lmdb.Error as error:
            raise StoreCorrupt(f"{self.path}: {error}") from error

    def _measure_blobs(self, first_blob: int) -> tuple[int, int]:
        """Size of the blobs from this one on, and the number after the last one."""
        n_bytes, next_blob = 0, first_blob
        try:
            with self._env.begin(buffers=True) as transaction:
                cursor = transaction.cursor()
                found = cursor.set_range(blob_key(first_blob))
                while found:
                    next_blob = number_in(cursor.key()) + 1
                    n_bytes += len(cursor.value()) - HEAD.size
                    found = cursor.next()
                return n_bytes, next_blob
        except lmdb.Error as error:
            raise StoreCorrupt(f"{self.path}: {error}") from error

    def _checked(self, part: bytes, what: str) -> tuple[bool, bytes]:
        found = checked(part)
        if found is None:
            raise StoreCorrupt(f"{self.path}: {what}: the checksum does not fit its {len(part)} bytes")
        return found
