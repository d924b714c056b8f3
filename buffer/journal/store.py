"""Storage of the journal: one LMDB database and an image file, used by one process at a time.

    data.mdb   meta          the run's starting point
               image         number of the image's file, and of the first turn and the first blob that came after it
               l...          turns in parts, numbered without gaps; those that are in the image are deleted bit by bit
               v...          blobs (`buffer.blobs`) in parts; those that nothing refers to are deleted bit by bit
    image-N    the state at one moment (`buffer.journal.imaging`)

A commit hands its pages to the kernel before it returns: committed data survives the death of the process.
`sync="disk"` also waits for the disk, so that they survive a power failure. Every part carries a CRC. LMDB writes new
pages beside the old ones and then replaces one of two root pages, so that a process that dies in between leaves the
previous commit. A new image is a new file, which counts from the commit that names it."""

from __future__ import annotations

import logging
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from stillhouse.buffer.config import Sync
from stillhouse.buffer.journal.database import Database, StoreCorrupt, StoreUnwritable
from stillhouse.buffer.journal.imaging import read_blobs, read_image
from stillhouse.buffer.journal.parts import blob_key, in_parts, log_key, one_part
from stillhouse.buffer.journal.sweep import Sweep

SWEPT_PARTS: Final = 128
"""Parts of the log that a commit deletes once they are in an image: more than it adds, and no pause."""
_META: Final = b"meta"
_IMAGE: Final = b"image"
_IMAGE_HEAD: Final = struct.Struct(">QQQ")
"""Number of the image, and of the first part and the first blob after it."""
_blob_decoder = msgspec.msgpack.Decoder(list[bytes])

log = logging.getLogger(__name__)


Blob: TypeAlias = tuple[int, bytes]
"""Number and content."""


class Position(NamedTuple):
    """A place in the log."""

    next_part: int
    next_blob: int
    log_bytes: int


