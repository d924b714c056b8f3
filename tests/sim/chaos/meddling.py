"""Faults of single messages on a plain link: what a proxy passes on in place of one message."""

from __future__ import annotations

from random import Random
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from stillhouse.protocol.messages import PROTOCOL_VERSION
from stillhouse.protocol.sockets import checksum
from tests.sim.chaos.zmtp import Unit, as_unit, bodies, wire_bytes

Meddling: TypeAlias = Literal["duplicate", "corrupt", "truncate", "garbage", "version", "tear", "noise"]
MEDDLINGS: Final[tuple[Meddling, ...]] = get_args(Meddling)
GARBAGE_BYTES: Final = 200


class Passed(msgspec.Struct, frozen=True):
    """The bytes that are sent in place of the message."""

    data: bytes
    cut: bool = False
    """The connection ends behind it."""


def meddle(kind: Meddling, unit: Unit, rng: Random) -> Passed:
    """duplicate: the message twice. corrupt: some bits of one frame flipped. truncate: one frame shortened, or the last
    one left out. garbage: a message of random frames before it. version: a Hello of another version of the protocol
    before it. tear: half of it, then the connection is gone. noise: random bytes that are no ZMTP frame."""
    plain = wire_bytes(unit)
    match kind:
        case "duplicate":
            return Passed(plain * 2)
        case "corrupt":
            return Passed(wire_bytes(as_unit(_corrupted(bodies(unit), rng))))
        case "truncate":
            return Passed(wire_bytes(as_unit(_truncated(bodies(unit), rng))))
        case "garbage":
            junk = [rng.randbytes(rng.randrange(GARBAGE_BYTES)) for _ in range(rng.randint(1, 4))]
            return Passed(wire_bytes(as_unit(junk)) + plain)
        case "version":
            hello = {"type": "Hello", "protocol_version": PROTOCOL_VERSION + 1, "role": "actor", "novel": rng.random()}
            header = msgspec.msgpack.encode(hello)
            return Passed(wire_bytes(as_unit([header, checksum([header])])) + plain)
        case "tear":
            return Passed(plain[: rng.randrange(1, len(plain))], cut=True)
        case "noise":
            return Passed(b"\xff" + rng.randbytes(GARBAGE_BYTES), cut=False)


def _corrupted(frames: list[bytes], rng: Random) -> list[bytes]:
    index = rng.choice([i for i, frame in enumerate(frames) if frame] or [0])
    changed = bytearray(frames[index])
    for _ in range(rng.randint(1, 8) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return [*frames[:index], bytes(changed), *frames[index + 1 :]]


def _truncated(frames: list[bytes], rng: Random) -> list[bytes]:
    if len(frames) > 1 and rng.random() < 0.5:
        return frames[:-1]
    index = rng.randrange(len(frames))
    shorter = frames[index][: rng.randrange(max(1, len(frames[index])))]
    return [*frames[:index], shorter, *frames[index + 1 :]]
