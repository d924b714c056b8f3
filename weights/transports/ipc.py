"""Versions in memory that the members map, on the learner's GPU by CUDA IPC, or on a CPU as shared segments.

    learner    Round | bucket 0 -> slot 0 | bucket 1 -> slot 1 | bucket 2 -> slot 0 | ...       wait for answers
    member     Want 0, Want 1             | copy 0, Want 2     | copy 1, Want 3     | ...       prove, Answer

A version goes through two slots of a bucket each, so it costs little memory beyond the copies that every transport
makes; on a GPU these may be in pinned host memory. A member asks for a bucket when it has done with the one two before
it (weights.wire), and is told where it is and its checksum. All members take a bucket before its slot is filled again.
One that keeps the others waiting for half of the time limit is not waited for any more: it may find newer bytes in
place of those that it reads. Embedded engines therefore compare checksums after they have copied, before they use
anything; a server that is late stays paused until it gets a whole version. SGLang servers take buckets by a route that
wants a pickle, which is written beside the server (engines.sglang.tensor_payload); only handles go to the members.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from stillhouse.weights.buckets import BucketLayout, Content, PackedLayout, aligned, checksum
from stillhouse.weights.control import ControlHost, Request
from stillhouse.weights.control_messages import Round, SharedBucket, WeightCheck
from stillhouse.weights.errors import GroupInterrupted
from stillhouse.weights.group_host import Channel, GroupHost, NotSent
from stillhouse.weights.manifest import WeightManifest
from stillhouse.weights.roster import GroupSeat
from stillhouse.weights.shared_memory import Loans, NoSharedMemory, shareable
from stillhouse.weights.staged_weights import StagedVersion
from stillhouse.weights.transport import TransportSetup
from stillhouse.weights.wire import SLOTS

WAIT_SLICE_S: Final = 0.05


class _Round:
    """The buckets of one version."""

    def __init__(self, layout: BucketLayout, content: Content, slots: list[Tensor], ranks: int, ranks_each: int):
        self._layout, self._content, self._slots, self._ranks_each = layout, content, slots, ranks_each
        self.asked = dict.fromkeys(range(1, ranks + 1), -1)
        """The last bucket that each rank has asked for, of those that are waited for."""
        self.filled = -1
        """The last bucket that is in its slot."""
        self._sums: dict[int, int] = {}
        self._loans = Loans()

    def may_fill(self) -> bool:
        """True if the next bucket may go into its slot: who asks for one has done with the one that is in it."""
        return bool(self.asked) and self.filled + 1 < self._layout.n_buckets and self._slowest > self.filled

    @property
    def _slowest(self) -> int:
        return min(self.asked.values())

    def fill(self) -> None:
        self.filled += 1
        start, end = self._layout.bounds(self.filled)
        slot_b = self._slots[self.filled % SLOTS]
        self._content.read(self._layout, start, end, slot_b)
        # Reading the sum also waits for the copies that are queued on a GPU.
        self._sums[self.filled] = int(checksum(slot_b[: aligned(end - start)]).item())

    def is_there(self, index: int) -> bool:
        return self.filled - SLOTS < index <= self.filled

    def told(self, index: int) -> bytes:
        """What a member must know of a bucket that is there."""
        slot_b = self._slots[index % SLOTS]
        handles = tuple(self._loans.export(slot_b) for _ in range(self._ranks_each))
        return msgspec.msgpack.encode(SharedBucket(handles, self._sums[index]))

    def leave_the_slow_behind(self) -> None:
        """From now on those that have not asked for the next bucket are not waited for."""
        self.asked = {rank: last for rank, last in self.asked.items() if last > self.filled}


class IpcChannel(Channel):
    """Rank 0's end, for the publisher's thread."""

    def __init__(
        self,
        control: ControlHost,
        slots: list[Tensor],
        *,
        n_members: int,
        ranks_each: int,
        finished: Callable[[], set[int]],
        closing: Callable[[], bool],
    ) -> None:
        """`finished`: the ranks that want nothing more of this round (GroupHost)."""
        self._control, self._slots, self._n, self._ranks_each = control, slots, n_members, ranks_each
        self._finished, self._closing = finished, closing
        self._round: _Round | None = None
        """The newest: what it has lent lasts until the next."""

    def send(self, round_number: int, layout: BucketLayout, content: Content, timeout_s: float) -> None:
        """Fill the slots until each member has answered, is gone, or is too slow, at most until the deadline. The rest
        is left to whoever waits for their answers. Raises GroupInterrupted."""
        now_s = time.monotonic()
        deadline_s, moved_s = now_s + timeout_s, now_s
        self._round = one = _Round(layout, content, self._slots, self._n, self._ranks_each)
        waiting: list[Request] = []
        while one.asked and now_s < deadline_s:
            if self._closing():
                raise GroupInterrupted("the learner is closing")
            for request in self._control.requests(WAIT_SLICE_S):
                want = request.want
                if want.number == round_number and want.rank in one.asked and 0 <= want.first < layout.n_buckets:
                    one.asked[want.rank] = max(one.asked[want.rank], want.first)
                    waiting.append(request)
            for rank in self._finished():
                one.asked.pop(rank, None)
            now_s = time.monotonic()
            if any(last > one.filled for last in one.asked.values()) and now_s - moved_s > timeout_s / 2:
                one.leave_the_slow_behind()
            while one.may_fill():
                one.fill()
                moved_s = now_s
            for request in waiting:
                if one.is_there(request.want.first) and request.want.rank in one.asked:
                    self._control.send_piece(request, request.want.first, one.told(request.want.first))
            waiting = [request for request in waiting if request.want.first > one.filled]


class IpcTransport(GroupHost):
    """Members on this machine open the learner's memory."""

    backend = "ipc"
    independent = True

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        self._slots: list[Tensor] = []

    def _open(self, seats: tuple[GroupSeat, ...]) -> IpcChannel:
        return IpcChannel(
            self._control,
            self._slots,
            n_members=len(seats),
            ranks_each=self._members.ranks_each,
            finished=lambda: self._finished(seats),
            closing=self._closing,
        )

    def _layout_of(self, manifest: WeightManifest) -> PackedLayout:
        return PackedLayout(manifest, self._config.bucket_bytes)

    def _header(
        self, weights: StagedVersion, check: WeightCheck | None, timeout_s: float
    ) -> tuple[BucketLayout, Round]:
        layout, header = super()._header(weights, check, timeout_s)
        n_bytes = aligned(layout.largest_bytes)
        try:
            while len(self._slots) < min(SLOTS, layout.n_buckets):
                self._slots.append(shareable(n_bytes, torch.device(self._device)))
        except NoSharedMemory as error:
            raise NotSent(str(error)) from error
        return layout, replace(header, shared=True)
