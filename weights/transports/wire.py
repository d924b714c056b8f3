"""Versions over encrypted connections to the learner's control port: the way between hosts (weights.wire has the
member's end).

    learner    Round: version | piece 0 | piece 1 | ...     each member asks for its pieces | wait for answers
    member     Want 0 to 7    |   Want 8 ...                | has all bytes: stage, Answer  |

One port of the learner, which admits only holders of the run's keys, and no connection to or between members. Nothing
is shared but the copies of the version: a piece is read from them when the first member wants it, and kept until
others, which are about as fast, have it too. Each member gets all bytes from the learner, so a version takes members x
bytes of its link, where a broadcast tree takes a few times the bytes. A slow or silent member does not keep the others
from having the version, but the next one is sent when all have this one, or are left out.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

import torch
import zmq

from stillhouse.weights.buckets import BucketLayout, Content
from stillhouse.weights.control import ControlHost, Request
from stillhouse.weights.errors import GroupBroken, GroupInterrupted
from stillhouse.weights.group_host import Channel, GroupHost
from stillhouse.weights.manifest import WeightManifest
from stillhouse.weights.roster import GroupSeat
from stillhouse.weights.wire import PIECE_BYTES, WINDOW, n_pieces

KEPT_PIECES: Final = 2 * WINDOW
"""The pieces wanted last. A member that is further behind than this has them read again for it."""
UNDER_WAY: Final = WINDOW + 4
"""Pieces for one member that have not left this process. A member that reads has WINDOW at most."""
MOST_WAITING: Final = 4 * WINDOW
"""Pieces that a member has asked for and is not sent yet. A member that reads asks for WINDOW by each connection."""
WAIT_SLICE_S: Final = 0.05


class _Pieces:
    """The pieces of one version."""

    def __init__(self, layout: BucketLayout, content: Content) -> None:
        self._layout, self._content = layout, content
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self.count = n_pieces(layout.total_bytes)

    def get(self, index: int) -> memoryview:
        """In memory of its own, which does not change: it is still being sent when the version is long replaced."""
        piece = self._kept.pop(index, None)
        if piece is None:
            start = index * PIECE_BYTES
            end = min(start + PIECE_BYTES, self._layout.total_bytes)
            piece_b = torch.zeros(end - start, dtype=torch.uint8)
            self._content.read(self._layout, start, end, piece_b)
            piece = piece_b.numpy().data
        self._kept[index] = piece
        if len(self._kept) > KEPT_PIECES:
            self._kept.popitem(last=False)
        return piece


class _ToMember:
    """The pieces for one member, by however many connections: at most UNDER_WAY are in memory for it. Who asks
    and reads nothing would fill our memory otherwise."""

    def __init__(self, control: ControlHost, pieces: _Pieces) -> None:
        self._control, self._pieces = control, pieces
        self._had: dict[bytes, set[int]] = {}
        """Asked for, by connection."""
        self._waiting: deque[tuple[Request, int]] = deque()
        self._under_way: list[zmq.MessageTracker] = []

    def ask(self, request: Request) -> None:
        """What no member of ours asks for is not there."""
        first, count = request.want.first, request.want.count
        if not (first >= 0 and count <= WINDOW and first + count <= self._pieces.count):
            return
        had = self._had.setdefault(request.route, set())
        for index in range(first, first + count):
            if index not in had and len(self._waiting) < MOST_WAITING:
                had.add(index)
                self._waiting.append((request, index))

    def serve(self) -> None:
        """Send as many pieces as may be under way."""
        self._under_way = [one for one in self._under_way if not one.done]
        while self._waiting and len(self._under_way) < UNDER_WAY:
            request, index = self._waiting.popleft()
            self._under_way.append(self._control.send_piece(request, index, self._pieces.get(index)))


class WireChannel(Channel):
    """Rank 0's end, for the publisher's thread."""

    def __init__(
        self,
        control: ControlHost,
        seats: tuple[GroupSeat, ...],
        *,
        finished: Callable[[], set[int]],
        closing: Callable[[], bool],
        others_s: Callable[[int], float],
    ) -> None:
        """`finished`: the ranks that want nothing more of this round (GroupHost). `others_s(bytes)`: how much of the
        time limit is for the copies of other members."""
        self._control, self._seats = control, seats
        self._finished, self._closing, self._others_s = finished, closing, others_s

    def send(self, round_number: int, layout: BucketLayout, content: Content, timeout_s: float) -> None:
        """Serve the members until each has answered, or is gone: one whose connection breaks may ask again for what it
        was sent. At the deadline the rest is left to whoever waits for their answers. Raises GroupInterrupted, and
        GroupBroken if all that are left have asked for nothing within the time that one alone may take."""
        deadline_s = time.monotonic() + timeout_s
        silent_s = timeout_s - self._others_s(layout.total_bytes)
        pieces = _Pieces(layout, content)
        sent = {rank: _ToMember(self._control, pieces) for rank in range(1, len(self._seats) + 1)}
        heard_s = dict.fromkeys(sent, time.monotonic())
        while sent and time.monotonic() < deadline_s:
            if self._closing():
                raise GroupInterrupted("the learner is closing")
            for request in self._control.requests(WAIT_SLICE_S):
                if request.want.number == round_number and request.want.rank in sent:
                    heard_s[request.want.rank] = time.monotonic()
                    sent[request.want.rank].ask(request)
            for member in sent.values():
                member.serve()
            for rank in self._finished():
                sent.pop(rank, None)
            if sent and all(time.monotonic() - heard_s[rank] > silent_s for rank in sent):
                names = ", ".join(self._seats[rank - 1].name for rank in sorted(sent))
                raise GroupBroken(f"{names}: no request and no answer for {silent_s:.0f} s")


class WireTransport(GroupHost):
    """Members fetch each version from the learner, encrypted."""

    backend = "wire"
    independent = True
    copy_each = True

    def _open(self, seats: tuple[GroupSeat, ...]) -> Channel:
        return WireChannel(
            self._control,
            seats,
            finished=lambda: self._finished(seats),
            closing=self._closing,
            others_s=self.limits.others_s,
        )

    def _layout_of(self, manifest: WeightManifest) -> BucketLayout:
        return self._members.staging(manifest, self._config.bucket_bytes)
