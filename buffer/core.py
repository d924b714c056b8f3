"""The core as the journal sees it: turns in, messages out. Live and in replay the same code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from buffer.state import BufferState, Outgoing
from buffer.turns import Entry, GivenUp, IntakeChanged, Joined, Left, Turn
from protocol.codec import encode
from protocol.flow import UNNUMBERED
from protocol.handshake import PeerId
from protocol.messages import Batch, Heartbeat, Snapshot
from protocol.server import FromPeer
from protocol.session import SessionBook


class Core:
    """The state, and what the server refused, which the ledger tells of."""

    def __init__(self, state: BufferState) -> None:
        self.state = state
        self.refused: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"Core({self.state!r})"

    def apply(self, turn: Turn) -> list[Outgoing]:
        """Returns the messages to send, in order."""
        if turn.refused is not None:
            self.refused = turn.refused
        outgoing: list[Outgoing] = []
        for entry in turn.entries:
            outgoing += self._outcome(turn.now_s, entry)
        if turn.tick_s is not None:
            outgoing += self.state.tick(turn.tick_s)
        return [self._told(out) for out in outgoing]

    def snapshot(self, now_s: float) -> Snapshot:
        """The state's, with what the server refused added to `rejected`."""
        return self._with_refusals(self.state.snapshot(now_s))

    def _outcome(self, now_s: float, entry: Entry) -> Sequence[Outgoing]:
        match entry:
            case FromPeer(role, name, received):
                return self.state.handle(now_s, role, name, received.message, received.arrays)
            case Joined(hello):
                return self.state.peer_joined(now_s, hello.role, hello.name, hello.incarnation, hello.pool)
            case Left(role, name):
                return self.state.peer_lost(now_s, role, name)
            case GivenUp(reason):
                return self.state.give_up(reason)
            case IntakeChanged(trouble):
                return self.state.intake_changed(now_s, trouble)

    def _told(self, out: Outgoing) -> Outgoing:
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
    """Go through these turns again, sessions included. Returns the newest reading of the clock in them."""
    newest_s: float | None = None
    for turn in turns:
        _replay_sessions(book, turn)
        for out in core.apply(turn):
            if not isinstance(out.message, UNNUMBERED):
                book.keep(PeerId(out.role, out.name), encode(out.message, out.arrays))
        newest_s = turn.newest_s
    return newest_s


def _replay_sessions(book: SessionBook, turn: Turn) -> None:
    """What the server did while it read the turn: before anything was sent in reaction to it."""
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
