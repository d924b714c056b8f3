"""A part of a file in a file of its own, each piece with its place in the whole: rows of a rank on a host that does not
see the folder (learner.checkpoints.rows).

    place (8 bytes) | number of bytes (8 bytes) | the bytes | place | ... | sha256 of all that
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PLACE: Final = struct.Struct("<QQ")
_PIECE_BYTES: Final = 1 << 24


def pack(packed: Path, pieces: Iterable[tuple[int, memoryview | bytes]]) -> int:
    """Write pieces, each with its place. Returns the number of their bytes. Raises OSError."""
    written, digest = 0, hashlib.sha256()
    with packed.open("wb") as stream:
        for at, data in pieces:
            for part in (_PLACE.pack(at, len(data)), data):
                digest.update(part)
                stream.write(part)
            written += len(data)
        stream.write(digest.digest())
    return written


def unpack(packed: Path, file: Path) -> None:
    """Write the pieces of a packed file to their places. Raises OSError; ValueError, writing nothing, if it is
    damaged."""
    with packed.open("rb") as stream:
        left, digest = packed.stat().st_size - hashlib.sha256().digest_size, hashlib.sha256()
        end = left
        while left > 0:
            data = stream.read(min(left, _PIECE_BYTES))
            digest.update(data)
            left -= len(data)
        if left < 0 or stream.read() != digest.digest():
            raise ValueError(f"{packed.name}: its checksum is not that of its content")
        stream.seek(0)
        with opened(file) as descriptor:
            while stream.tell() < end:
                at, n_bytes = _PLACE.unpack(stream.read(_PLACE.size))
                while n_bytes:
                    data = stream.read(min(n_bytes, _PIECE_BYTES))
                    written = write_at(descriptor, memoryview(data), at)
                    at, n_bytes = at + written, n_bytes - written


@contextmanager
def opened(file: Path) -> Generator[int]:
    """A descriptor for writing to any place. Flushed to the disk at the end."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: memoryview, at: int) -> int:
    """Write all of it. The system writes at most 2 GB per call."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)
    return done
