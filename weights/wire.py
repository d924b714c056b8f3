"""A member's own connection for the bytes of versions that no broadcast carries (weights.transports.wire), or for the
handles of those in shared memory (weights.transports.ipc). No torch.

    member                              rank 0, at its control port
    Want pieces 0 to 7    ---------->   reads a piece when the first member wants it
                          <----------   Piece 0, bytes
    Want piece 8          ---------->   ...

The member asks, so nobody is sent more than it can take, and rank 0 holds at most WINDOW pieces per member. The
connection is encrypted and admits only holders of the member's key, like the control channel, to whose port it goes.
When it breaks, ZeroMQ makes another one, and the member asks again for what has not arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import zmq

from stillhouse.protocol.errors import DamagedMessage
from stillhouse.protocol.keys import ClientKeys, encrypt_client
from stillhouse.protocol.monitor import Reconnects
from stillhouse.protocol.sockets import new_socket, receive_frames, send_frames
from stillhouse.weights.control_messages import SharedBucket, Want, WirePiece
from stillhouse.weights.errors import GroupBroken, GroupInterrupted, Interrupted

PIECE_BYTES: Final = 1 << 20
"""Every piece of a version but the last."""
WINDOW: Final = 8
"""Pieces that a member has asked for and not received."""
SLOTS: Final = 2
"""Buckets that are in shared memory at a time: one that members copy, and the next."""
WAIT_SLICE_S: Final = 0.1
"""Time within which an interruption is noticed."""


def n_pieces(total_bytes: int) -> int:
    return -(-total_bytes // PIECE_BYTES)


class WireMember:
    """For one group, and one thread."""

    def __init__(
        self,
        endpoint: str,
        keys: ClientKeys | None,
        *,
        group_epoch: int,
        rank: int,
        on_reconnect: Callable[[], None] = lambda: None,
    ) -> None:
        """`endpoint`: WeightPlan.control; `keys`: from `weights.control.member_keys`. Connects in the background."""
        self._group_epoch, self._rank, self._on_reconnect = group_epoch, rank, on_reconnect
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = new_socket(self._context, zmq.DEALER)
        self._socket.set(zmq.IPV6, "[" in endpoint)
        if keys is not None:
            encrypt_client(self._socket, keys)
        self._reconnects = Reconnects(self._socket)
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(WirePiece)

    def fetch(
        self,
        number: int,
        total_bytes: int,
        take: Callable[[int, bytes | memoryview], None],
        deadline_s: float,
        interrupted: Interrupted,
    ) -> None:
        """All bytes of the version of round `number`. `take(at, piece)` gets them once each, in any order. Raises
        GroupInterrupted, and GroupBroken at the deadline or when rank 0 sends what was not asked for."""
        total = n_pieces(total_bytes)
        owed: set[int] = set(range(min(WINDOW, total)))
        had: set[int] = set()
        self._want(number, 0, len(owed))
        self._reconnects.news()  # of a former round
        while owed:
            received = self._next(number, deadline_s, interrupted)
            if received is None:
                self._on_reconnect()
                for index in sorted(owed):
                    self._want(number, index, 1)
                continue
            piece, content = received
            if piece.index in had and self._reconnects.total:
                continue  # it had come by the former connection, too
            at = piece.index * PIECE_BYTES
            expected_bytes = min(PIECE_BYTES, total_bytes - at)
            if piece.index not in owed or len(content) != expected_bytes:
                raise GroupBroken(
                    f"rank 0 sent piece {piece.index} of {total} with {len(content)} bytes; expected one of the "
                    f"{len(owed)} that were asked for, with {expected_bytes}"
                )
            take(at, content)
            owed.remove(piece.index)
            had.add(piece.index)
            if (asked := len(had) + len(owed)) < total:
                owed.add(asked)
                self._want(number, asked, 1)

    def shared(
        self, number: int, n_buckets: int, deadline_s: float, interrupted: Interrupted
    ) -> Iterator[SharedBucket]:
        """The buckets of round `number` in memory of the learner, in order. Whoever asks for the next one has done with
        the one before: SLOTS later the learner overwrites it. Raises as `fetch`."""
        came: dict[int, SharedBucket] = {}
        for index in range(min(SLOTS, n_buckets)):
            self._want(number, index, 1)
        self._reconnects.news()  # of a former round
        for index in range(n_buckets):
            while index not in came:
                if (received := self._next(number, deadline_s, interrupted)) is None:
                    self._on_reconnect()
                    for owed in {*range(index, min(index + SLOTS, n_buckets))} - came.keys():
                        self._want(number, owed, 1)
                elif index <= received[0].index < index + SLOTS:
                    came.setdefault(received[0].index, self._read(received[1]))
            yield came.pop(index)
            if index + SLOTS < n_buckets:
                self._want(number, index + SLOTS, 1)

    def _read(self, content: bytes | memoryview) -> SharedBucket:
        try:
            return msgspec.msgpack.decode(content, type=SharedBucket)
        except ValueError as error:
            raise GroupBroken(f"a bucket of the weights cannot be read: {error}") from None

    def close(self) -> None:
        self._reconnects.close()
        self._socket.close()
        self._context.term()

    def _want(self, number: int, first: int, count: int) -> None:
        want = Want(self._group_epoch, self._rank, number, first, count)
        try:
            send_frames(self._socket, [msgspec.msgpack.encode(want)])
        except zmq.Again:
            raise GroupBroken("the connection for weights takes no more requests") from None

    def _next(
        self, number: int, deadline_s: float, interrupted: Interrupted
    ) -> tuple[WirePiece, bytes | memoryview] | None:
        """The next piece of this round; None when the connection was replaced."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._reconnects.socket, zmq.POLLIN)
        while True:
            if (reason := interrupted()) is not None:
                raise GroupInterrupted(reason)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise GroupBroken("the bytes of a version did not come before the deadline")
            ready = dict(poller.poll(max(1, round(1000 * min(left_s, WAIT_SLICE_S)))))
            if self._reconnects.socket in ready and self._reconnects.news():
                return None
            if self._socket not in ready:
                continue
            try:
                frames = receive_frames(self._socket)
                if frames is None:
                    continue
                head, content = frames
                piece = self._decoder.decode(head)
            except (DamagedMessage, ValueError) as error:  # msgspec's errors are ValueErrors, too
                raise GroupBroken(f"a piece of the weights cannot be read: {error}") from None
            if (piece.group_epoch, piece.number) == (self._group_epoch, number):
                return piece, content  # others belong to a round that was given up
