"""The framing of ZeroMQ's wire protocol (ZMTP 3), as much as a proxy needs: where a message begins and ends.

    greeting, 64 bytes      each side once; bytes 12 to 32 name the mechanism (NULL, CURVE)
    frame                   flags (1: more frames follow, 2: the length has 8 bytes, not 1, 4: command), length, body

Under CURVE the bodies are opaque, the framing is the same. https://rfc.zeromq.org/spec/23/
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

GREETING_BYTES: Final = 64
MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4
MAX_FRAME_BYTES: Final = 1 << 30
"""Longer: not ZMTP, or out of step."""


class NotZmtp(Exception):
    """These bytes are no frame."""


class Frame(NamedTuple):
    flags: int
    body: bytes


Unit = list[Frame]
"""One command, or all frames of one message."""


def mechanism(greeting: bytes) -> str:
    return greeting[12:32].rstrip(b"\0").decode("ascii", errors="replace")


async def read_unit(reader: asyncio.StreamReader) -> Unit:
    """The next command or message. Raises IncompleteReadError at the end of the stream, NotZmtp for other bytes."""
    unit: Unit = []
    while True:
        flags = (await reader.readexactly(1))[0]
        if flags & ~(MORE | LONG | COMMAND):
            raise NotZmtp(f"flags {flags:#x}")
        length = int.from_bytes(await reader.readexactly(8 if flags & LONG else 1), "big")
        if length > MAX_FRAME_BYTES:
            raise NotZmtp(f"a frame of {length} bytes")
        unit.append(Frame(flags, await reader.readexactly(length)))
        if not flags & MORE:
            return unit


def is_message(unit: Unit) -> bool:
    return bool(unit) and not unit[0].flags & COMMAND


def wire_bytes(unit: Unit) -> bytes:
    """Encode the unit as on the wire, with the lengths of its bodies."""
    parts: list[bytes] = []
    for flags, body in unit:
        long = len(body) > 255
        parts.append(bytes([flags & ~LONG | (LONG if long else 0)]))
        parts.append(len(body).to_bytes(8 if long else 1, "big"))
        parts.append(body)
    return b"".join(parts)


def as_unit(bodies: list[bytes]) -> Unit:
    """A message of these frames."""
    last = len(bodies) - 1
    return [Frame(MORE if index < last else 0, body) for index, body in enumerate(bodies)]


def bodies(unit: Unit) -> list[bytes]:
    return [frame.body for frame in unit]
