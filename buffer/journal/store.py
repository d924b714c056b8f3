"""Where the journal lies: one LMDB database, of one process at a time.

    meta          what the run began with
    image, i...   the state at one moment, in parts, and the number of the first turn that is not in it
    l...          the turns since, in parts, numbered without a gap

A commit hands its pages to the kernel before it returns: what was committed survives the death of the process.
`sync="disk"` also waits for the disk, so that it survives the loss of power. Every part carries a CRC. LMDB writes
beside what is there and then turns one of two root pages over, so that a process that dies leaves the commit before.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import lmdb

from buffer.config import Sync

PART_BYTES: Final = 32 << 10
"""A part needs as many free pages in a row. Where images came in parts of 4 MiB, there was seldom a row as long as the
last one, and the file grew with each."""
MAP_BYTES: Final = 16 << 30
"""Address space, not memory. Doubles when the database needs more."""

_META: Final = b"meta"
_IMAGE: Final = b"image"
_HEAD: Final = struct.Struct(">IB")
"""Before each part: its CRC, and whether it is the last of its turn."""


class StoreUnwritable(Exception):
    """Nothing of the transaction was written: disk full, file too large, read-only, broken."""


class StoreCorrupt(Exception):
    """What was committed cannot be read back."""


class Store:
    """Opens or makes the database in `folder`. Raises StoreCorrupt; StoreUnwritable also when another process has
    it."""

    def __init__(self, folder: Path, *, sync: Sync) -> None:
        self.path = folder / "data.mdb"
        self._sync = sync == "disk"
        self._next_part = 0
        self._n_image_parts = 0
        self.log_bytes = 0
        """In the log, framing left out."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(folder / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnwritable(str(error)) from error
        try:
            self._env: Any = self._opened()
        except BaseException:
            os.close(self._lock_fd)
            raise

    def __repr__(self) -> str:
        return f"Store({self.path}, log={self.log_bytes >> 10} KiB)"

    @property
    def file_bytes(self) -> int:
        """On the disk."""
        return self.path.stat().st_blocks * 512

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
        # A page behind the file's end would be a bus error: zeros are found out by checksum.
        expected_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        if self.path.stat().st_size < expected_bytes:
            os.truncate(self.path, expected_bytes)
        return env

    # -------------------------------------------------------------------------------------------------- writing

    def begin(self, meta: bytes) -> None:
        """Forget everything, and note what the run begins with."""
        self._transact([(_META, _part(meta, last=True))], delete=(b"",))
        self._next_part = self._n_image_parts = self.log_bytes = 0

    def append(self, bodies: Sequence[bytes]) -> None:
        """Commit turns, all or none."""
        parts = [part for body in bodies for part in _parts(body)]
        self._transact([(_key(b"l", self._next_part + i), part) for i, part in enumerate(parts)])
        self._next_part += len(parts)
        self.log_bytes += sum(map(len, bodies))

    def put_image(self, body: bytes) -> None:
        """In place of the former image and of all turns."""
        parts = [(_key(b"i", i), part) for i, part in enumerate(_parts(body))]
        told = _part(struct.pack(">QQ", len(parts), self._next_part), last=True)
        self._transact([(_IMAGE, told), *parts], delete=(b"i", b"l"))
        self.log_bytes = 0

    def close(self) -> None:
        """May be called again."""
        self._env.close()
        with suppress(OSError):
            os.close(self._lock_fd)

    def _transact(self, pairs: Sequence[tuple[bytes, bytes]], delete: Sequence[bytes] = ()) -> None:
        """`delete`: what begins with these, before `pairs` are put."""
        while True:
            try:
                with self._env.begin(write=True) as transaction:
                    for prefix in delete:
                        _delete(transaction, prefix)
                    for key, value in pairs:
                        transaction.put(key, value)
                return
            except lmdb.MapFullError:
                self._env.set_mapsize(2 * self._env.info()["map_size"])
            except lmdb.PanicError as error:  # it does not trust itself any more: ask the file
                self._env.close()
                self._env = self._opened()
                raise StoreUnwritable(str(error)) from error
            except lmdb.Error as error:
                raise StoreUnwritable(str(error)) from error

    # -------------------------------------------------------------------------------------------------- reading

    def meta(self) -> bytes | None:
        """None: nothing was begun here."""
        part = self._get(_META)
        return None if part is None else self._checked(part, "meta")[1]

    def image(self) -> bytes | None:
        told = self._get(_IMAGE)
        if told is None:
            return None
        n_parts, self._next_part = struct.unpack(">QQ", self._checked(told, "the image")[1])
        parts: list[bytes] = []
        for i in range(n_parts):
            part = self._get(_key(b"i", i))
            if part is None:
                raise StoreCorrupt(f"{self.path}: part {i} of the image is missing")
            parts.append(self._checked(part, f"part {i} of the image")[1])
        return b"".join(parts)

    def turns(self) -> Iterator[bytes]:
        """Read `image` first: it says which turn is the first."""
        parts: list[bytes] = []
        n_parts = self._count(b"l")
        for i in range(self._next_part, self._next_part + n_parts):
            part = self._get(_key(b"l", i))
            if part is None:
                raise StoreCorrupt(f"{self.path}: part {i} of the log is missing")
            last, body = self._checked(part, f"part {i} of the log")
            self._next_part += 1
            self.log_bytes += len(body)
            parts.append(body)
            if last:
                yield b"".join(parts)
                parts.clear()
        if parts:
            raise StoreCorrupt(f"{self.path}: the last turn of the log is cut off")

    def _get(self, key: bytes) -> bytes | None:
        try:
            with self._env.begin() as transaction:
                return transaction.get(key)
        except lmdb.Error as error:
            raise StoreCorrupt(f"{self.path}: {error}") from error

    def _count(self, prefix: bytes) -> int:
        try:
            with self._env.begin() as transaction:
                cursor = transaction.cursor()
                n = 0
                found = cursor.set_range(prefix)
                while found and cursor.key().startswith(prefix):
                    n += 1
                    found = cursor.next()
                return n
        except lmdb.Error as error:
            raise StoreCorrupt(f"{self.path}: {error}") from error

    def _checked(self, part: bytes, what: str) -> tuple[bool, bytes]:
        if len(part) >= _HEAD.size:
            crc, last = _HEAD.unpack_from(part)
            body = part[_HEAD.size :]
            if zlib.crc32(body) == crc:
                return bool(last), body
        raise StoreCorrupt(f"{self.path}: {what}: the checksum does not fit its {len(part)} bytes")


def _key(prefix: bytes, i: int) -> bytes:
    return prefix + i.to_bytes(8, "big")


def _part(body: bytes, *, last: bool) -> bytes:
    return _HEAD.pack(zlib.crc32(body), last) + body


def _parts(body: bytes) -> Iterator[bytes]:
    for start in range(0, max(1, len(body)), PART_BYTES):
        yield _part(body[start : start + PART_BYTES], last=start + PART_BYTES >= len(body))


def _delete(transaction: Any, prefix: bytes) -> None:
    cursor = transaction.cursor()
    found = cursor.set_range(prefix)
    while found and cursor.key().startswith(prefix):
        found = cursor.delete()