class JournalStore(Database):
    """Opens or creates the database in `folder`. Raises StoreCorrupt, or StoreUnwritable, e.g. when another process
    has it open."""

    def __init__(self, folder: Path, *, sync: Sync) -> None:
        self._next_part = 0
        self._first_part = 0
        """First part of the log that is not in the image."""
        self._oldest_part = 0
        """No part before this one is left."""
        self._next_blob = 1
        self._first_blob = 1
        """First blob that came after the image."""
        self._sweep = Sweep()
        self._image_number = 0
        self._newest_image = 0
        """Highest number that any image's file was given."""
        self._doubtful = False
        """The commit that was to name `_newest_image` failed, and it is not known whether the database names it."""
        self.log_bytes = 0
        """Size of the turns and blobs after the image, without framing."""
        super().__init__(folder, sync=sync)

    def __repr__(self) -> str:
        return f"Store({self.path}, log={self.log_bytes >> 10} KiB)"

    # -------------------------------------------------------------------------------------------------- writing

    def begin(self, meta: bytes) -> None:
        """Delete everything, and store the run's starting point."""

        def write(transaction: Any) -> None:
            _delete_all(transaction)
            transaction.put(_META, one_part(meta, last=True))

        self._transact(write)
        self._next_part = self._first_part = self._oldest_part = self.log_bytes = self._image_number = 0
        self._next_blob = self._first_blob = 1
        self._sweep = Sweep()
        self._doubtful = False
        self._forget_other_images()

    def append(self, bodies: Sequence[bytes], blobs: Sequence[Blob] = ()) -> None:
        """Commit turns with their blobs: all of them or none. Some of what is no longer needed is deleted."""
        parts = [part for body in bodies for part in in_parts(body)]
        blob_parts = [(blob_key(n, i), part) for n, body in blobs for i, part in enumerate(in_parts(body))]
        end = min(self._first_part, self._oldest_part + SWEPT_PARTS + len(parts))
        sweep_at = None

        def write(transaction: Any) -> None:
            nonlocal sweep_at
            for i in range(self._oldest_part, end):
                transaction.delete(log_key(i))
            sweep_at = self._sweep.step(transaction, len(blob_parts))
            for i, part in enumerate(parts, self._next_part):
                transaction.put(log_key(i), part)
            for key, part in blob_parts:
                if not transaction.put(key, part, append=True):
                    transaction.put(key, part)  # a commit took effect, though the system reported an error
            if self._doubtful:
                self._put_head(transaction, self._image_number, self._first_part, self._first_blob)

        self._transact(write)
        if self._doubtful:
            self._doubtful = False
            self._forget_other_images()
        self._oldest_part = end
        self._sweep.done(sweep_at)
        self._next_part += len(parts)
        if blobs:
            self._next_blob = blobs[-1][0] + 1
        self.log_bytes += sum(map(len, bodies)) + sum(len(body) for _, body in blobs)

    @property
    def position(self) -> Position:
        """The present end of the log: an image of this moment is adopted with it."""
        return Position(self._next_part, self._next_blob, self.log_bytes)

    @property
    def next_image(self) -> Path:
        """File for a new image."""
        return self._image_path(self._newest_image + 1)

    def adopt(self, position: Position) -> None:
        """Let the file `next_image`, which is complete, take the place of the former image and of all turns before
        `position`. Raises StoreUnwritable; the former image then still counts, and the file is removed at once, or with
        the next commit if the database may name it."""
        first_part, first_blob, log_bytes = position
        number = self._newest_image = self._newest_image + 1
        referred = array("Q")
        try:
            referred = self._blobs_of(number)
            if self._sync:
                _flush_folder(self.path.parent)
            self._transact(lambda transaction: self._put_head(transaction, number, first_part, first_blob))
        except StoreUnwritable:
            named = self._named_image()
            if named != number:
                self._doubtful = named is None
                self._forget_other_images()
                raise
            log.warning("%s was committed, though the system reported an error", self._image_path(number))
        self._image_number, self._first_part, self._first_blob = number, first_part, first_blob
        self._doubtful = False
        self.log_bytes -= log_bytes
        self._sweep.begin(referred, first_blob)
        self._forget_other_images()

    def _blobs_of(self, number: int) -> array[int]:
        """Blobs to which an image refers."""
        path = self._image_path(number)
        try:
            blobs = read_blobs(path)
        except OSError as error:
            raise StoreUnwritable(f"{path}: {error}") from error
        if blobs is None:
            raise StoreUnwritable(f"{path}: the checksum does not fit the list of blobs")
        return blobs

    def _put_head(self, transaction: Any, *head: int) -> None:
        transaction.put(_IMAGE, one_part(_IMAGE_HEAD.pack(*head), last=True))

    def _named_image(self) -> int | None:
        """Number of the image that the database names, 0 for none. None: it cannot be read now."""
        try:
            head = self._get(_IMAGE)
            return 0 if head is None else _IMAGE_HEAD.unpack(self._checked(head, "the image")[1])[0]
        except StoreCorrupt:
            return None

    # -------------------------------------------------------------------------------------------------- reading

    def meta(self) -> bytes | None:
        """The run's starting point; None in a new database."""
        part = self._get(_META)
        return None if part is None else self._checked(part, "meta")[1]

    def image(self) -> bytes | None:
        """The image; None if there is none. Files of images that were never complete are removed."""
        head = self._get(_IMAGE)
        if head is not None:
            body = self._checked(head, "the image")[1]
            self._image_number, self._first_part, self._first_blob = _IMAGE_HEAD.unpack(body)
        self._newest_image = self._image_number
        if self._image_number == 0:
            self._forget_other_images()
            return None
        self._next_part = self._first_part
        self._forget_other_images()
        path = self._image_path(self._image_number)
        try:
            body = read_image(path)
            self._sweep.begin(self._blobs_of(self._image_number), self._first_blob)
        except (OSError, StoreUnwritable) as error:
            raise StoreCorrupt(f"{path}: {error}") from error
        if body is None:
            raise StoreCorrupt(f"{path}: the checksum does not fit the image")
        return body

    def blob(self, number: int) -> list[bytes]:
        """The bytes of a blob's arrays."""
        what, parts, last = f"blob {number}", list[bytes](), False
        while not last:
            part = self._get(blob_key(number, len(parts)))
            if part is None:
                raise StoreCorrupt(f"{self.path}: part {len(parts)} of {what} is missing")
            last, body = self._checked(part, what)
            parts.append(body)
        try:
            return _blob_decoder.decode(parts[0] if len(parts) == 1 else b"".join(parts))
        except msgspec.DecodeError as error:
            raise StoreCorrupt(f"{self.path}: {what}: {error}") from error

    def turns(self) -> Iterator[bytes]:
        """All turns after the image. Call `image` first: it determines the first turn."""
        parts: list[bytes] = []
        first = self._first()
        self._oldest_part = self._first_part if first is None else min(first, self._first_part)
        n_parts = self._count(self._first_part)
        blob_bytes, self._next_blob = self._measure_blobs(self._first_blob)
        self.log_bytes += blob_bytes
        for i in range(self._first_part, self._first_part + n_parts):
            part = self._get(log_key(i))
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

    def _image_path(self, number: int) -> Path:
        return self.path.with_name(f"image-{number}")

    def _forget_other_images(self) -> None:
        """Remove the files of images that do not count: former ones, and those that were never complete."""
        kept = {self._image_path(self._image_number), *([self._image_path(self._newest_image)] * self._doubtful)}
        for file in self.path.parent.glob("image-*"):
            if file not in kept:
                with suppress(OSError):
                    file.unlink()


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
