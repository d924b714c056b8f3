"""A turn: all that one round of the buffer's loop took in, and so all that the core's next state depends on.

The journal is a sequence of turns. Applied in order to the same beginning they give the same state and the same
messages: the core looks at no clock, no random number and no file. What the server decided on its own (who fell
silent, what it refused) is in the turn as a fact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec

from protocol.codec import Received, decode
from protocol.messages import Hello, Role
from protocol.server import FromPeer


class Joined(NamedTuple):
    """A peer was let in as a new session."""

    hello: Hello


class Left(NamedTuple):
    """A session ended: silence, goodbye, too far behind, or replaced (then a Joined of the same peer follows)."""

    role: Role
    name: str


class GivenUp(NamedTuple):
    """The buffer itself must end the run."""

    reason: str


class IntakeChanged(NamedTuple):
    """New work is no longer taken in because of `trouble`; or is again (empty)."""

    trouble: str


Entry: TypeAlias = Joined | Left | FromPeer | GivenUp | IntakeChanged


@dataclass(frozen=True, slots=True)
class Turn:
    """`now_s` is the reading of the core's clock for all entries, `tick_s` that of the tick behind them, if any.
    `refused`: the server's refusals so far by code, when they have changed."""

    now_s: float
    entries: tuple[Entry, ...]
    tick_s: float | None = None
    refused: dict[str, int] | None = None

    @property
    def empty(self) -> bool:
        return not self.entries and self.tick_s is None and self.refused is None

    @property
    def newest_s(self) -> float:
        return self.now_s if self.tick_s is None else max(self.now_s, self.tick_s)


class _Joined(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    hello: Hello


class _Left(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    role: Role
    name: str


class _Said(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    role: Role
    name: str
    frames: list[bytes]


class _GivenUp(msgspec.Struct, frozen=True, array_like=True, tag="given_up"):
    reason: str


class _IntakeChanged(msgspec.Struct, frozen=True, array_like=True, tag="intake"):
    trouble: str


_Written: TypeAlias = _Joined | _Left | _Said | _GivenUp | _IntakeChanged


class _Turn(msgspec.Struct, frozen=True, array_like=True):
    now_s: float
    entries: list[_Written]
    tick_s: float | None = None
    refused: dict[str, int] | None = None


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Turn)


def encode_turn(turn: Turn) -> bytes:
    """MessagePack; what peers said is in there as its frames on the wire."""
    return _encode(_Turn(turn.now_s, [_written(e) for e in turn.entries], turn.tick_s, turn.refused))


def decode_turn(body: bytes) -> Turn:
    """Raises msgspec.DecodeError or a RemoteProtocolError when it is none."""
    turn = _decoder.decode(body)
    return Turn(turn.now_s, tuple(_entry(written) for written in turn.entries), turn.tick_s, turn.refused)


def _written(entry: Entry) -> _Written:
    match entry:
        case FromPeer(role, name, received):
            # Not `codec.encode`: it would check once more what came over the wire.
            return _Said(role, name, [_encode(received.message), *[array.tobytes() for array in received.arrays]])
        case Joined(hello):
            return _Joined(hello)
        case Left(role, name):
            return _Left(role, name)
        case GivenUp(reason):
            return _GivenUp(reason)
        case IntakeChanged(trouble):
            return _IntakeChanged(trouble)


def _entry(written: _Written) -> Entry:
    match written:
        case _Said(role, name, frames):
            return FromPeer(role, name, Received(*decode(frames)))
        case _Joined(hello):
            return Joined(hello)
        case _Left(role, name):
            return Left(role, name)
        case _GivenUp(reason):
            return GivenUp(reason)
        case _IntakeChanged(trouble):
            return IntakeChanged(trouble)
