"""The core as the journal sees it: turns in, messages out. Live operation and replay run the same code.

A turn is all that one round of the buffer's loop took in, and so all that the core's next state depends on. The journal
is a sequence of turns. Applied in order to the same beginning they give the same state and the same messages: the core
reads no clock, no random number and no file. What the server decided by itself (which peer fell silent, what it
refused) is recorded in the turn as a fact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeAlias

import msgspec

from stillhouse.buffer.acks import acknowledged_together
from stillhouse.buffer.blobs import Load, numbered
from stillhouse.buffer.peers import KEPT
from stillhouse.buffer.state import BufferState, Outgoing
from stillhouse.protocol.codec import Received, decode, encode
from stillhouse.protocol.flow import UNNUMBERED
from stillhouse.protocol.handshake import PeerId
from stillhouse.protocol.messages import Batch, Heartbeat, Hello, Role, Snapshot
from stillhouse.protocol.server_events import FromPeer
from stillhouse.protocol.session import SessionBook


class Joined(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    """A peer was admitted with a new session."""

    hello: Hello


class Left(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """A session ended: silence, Goodbye, too far behind, or replaced (a Joined of the same peer then follows)."""

    role: Role
    name: str


class GivenUp(msgspec.Struct, frozen=True, array_like=True, tag="given_up"):
    """The buffer itself ends the run."""

    reason: str


Entry: TypeAlias = Joined | Left | FromPeer | GivenUp


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of the loop. `now_s`: the core's clock for all entries; `tick_s`: for the tick after them, if any.
    `refused`: the server's refusals so far, by code, if they have changed."""

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


class Encoded(NamedTuple):
    """A turn as it is stored, and its blobs by number."""

    body: bytes
    blobs: tuple[tuple[int, bytes], ...] = ()


class _Said(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    role: Role
    name: str
    frames: list[bytes]
    """Those of blobs are left out."""
    blobs: tuple[int, ...] = ()
    """How many arrays each blob has, and the numbers as in `buffer.blobs.Arrays`. Nothing if all are 0."""


class _Turn(msgspec.Struct, frozen=True, array_like=True):
    now_s: float
    entries: list[Joined | Left | _Said | GivenUp]
    tick_s: float | None = None
    refused: dict[str, int] | None = None


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Turn)


def encode_turn(turn: Turn, blobs_total: int) -> Encoded:
    """Encode a turn as MessagePack. Messages of peers are kept as their frames on the wire. `blobs_total`: blobs that
    came before this turn."""
    blobs: list[tuple[int, bytes]] = []
    entries = [
        _said(entry, blobs_total + len(blobs), blobs) if isinstance(entry, FromPeer) else entry
        for entry in turn.entries
    ]
    return Encoded(_encode(_Turn(turn.now_s, entries, turn.tick_s, turn.refused)), tuple(blobs))


def decode_turn(body: bytes, load: Load) -> Turn:
    """`load` reads the turn's blobs. Raises msgspec.DecodeError or RemoteProtocolError if `body` is not a turn."""
    turn = _decoder.decode(body)
    entries = [
        FromPeer(entry.role, entry.name, Received(*decode(_frames(entry, load)))) if isinstance(entry, _Said) else entry
        for entry in turn.entries
    ]
    return Turn(turn.now_s, tuple(entries), turn.tick_s, turn.refused)


def _said(entry: FromPeer, blobs_total: int, blobs: list[tuple[int, bytes]]) -> _Said:
    """The message of a peer, without its blobs, which are added to `blobs`."""
    # Not `codec.encode`, which would validate again what the server has already validated.
    message, arrays = entry.received
    if isinstance(message, Heartbeat):  # the rest is for people, and comes anew each second
        decisive = {name: value for name, value in message.stats.items() if name in KEPT}
        message = msgspec.structs.replace(message, stats=decisive)
    header, frames = _encode(message), [array.tobytes() for array in arrays]
    numbers = numbered(message, arrays, blobs_total).numbers
    if not any(numbers):
        return _Said(entry.role, entry.name, [header, *frames])
    each = len(frames) // len(numbers)
    groups = [frames[i * each : (i + 1) * each] for i in range(len(numbers))]
    blobs += [(number, _encode(group)) for number, group in zip(numbers, groups, strict=True) if number]
    inline = [frame for number, group in zip(numbers, groups, strict=True) if not number for frame in group]
    return _Said(entry.role, entry.name, [header, *inline], (each, *numbers))


