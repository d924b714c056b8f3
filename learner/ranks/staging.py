"""Weights for the actors from the ranks' shares: each rank copies its own, and rank 0 asks for the bytes of a bucket
when it is to be sent. No process holds a whole copy.

    all ranks, training thread   stage: copy the own share, cast (rank 0 announces it)  | next step ...
    rank 0, publisher's thread                 asks all for bucket 0, puts it together, | bucket 1 ... while bucket 0 is
                                               starts its broadcast to the actors       |          being broadcast
    other ranks, a thread                      waits for a question, and for the copies; sends the bytes

Questions and bytes have a process group of their own (gloo), so that they do not mix with the collectives of training.
Nobody asks for the next bucket before the last one is here, so a publisher that stops in the middle of a version leaves
no question behind. If a rank is gone, or does not answer within `learner.rank_timeout_s`, the publisher fails, and with
it the learner.

FSDP2 divides a tensor by its rows (torch.chunk): share s has rows [s c, (s + 1) c) of d, c = ceil(d / shares); the last
ones may have fewer, or none. Rows of a contiguous tensor are contiguous bytes, so a share is one range of its bytes.
Where several ranks hold the same share (learner.ranks.mesh), only one of them copies it and is asked.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from stillhouse.learner.ranks.mesh import Mesh
from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights.buckets import BucketLayout, Content, PackedLayout
from stillhouse.weights.config import CPU_BUCKET_BYTES, Place, SentDtype
from stillhouse.weights.manifest import TensorSpec, WeightManifest, in_pieces
from stillhouse.weights.roster import GroupMembers
from stillhouse.weights.staged_weights import (
    Merged,
    StagedVersion,
    StagedWeights,
    Weight,
    WeightStreams,
    sent_manifest,
    tensor_of,
)

log = logging.getLogger(__name__)

FOREVER: Final = timedelta(days=3650)
"""A question may be long in coming: the buffer may have no batch."""
_STOP: Final = -1
_IN_ORDER: Final = GroupMembers(kind="servers")
"""ShareLayouts lie one behind the other, wide dtypes first."""


class RanksLost(RuntimeError):
    """Another rank did not give its share of the weights."""


class Stage(msgspec.Struct, frozen=True):
    """rank 0 -> all ranks: copy your share of the present weights."""

    slot: int
    """Which copies this replaces; there are as many as versions that may be under way."""
    number: int
    """Rises with each announcement."""
    dtype: SentDtype
    place: Place


class Move(NamedTuple):
    """Bytes that go from a rank's share into a bucket."""

    at: int
    """First byte in the share."""
    to: int
    """First byte in the bucket."""
    n_bytes: int


