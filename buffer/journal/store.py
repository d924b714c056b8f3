"""Storage of the journal: one LMDB database, used by one process at a time.

    meta          the run's starting point
    image, i...   the state at one moment, in parts, and the number of the first turn that is not in it
    l...          the turns since, in parts, numbered without gaps

A commit hands its pages to the kernel before it returns: committed data survives the death of the process.
`sync="disk"` also waits for the disk, so that they survive a power failure. Every part carries a CRC. LMDB writes new
pages beside the old ones and then replaces one of two root pages, so that a process that dies in between leaves the
previous commit."""

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
"""Largest part. Each needs a contiguous run of free pages: with parts of 4 MiB there was seldom a run as long as the
last image had taken, and the file grew with every image."""
MAP_BYTES: Final = 16 << 30
"""Initial size of the memory map: address space, not memory. Doubled when the database needs more."""

_META: Final = b"meta"
_IMAGE: Final = b"image"
_HEAD: Final = struct.Struct(">IB")
"""Header of a part: its CRC, and a flag for the last part of a turn."""


class StoreUnwritable(Exception):
    """The transaction was not written: disk full, file too large, read-only or broken."""


class StoreCorrupt(Exception):
    """Committed data cannot be read back."""


class Store:
    """Opens or creates the database in `folder`. Raises StoreCorrupt, or StoreUnwritable, e.g. when another process
    has it open."""

    def __init__(self, folder: Path, *, sync: Sync) -> None:
        self.path = folder / "data.mdb"
        self._sync = sync == "disk"
        self._next_part = 0
        self.log_bytes = 0
        """Size of the log, without framing."""
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

    # -------------------------------------------------------------------------------------------------- writing

    def begin(self, meta: bytes) -> None:
        """Delete everything, and store the run's starting point."""
        self._transact([(_META, _part(meta, last=True))], delete=(b"",))
        self._next_part = self.log_bytes = 0

    def append(self, bodies: Sequence[bytes]) -> None:
        """Commit turns: all of them or none."""
        parts = [part for body in bodies for part in _parts(body)]
        self._transact([(_key(b"l", self._next_part + i), part) for i, part in enumerate(parts)])
        self._next_part += len(parts)
        self.log_bytes += sum(map(len, bodies))

    def put_image(self, body: bytes) -> None:
        """Replace the former image and all turns by a new image."""
        parts = [(_key(b"i", i), part) for i, part in enumerate(_parts(body))]
        head = _part(struct.pack(">QQ", len(parts), self._next_part), last=True)
        self._transact([(_IMAGE, head), *parts], delete=(b"i", b"l"))
        self.log_bytes = 0

    def close(self) -> None:
        """Close the database. May be called twice."""
        self._env.close()
        with suppress(OSError):
            os.close(self._lock_fd)

    def _transact(self, pairs: Sequence[tuple[bytes, bytes]], delete: Sequence[bytes] = ()) -> None:
        """Put `pairs` in one transaction, after deleting all keys with the prefixes in `delete`."""
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
            except lmdb.PanicError as error:  # the environment is unusable now: open the file again
                self._env.close()
                self._env = self._opened()
                raise StoreUnwritable(str(error)) from error
            except lmdb.Error as error:
                raise StoreUnwritable(str(error)) from error

    # -------------------------------------------------------------------------------------------------- reading

    def meta(self) -> bytes | None:
        """The run's starting point; None in a new database."""
        part = self._get(_META)
        return None if part is None else self._checked(part, "meta")[1]

    def image(self) -> bytes | None:
        """The image; None if there is none."""
        head = self._get(_IMAGE)
        if head is None:
            return None
        n_parts, self._next_part = struct.unpack(">QQ", self._checked(head, "the image")[1])
        parts: list[bytes] = []
        for i in range(n_parts):
            part = self._get(_key(b"i", i))
            if part is None:
                raise StoreCorrupt(f"{self.path}: part {i} of the image is missing")
            parts.append(self._checked(part, f"part {i} of the image")[1])
        return b"".join(parts)

    def turns(self) -> Iterator[bytes]:
        """All turns after the image. Call `image` first: it determines the first turn."""
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
