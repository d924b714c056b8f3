"""The simulated buffer's journal: every event as an encoded turn; and a restart from that and the last image."""

from __future__ import annotations

import msgspec

from stillhouse.buffer.core import Core, Entry, Turn, decode_turn, encode_turn
from stillhouse.buffer.journal.image import make_image, restore_image
from stillhouse.buffer.state import BufferState
from stillhouse.protocol.errors import RemoteProtocolError
from stillhouse.protocol.handshake import Doorkeeper
from stillhouse.protocol.session import SessionBook


def no_sessions() -> SessionBook:
    return SessionBook(Doorkeeper(run_id="sim", vocab_fingerprint=None))


def can_be_journaled(state: object) -> bool:
    """Not what a test has put in its place, which does more than this."""
    return type(state) is BufferState


class SimJournal:
    """The contents of the disk from which a buffer process would recover."""

    def __init__(self, state: BufferState, now_s: float) -> None:
        self._blobs: dict[int, bytes] = {}
        self._image = make_image(Core(state), no_sessions(), now_s)
        self._turns: list[tuple[bytes, Turn]] = []

    def write(self, state: BufferState, now_s: float, *entries: Entry, tick_s: float | None = None) -> None:
        """`state`: before this turn."""
        turn = Turn(now_s, entries, tick_s)
        body, blobs = encode_turn(turn, state.blobs_total)
        self._turns.append((body, turn))
        self._blobs.update(blobs)

    def restarted(self, state: BufferState, now_s: float) -> BufferState:
        """The state of another process, which must be the same as `state`; the journal goes on from its image."""
        core, _ = restore_image(self._image.body, no_sessions(), self._load)
        for body, turn in self._turns:
            core.apply(self._read(body, turn))
        image = make_image(core, no_sessions(), now_s)
        assert image == make_image(Core(state), no_sessions(), now_s), "the journal tells another story"
        self._image = image
        self._turns.clear()
        self._blobs = {number: self._blobs[number] for number in image.blobs}
        return core.state

    @property
    def n_blobs(self) -> int:
        """Blobs that are kept."""
        return len(self._blobs)

    def _load(self, number: int) -> list[bytes]:
        return msgspec.msgpack.decode(self._blobs[number], type=list[bytes])

    def _read(self, body: bytes, turn: Turn) -> Turn:
        """From the journal; `turn` itself where the simulation sent what no wire can carry."""
        try:
            return decode_turn(body, self._load)
        except RemoteProtocolError:
            return turn
