"""Storage of the journal: one LMDB database and an image file, used by one process at a time.

    data.mdb   meta          the run's starting point
               image         number of the image's file, and of the first turn that is not in it
               l...          turns in parts, numbered without gaps; those that are in the image are deleted bit by bit
    image-N    the state at one moment (`buffer.journal.imaging`)

A commit hands its pages to the kernel before it returns: committed data survives the death of the process.
`sync="disk"` also waits for the disk, so that they survive a power failure. Every part carries a CRC. LMDB writes new
pages beside the old ones and then replaces one of two root pages, so that a process that dies in between leaves the
previous commit. A new image is a new file, which counts from the commit that names it."""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import lmdb

from buffer.config import Sync
from buffer.journal.imaging import read_image

PART_BYTES: Final = 32 << 10
"""Largest part. Each needs a contiguous run of free pages, and longer runs are seldom found."""
SWEPT_PARTS: Final = 128
"""Parts of the log that a commit deletes once they are in an image: more than it adds, and no pause."""
MAP_BYTES: Final = 16 << 30
"""Initial size of the memory map: address space, not memory. Doubled when the database needs more."""

_META: Final = b"meta"
_IMAGE: Final = b"image"
_LOG: Final = b"l"
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
        self._first_part = 0
        """First part of the log that is not in the image."""
        self._oldest_part = 0
        """No part before this one is left."""
        self._image_number = 0
        self.log_bytes = 0
        """Size of the turns after the image, without framing."""
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

        def write(transaction: Any) -> None:
            _delete_all(transaction)
            transaction.put(_META, _part(meta, last=True))

        self._transact(write)
        self._next_part = self._first_part = self._oldest_part = self.log_bytes = self._image_number = 0
        self._forget_other_images()

    def append(self, bodies: Sequence[bytes]) -> None:
        """Commit turns: all of them or none. Some parts that are no longer needed are deleted."""
        parts = [part for body in bodies for part in _parts(body)]
        end = min(self._first_part, self._oldest_part + SWEPT_PARTS + len(parts))

        def write(transaction: Any) -> None:
            for i in range(self._oldest_part, end):
                transaction.delete(_key(i))
            for i, part in enumerate(parts, self._next_part):
                transaction.put(_key(i), part)

        self._transact(write)
        self._oldest_part = end
        self._next_part += len(parts)
        self.log_bytes += sum(map(len, bodies))

    @property
    def position(self) -> tuple[int, int]:
        """The number of the next part, and the size of the log: an image of this moment is adopted with it."""
        return self._next_part, self.log_bytes

    @property
    def next_image(self) -> Path:
        """File for a new image."""
        return self._image_path(self._image_number + 1)

    def adopt(self, position: tuple[int, int]) -> None:
        """Let the file `next_image`, which is complete, take the place of the former image and of all turns before
        `position`."""
        first_part, log_bytes = position
        number = self._image_number + 1
        if self._sync:
            _flush_folder(self.path.parent)
        head = _part(struct.pack(">QQ", number, first_part), last=True)
        self._transact(lambda transaction: transaction.put(_IMAGE, head))
        self._image_number, self._first_part = number, first_part
        self.log_bytes -= log_bytes
        self._forget_other_images()

    def close(self) -> None:
        """Close the database. May be called twice."""
        self._env.close()
        with suppress(OSError):
            os.close(self._lock_fd)

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

    # -------------------------------------------------------------------------------------------------- reading

    def meta(self) -> bytes | None:
        """The run's starting point; None in a new database."""
        part = self._get(_META)
        return None if part is None else self._checked(part, "meta")[1]

    def image(self) -> bytes | None:
        """The image; None if there is none. Files of images that were never complete are removed."""
        head = self._get(_IMAGE)
        if head is None:
            self._forget_other_images()
            return None
        self._image_number, self._first_part = struct.unpack(">QQ", self._checked(head, "the image")[1])
        self._next_part = self._first_part
        self._forget_other_images()
        path = self._image_path(self._image_number)
        try:
            body = read_image(path)
        except OSError as error:
            raise StoreCorrupt(f"{path}: {error}") from error
        if body is None:
            raise StoreCorrupt(f"{path}: the checksum does not fit the image")
        return body

    def turns(self) -> Iterator[bytes]:
        """All turns after the image. Call `image` first: it determines the first turn."""
        parts: list[bytes] = []
        first = self._first()
        self._oldest_part = self._first_part if first is None else min(first, self._first_part)
        n_parts = self._count(self._first_part)
        for i in range(self._first_part, self._first_part + n_parts):
            part = self._get(_key(i))
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

    def _first(self) -> int | None:
        """Number of the oldest part of the log that is left."""
        try:
            with self._env.begin() as transaction:
                cursor = transaction.cursor()
                found = cursor.set_range(_LOG) and cursor.key().startswith(_LOG)
                return int.from_bytes(cursor.key()[1:], "big") if found else None
        except lmdb.Error as error:
            raise StoreCorrupt(f"{self.path}: {error}") from error

    def _count(self, first_part: int) -> int:
        """Number of parts of the log from this one on."""
        try:
            with self._env.begin() as transaction:
                cursor = transaction.cursor()
                n = 0
                found = cursor.set_range(_key(first_part))
                while found and cursor.key().startswith(_LOG):
                    n += 1
                    found = cursor.next()
                return n
        except lmdb.Error as error:
            raise StoreCorrupt(f"{self.path}: {error}") from error

    def _image_path(self, number: int) -> Path:
        return self.path.with_name(f"image-{number}")

    def _forget_other_images(self) -> None:
        """Remove the files of images that do not count: former ones, and those that were never complete."""
        for file in self.path.parent.glob("image-*"):
            if file != self._image_path(self._image_number):
                with suppress(OSError):
                    file.unlink()

    def _checked(self, part: bytes, what: str) -> tuple[bool, bytes]:
        if len(part) >= _HEAD.size:
            crc, last = _HEAD.unpack_from(part)
            body = part[_HEAD.size :]
            if zlib.crc32(body) == crc:
                return bool(last), body
        raise StoreCorrupt(f"{self.path}: {what}: the checksum does not fit its {len(part)} bytes")


def _key(part: int) -> bytes:
    return _LOG + part.to_bytes(8, "big")


def _part(body: bytes, *, last: bool) -> bytes:
    return _HEAD.pack(zlib.crc32(body), last) + body


def _parts(body: bytes) -> Iterator[bytes]:
    for start in range(0, max(1, len(body)), PART_BYTES):
        yield _part(body[start : start + PART_BYTES], last=start + PART_BYTES >= len(body))


def _delete_all(transaction: Any) -> None:
    cursor = transaction.cursor()
    found = cursor.first()
    while found:
        found = cursor.delete()


def _flush_folder(folder: Path) -> None:
    """Wait until the names of new files are on the disk."""
    try:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreUnwritable(str(error)) from error
