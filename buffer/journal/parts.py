"""Records of the journal's database in parts, each with a checksum, and their keys."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

PART_BYTES: Final = 32 << 10
"""Largest part. Each needs a contiguous run of free pages, and longer runs are seldom found."""
LOG: Final = b"l"
"""Prefix of the turns' parts."""
BLOB: Final = b"v"
"""Prefix of the blobs' parts. These are the highest keys: LMDB appends without splitting pages that are full."""
HEAD: Final = struct.Struct(">IB")
"""Header of a part: its CRC, and a flag for the last part of a record."""
_BLOB_KEY: Final = struct.Struct(">cQI")


def log_key(part: int) -> bytes:
    """Key of a part of the log, which are numbered over all turns."""
    return LOG + part.to_bytes(8, "big")


def blob_key(number: int, part: int = 0) -> bytes:
    """Key of a part of a blob, which are numbered in each blob."""
    return _BLOB_KEY.pack(BLOB, number, part)


def number_in(key: bytes | memoryview) -> int:
    """Number of the blob that has this key."""
    return _BLOB_KEY.unpack(key)[1]


def one_part(body: bytes, *, last: bool) -> bytes:
    """A part with its header."""
    return HEAD.pack(zlib.crc32(body), last) + body


def in_parts(body: bytes) -> Iterator[bytes]:
    """A record as parts."""
    for start in range(0, max(1, len(body)), PART_BYTES):
        yield one_part(body[start : start + PART_BYTES], last=start + PART_BYTES >= len(body))


def checked(part: bytes) -> tuple[bool, bytes] | None:
    """Whether it is the last part of its record, and its content. None if it is damaged."""
    if len(part) >= HEAD.size:
        crc, last = HEAD.unpack_from(part)
        body = part[HEAD.size :]
        if zlib.crc32(body) == crc:
            return bool(last), body
    return None
