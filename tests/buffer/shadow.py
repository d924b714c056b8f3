"""A BufferState that is watched by another one, which lives from the journal alone.

Stands in for the state in the simulations of `bench`. Every event goes to the real state as it is, and to the shadow as
a turn that was written and read again; all messages of the two must be the same bytes. Every so often the shadow's
image is compared with the real state's, and the shadow goes on as what its image restores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from stillhouse.buffer.blobs import Load
from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.core import Core, Entry, GivenUp, Joined, Left, Turn, decode_turn, encode_turn
from stillhouse.buffer.journal.image import make_image, restore_image
from stillhouse.buffer.state import BufferState, Outgoing
from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import Array, Received, encode
from stillhouse.protocol.errors import RemoteProtocolError
from stillhouse.protocol.handshake import Doorkeeper
from stillhouse.protocol.messages import Role, WeightVersion
from stillhouse.protocol.server_events import FromPeer
from stillhouse.protocol.session import SessionBook

EVENTS_PER_LIFE = 37
"""The shadow is restored from its image this often."""


def new_book() -> SessionBook:
    return SessionBook(Doorkeeper(run_id="run-1", vocab_fingerprint=None))


def on_the_wire(messages: Sequence[Outgoing]) -> list[tuple[Role, str, list[bytes]]]:
    return [(o.role, o.name, [bytes(frame) for frame in encode(o.message, o.arrays)]) for o in messages]


def no_blobs(number: int) -> list[bytes]:
    raise AssertionError(f"there is no blob {number}")


def restored(core: Core, now_s: float, load: Load = no_blobs) -> Core:
    """By way of an image, which must be the same when it is made again."""
    image = make_image(core, new_book(), now_s)
    again, clock_s = restore_image(image.body, new_book(), load)
    assert clock_s == now_s
    assert make_image(again, new_book(), now_s) == image
    return again


class ShadowedState:
    """Takes BufferState's place."""

    most_blobs: ClassVar[int] = 0
    """The most blobs to which an image referred."""

    def __init__(
        self,
        config: BufferConfig,
        *,
        version: WeightVersion,
        carried: m.Ledger | None = None,
        vocab_size: int | None = None,
    ) -> None:
        def new() -> Core:
            return Core(BufferState(config, version=version, carried=carried, vocab_size=vocab_size))

        self.core, self.shadow = new(), new()
        self.blobs: dict[int, list[bytes]] = {}
        self.events = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core.state, name)

    def peer_joined(self, now_s: float, role: Role, name: str, incarnation: str, pool: str = "") -> list[Outgoing]:
        return self._take(now_s, Joined(m.Hello(role, name, incarnation, "run-1", "ab" * 32, pool)))

    def peer_lost(self, now_s: float, role: Role, name: str) -> list[Outgoing]:
        return self._take(now_s, Left(role, name))

    def handle(
        self, now_s: float, role: Role, name: str, message: m.Message, arrays: Sequence[Array] = ()
    ) -> list[Outgoing]:
        return self._take(now_s, FromPeer(role, name, Received(message, tuple(arrays))))

    def give_up(self, reason: str) -> list[Outgoing]:
        return self._take(0.0, GivenUp(reason))

    def tick(self, now_s: float) -> list[Outgoing]:
        return self._take(now_s, tick_s=now_s)

    def _take(self, now_s: float, *entries: Entry, tick_s: float | None = None) -> list[Outgoing]:
        turn = Turn(now_s, entries, tick_s)
        try:
            body, blobs = encode_turn(turn, self.core.state.blobs_total)
            self.blobs |= {number: msgspec.msgpack.decode(content, type=list[bytes]) for number, content in blobs}
            read_again = decode_turn(body, self.blobs.__getitem__)
        except RemoteProtocolError:  # the simulation also sends what no wire can carry
            read_again = turn
        outgoing = self.core.answers(turn)
        assert on_the_wire(self.shadow.answers(read_again)) == on_the_wire(outgoing)
        self.events += 1
        if self.events % EVENTS_PER_LIFE == 0:
            self.shadow = restored(self.shadow, now_s, self.blobs.__getitem__)
            image = make_image(self.core, new_book(), now_s)
            assert make_image(self.shadow, new_book(), now_s) == image
            self.blobs = {number: self.blobs[number] for number in image.blobs}
            ShadowedState.most_blobs = max(ShadowedState.most_blobs, len(self.blobs))
        return outgoing