def row_range(n_rows: int, share: int, shares: int) -> tuple[int, int]:
    """First row and end of a share, as torch.chunk divides."""
    each = -(-n_rows // shares)
    return min(share * each, n_rows), min((share + 1) * each, n_rows)


class ShareLayouts:
    """Where each rank that is asked has its share of a set of tensors. Their ranks count the shares."""

    def __init__(self, manifest: WeightManifest, shares: int) -> None:
        """`manifest`: the whole tensors, in the dtype in which they are sent."""
        self.manifest = manifest
        self.shares = shares
        self.layouts = [PackedLayout(self.of_rank(rank), CPU_BUCKET_BYTES) for rank in range(shares)]

    def of_rank(self, rank: int) -> WeightManifest:
        return WeightManifest(
            tuple(
                TensorSpec(spec.name, spec.dtype, (high - low, *spec.shape[1:]))
                for spec in self.manifest.tensors
                for low, high in [row_range(spec.shape[0], rank, self.shares)]
            )
        )

    def moves(self, layout: BucketLayout, start: int, end: int) -> list[list[Move]]:
        """For each rank, what of its share is in bytes [start, end) of the run; neighbours are joined."""
        found: list[list[Move]] = [[] for _ in range(self.shares)]
        for i, at in layout.tensors_in(start, end):
            spec = self.manifest.tensors[i]
            row_bytes = math.prod(spec.shape[1:]) * spec.item_bytes
            for rank, moves in enumerate(found):
                first, last = (at + row * row_bytes for row in row_range(spec.shape[0], rank, self.shares))
                low, high = max(start, first), min(end, last)
                if low >= high:
                    continue
                move = Move(self.layouts[rank].offsets[i] + low - first, low - start, high - low)
                before = moves[-1] if moves else None
                if before and (before.at + before.n_bytes, before.to + before.n_bytes) == (move.at, move.to):
                    moves[-1] = Move(before.at, before.to, before.n_bytes + move.n_bytes)
                else:
                    moves.append(move)
        return found


class OwnShare:
    """A rank's copies of its share, one set per slot. One thread fills them, another reads."""

    def __init__(self, streams: WeightStreams, rank: int, mesh: Mesh) -> None:
        self.streams = streams
        self._writes, self._share, self._shares = mesh.writes(rank), mesh.share(rank), mesh.shares
        self._staged: dict[int, StagedWeights] = {}
        self._numbers: dict[int, int] = {}
        self._changed = threading.Condition()

    def fill(self, stage: Stage, named: Iterable[tuple[str, Weight]]) -> None:
        """Copy this rank's share of the weights, if it is to be asked for it. All ranks call it at the same time:
        adapters are merged by all together. Raises ValueError for weights that are not divided by rows."""
        if not self._writes:
            for name, weight in named:
                if isinstance(weight, Merged):
                    tensor_of(self._share_of(name, weight))
            return
        if stage.slot not in self._staged:
            self._staged[stage.slot] = StagedWeights(
                _IN_ORDER, dtype=stage.dtype, place=stage.place, streams=self.streams
            )
        shares = ((name, self._share_of(name, weight)) for name, weight in named)
        self._staged[stage.slot].fill(WeightVersion(0, stage.number), shares)
        with self._changed:
            self._numbers[stage.slot] = stage.number
            self._changed.notify_all()

    def run(self, slot: int, number: int, timeout_s: float) -> Tensor:
        """The bytes of the copies, once they are made. Raises RanksLost when they are not in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._numbers.get(slot, 0) == number, timeout_s):
                raise RanksLost(f"copies {number} are not made after {timeout_s:g} s; slots hold {self._numbers}")
        self._staged[slot].wait()
        return self._staged[slot].run_B

    def _share_of(self, name: str, weight: Weight) -> Weight:
        if not isinstance(weight, Merged):
            return self._rows(name, weight.detach())
        return Merged(self._rows(name, weight.base.detach()), lambda: _by_rows(weight.delta()).to_local())

    def _rows(self, name: str, tensor: Tensor) -> Tensor:
        """Raises ValueError."""
        local = tensor.to_local() if hasattr(tensor, "to_local") else None  # pyright: ignore
        low, high = row_range(tensor.shape[0], self._share, self._shares) if tensor.dim() else (0, 0)
        if not isinstance(local, Tensor) or local.shape != (high - low, *tensor.shape[1:]):
            held = "is not divided" if local is None else f"has {tuple(local.shape)} here"
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} {held}, expected rows {low} to {high} as share "
                f"{self._share} of {self._shares}, as torch's fully_shard divides parameters"
            )
        return local


def _by_rows(tensor: Tensor) -> Any:
    """The DTensor, divided by rows and copied over the replicas: a product may come out otherwise."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # takes a second to load

    assert isinstance(tensor, DTensor)
    return tensor.redistribute(placements=[*[Replicate()] * (tensor.device_mesh.ndim - 1), Shard(0)])


class ShareLink:
    """The connection between the ranks for this. All make it at the same time."""

    def __init__(self, rank: int, mesh: Mesh, *, timeout_s: float) -> None:
        """`timeout_s`: for an answer."""
        self._rank, self._mesh = rank, mesh
        self._timeout_s = timeout_s
        self._group: Any = dist.new_group(backend="gloo", timeout=FOREVER)
        self._asking = threading.Lock()
        self._thread: threading.Thread | None = None
        self._part_b = torch.empty(0, dtype=torch.uint8)

    # ---------------------------------------------------------------------------------------------- rank 0

    def ask(self, stage: Stage, moves: Sequence[Sequence[Move]], out_b: Tensor) -> None:
        """Fetch these bytes of the other ranks' shares into `out_b`, on the CPU. Raises RanksLost."""
        wait = timedelta(seconds=self._timeout_s)
        with self._asking:
            asked: list[tuple[Any, Tensor]] = []
            for rank, wanted in enumerate(moves):
                if rank and wanted:
                    ranges = torch.tensor([[move.at, move.at + move.n_bytes] for move in wanted])
                    asked += self._sent(rank, torch.tensor([stage.slot, stage.number, len(wanted)]))
                    asked += self._sent(rank, ranges)
            for rank, wanted in enumerate(moves):
                if rank and wanted:
                    part_b = self._part(sum(move.n_bytes for move in wanted))
                    try:
                        self._group.recv([part_b], rank, 0).wait(wait)
                    except RuntimeError as error:
                        raise RanksLost(f"rank {rank} did not send its share of a bucket: {error}") from None
                    read = 0
                    for move in wanted:
                        out_b[move.to : move.to + move.n_bytes].copy_(part_b[read : read + move.n_bytes])
                        read += move.n_bytes
            for sending, _ in asked:
                sending.wait(wait)

    def stop(self) -> None:
        """End the other ranks' threads."""
        if not self._asking.acquire(timeout=self._timeout_s):
            return
        for rank in range(1, self._mesh.shares):
            try:
                for sending, _ in self._sent(rank, torch.tensor([_STOP, 0, 0])):
                    sending.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as error:  # it is gone
                log.warning("rank %d could not be told that no more weights are sent: %s", rank, error)
        self._asking.release()

    def _part(self, n_bytes: int) -> Tensor:
        if self._part_b.numel() < n_bytes:
            self._part_b = torch.empty(n_bytes, dtype=torch.uint8)
        return self._part_b[:n_bytes]

    def _sent(self, rank: int, tensor: Tensor) -> list[tuple[Any, Tensor]]:
        try:
            return [(self._group.send([tensor], rank, 0), tensor)]  # with what must stay alive meanwhile
        except RuntimeError as error:
            raise RanksLost(f"rank {rank} cannot be asked for its share of the weights: {error}") from None

    # ------------------------------------------------------------------------------------------ other ranks

    def serve(self, share: OwnShare) -> None:
        """Answer questions in a thread, until `stop`; a rank that is never asked has none."""
        if not self._mesh.writes(self._rank):
            return
        self._thread = threading.Thread(target=self._serve, args=(share,), name="weight-share", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread, which rank 0 has announced."""
        if self._thread is not None:
            self._thread.join(self._timeout_s)

    def _serve(self, share: OwnShare) -> None:
        try:
            with share.streams.own():
                while self._answered(share):
                    pass
        except (RuntimeError, ValueError) as error:  # rank 0 finds out, if it is still there
            log.error("rank %d sends no more weights: %s", self._rank, error)

    def _answered(self, share: OwnShare) -> bool:
        header = torch.empty(3, dtype=torch.int64)
        self._group.recv([header], 0, 0).wait()
        slot, number, n_ranges = (int(value) for value in header)
        if slot == _STOP:
            return False
        ranges = torch.empty((n_ranges, 2), dtype=torch.int64)
        self._group.recv([ranges], 0, 0).wait(timedelta(seconds=self._timeout_s))
        run_B = share.run(slot, number, self._timeout_s)
        pieces = [run_B[low:high] for low, high in cast(list[list[int]], ranges.tolist())]
        part_b = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        self._group.send([part_b.cpu()], 0, 0).wait(timedelta(seconds=self._timeout_s))
        return True


class StagedByRanks(StagedVersion):
    """A version of which each rank has its share. On rank 0; see `StagingByRanks`."""

    def __init__(
        self,
        ranks: StagingByRanks,
        slot: int,
        members: GroupMembers,
        dtype: SentDtype,
        place: Place,
    ) -> None:
        super().__init__()
        self._members = members
        self._ranks = ranks
        self._stage = Stage(slot, 0, dtype, place)
        self._shares: ShareLayouts | None = None
        self._run: BucketLayout | None = None
        """Where tensors lie that servers know as several (`Members.pieces`). The run of bytes is the same."""
        self._bucket_b = torch.empty(0, dtype=torch.uint8)

    @property
    def manifest(self) -> WeightManifest:
        if self._shares is None:
            raise RuntimeError("nothing is staged")
        return in_pieces(self._shares.manifest, self._members.pieces)

    @property
    def content(self) -> Content:
        return self

    def fill(self, version: WeightVersion, named: Iterable[tuple[str, Weight]]) -> None:
        """Have all ranks copy their shares; `named`: those of this rank."""
        weights = list(named)
        self._stage = self._ranks.announce(self._stage)
        manifest = sent_manifest(weights, self._stage.dtype)
        if self._shares is None or self._shares.manifest != manifest:
            self._shares = ShareLayouts(manifest, self._ranks.mesh.shares)
            self._run = PackedLayout(manifest, CPU_BUCKET_BYTES) if self._members.pieces else None
        self._ranks.share.fill(self._stage, weights)
        self.version = version

    def wait(self) -> None:
        self._own_run()

    def in_place(self, layout: BucketLayout) -> Tensor | None:
        return None

    def read(self, layout: BucketLayout, start: int, end: int, out_b: Tensor) -> None:
        """As in `Content`. Raises RanksLost."""
        if out_b.device.type != "cpu":
            if self._bucket_b.numel() < end - start:
                self._bucket_b = torch.empty(end - start, dtype=torch.uint8)
            self.read(layout, start, end, self._bucket_b)
            out_b[: end - start].copy_(self._bucket_b[: end - start])
            return
        if self._shares is None:
            raise RuntimeError("nothing is staged")
        moves = self._shares.moves(self._run or layout, start, end)
        self._ranks.link.ask(self._stage, moves, out_b)
        run_B = self._own_run()
        for at, to, n_bytes in moves[0]:
            out_b[to : to + n_bytes].copy_(run_B[at : at + n_bytes])

    def _own_run(self) -> Tensor:
        return self._ranks.share.run(self._stage.slot, self._stage.number, 0.0)


class StagingByRanks:
    """Makes the copies of a publisher (`weights.publisher`, `staging`) on rank 0 of several."""

    def __init__(self, link: ShareLink, mesh: Mesh, announce: Callable[[Stage], None]) -> None:
        """`announce` has the other ranks fill their shares."""
        self.link = link
        self.mesh = mesh
        self._announce = announce
        self._share: OwnShare | None = None
        self._slots = self._announced = 0

    def __call__(
        self,
        members: GroupMembers,
        *,
        dtype: SentDtype,
        bucket_bytes: int,
        place: Place,
        streams: WeightStreams,
    ) -> StagedByRanks:
        """Arguments as of `StagedWeights`. `bucket_bytes` decides nothing here: a share has a layout of its
        own."""
        self._share = self._share or OwnShare(streams, 0, self.mesh)
        self._slots += 1
        return StagedByRanks(self, self._slots - 1, members, dtype, place)

    @property
    def share(self) -> OwnShare:
        if self._share is None:
            raise RuntimeError("no copies were asked for")
        return self._share

    def announce(self, stage: Stage) -> Stage:
        self._announced += 1
        stage = msgspec.structs.replace(stage, number=self._announced)
        self._announce(stage)
        return stage