def _frames(said: _Said, load: Load) -> list[bytes]:
    """The frames of a peer's message, with those of its blobs."""
    if not said.blobs:
        return said.frames
    inline = iter(said.frames)
    frames = [next(inline)]
    each, *numbers = said.blobs
    for number in numbers:
        frames += load(number) if number else islice(inline, each)
    return frames


class Core:
    """The buffer's state, and the messages that the server refused, which the ledger reports as well."""

    def __init__(self, state: BufferState) -> None:
        self.state = state
        self.refused: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"Core({self.state!r})"

    def apply(self, turn: Turn) -> list[Outgoing]:
        """Apply one turn. Returns the messages to send, in order."""
        return acknowledged_together(self.answers(turn))

    def answers(self, turn: Turn) -> list[Outgoing]:
        """The same, with an acknowledgement for every segment."""
        if turn.refused is not None:
            self.refused = turn.refused
        outgoing: list[Outgoing] = []
        for entry in turn.entries:
            match entry:
                case FromPeer(role, name, received):
                    outgoing += self.state.handle(turn.now_s, role, name, received.message, received.arrays)
                case Joined(hello):
                    outgoing += self.state.peer_joined(
                        turn.now_s, hello.role, hello.name, hello.incarnation, hello.pool
                    )
                case Left(role, name):
                    outgoing += self.state.peer_lost(turn.now_s, role, name)
                case GivenUp(reason):
                    outgoing += self.state.give_up(reason)
        if turn.tick_s is not None:
            outgoing += self.state.tick(turn.tick_s)
        return [self._completed(out) for out in outgoing]

    def snapshot(self, now_s: float) -> Snapshot:
        """Snapshot of the state, with the server's refusals added to `rejected`."""
        return self._with_refusals(self.state.snapshot(now_s))

    def _completed(self, out: Outgoing) -> Outgoing:
        message = out.message
        if isinstance(message, Snapshot):
            return out._replace(message=self._with_refusals(message))
        if isinstance(message, Batch):
            return out._replace(
                message=msgspec.structs.replace(message, snapshot=self._with_refusals(message.snapshot))
            )
        return out

    def _with_refusals(self, snapshot: Snapshot) -> Snapshot:
        if not self.refused:
            return snapshot
        rejected = dict(snapshot.ledger.rejected)
        for code, n in self.refused.items():
            rejected[code] = rejected.get(code, 0) + n
        return msgspec.structs.replace(snapshot, ledger=msgspec.structs.replace(snapshot.ledger, rejected=rejected))


def replay(core: Core, book: SessionBook, turns: Iterable[Turn]) -> float | None:
    """Apply recorded turns again, to the sessions too. Returns the newest clock reading in them."""
    newest_s: float | None = None
    for turn in turns:
        _replay_sessions(book, turn)
        for out in core.apply(turn):
            if not isinstance(out.message, UNNUMBERED):
                book.keep(PeerId(out.role, out.name), encode(out.message, out.arrays))
        newest_s = turn.newest_s
    return newest_s


def _replay_sessions(book: SessionBook, turn: Turn) -> None:
    """Repeat what the server did while it read the turn, before anything was sent in reaction to it."""
    for entry in turn.entries:
        match entry:
            case Left(role, name):
                book.close(PeerId(role, name))
            case Joined(hello):
                book.open(hello)
            case FromPeer(role, name, received) if isinstance(received.message, Heartbeat):
                book.confirm(PeerId(role, name), received.message.received_total)
            case _:
                pass
