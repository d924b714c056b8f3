"""Groups of processes in which rank 0 broadcasts weights to embedded engines.

A group lives as long as one WeightPlan. torch cannot add or remove a member, so every change of membership makes a new
group (see `weights.group_operations`).

One broadcast of a version, both sides in lockstep:

    rank 0    gather 0 | gather 1   | gather 2   | ...        two bucket buffers: while one is being sent, the bytes of
    wire               | bucket 0   | bucket 1   | ...        the next are copied into the other (if they are not in
    member             |            | check 0    | ...        place already) and summed. Members receive in place.
    then one int64 tensor: the checksum of every bucket, and the number of the round

A version can also come as differences from the one before (weights.delta). Then each bucket has a header, a broadcast
of its own, because receivers must know a size; and the checksums depend on places:

    rank 0    compare 0 | compare 1         | compare 2         | ...
    wire                | header 0, delta 0 | header 1, delta 1 | ...
    member                                  | apply 0, check 0  | ...

Both need the former version's bytes: rank 0 has them in the copies that the next version will overwrite, a member in
the memory that received them.

All waits have a deadline.

gloo's broadcast is a binomial tree, connected on first use (`lazy_init`). Measured on loopback with torch 2.13, a group
of 33 is made in 0.04 s; with a full mesh it takes 0.28 s. Members keep one connection to the store for all groups of a
learner.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights import delta
from stillhouse.weights.buckets import BucketLayout, Content, EqualBuckets, checksum, checksum_by_place, expect_sums
from stillhouse.weights.delta import DeltaSent
from stillhouse.weights.errors import DeltaRefused, GroupBroken, Interrupted, WeightsRefused
from stillhouse.weights.group_host import Channel, GroupHost
from stillhouse.weights.group_operations import (
    COMPARED,
    BackendName,
    GroupOperations,
    Store,
    first_line,
    host_store,
    prefixed,
    wait_for_device,
)
from stillhouse.weights.manifest import WeightManifest
from stillhouse.weights.roster import GroupSeat
from stillhouse.weights.staged_weights import Former
from stillhouse.weights.transport import TransportSetup


def _never() -> str | None:
    return None


class WeightGroup(GroupOperations):
    """One rank of one group, for one thread: `join`, then `send` (rank 0) or `receive` (other ranks), then `close`."""

    def __init__(
        self,
        store: Store,
        *,
        group_epoch: int,
        rank: int,
        world_size: int,
        backend: BackendName = "gloo",
        device: torch.device | str = "cpu",
        address: str = "127.0.0.1",
        interrupted: Interrupted = _never,
    ) -> None:
        super().__init__(
            rank=rank,
            world_size=world_size,
            backend=backend,
            device=device,
            address=address,
            interrupted=interrupted,
        )
        self._store = prefixed(store, f"weights-{group_epoch}")
        self._group_epoch = group_epoch
        self._run_B: Tensor | None = None
        self._held: WeightVersion | None = None
        """The version in `_run_B`; None: none, or a part of one."""

    def join(self, timeout_s: float) -> None:
        """Connect, and test the connection with a small broadcast. All ranks call it at about the same time. Raises
        GroupBroken or GroupInterrupted."""
        deadline_s = time.monotonic() + timeout_s
        try:
            self._group = self._make_group(self._store, timeout_s, lazy=True)
        except RuntimeError as error:
            raise GroupBroken(f"{self!r} could not be made: {first_line(error)}") from None
        hello = torch.tensor([self._group_epoch if self._rank == 0 else -1], device=self._device)
        self._start(hello, deadline_s)
        self._finish_all(deadline_s)
        wait_for_device(self._device, deadline_s, self._interrupted)
        if int(hello.item()) != self._group_epoch:
            raise GroupBroken(f"{self!r}: rank 0 greets group {int(hello.item())}, expected {self._group_epoch}")

    def send(self, round_number: int, layout: BucketLayout, content: Content, timeout_s: float) -> None:
        """Rank 0: broadcast the tensors of `layout.manifest`. A run on the group's device is sent in place; otherwise
        bytes are read bucket by bucket, each while the one before is being sent. Returns when the bytes have left this
        process; members may not have them yet."""
        deadline_s = time.monotonic() + timeout_s
        sums: list[Tensor] = []
        pieces = (layout.bounds(index) for index in range(layout.n_buckets))
        self._send_buckets(layout, content, pieces, deadline_s, lambda bucket_b: sums.append(checksum(bucket_b)))
        self._start(self._trailer(sums, round_number), deadline_s)
        self._finish_all(deadline_s)

    def send_delta(
        self, round_number: int, layout: BucketLayout, content: Content, former: Former, timeout_s: float
    ) -> DeltaSent:
        """Rank 0: as `send`, but of each bucket the difference from the former version. A bucket that differs too much
        goes whole; so do the rest, once the former version is overwritten."""
        deadline_s = time.monotonic() + timeout_s
        unit = delta.unit_bytes(layout.manifest)
        new_B, old_B = content.in_place(layout), former.content.in_place(layout)
        sums: list[Tensor] = []
        n_bytes = whole_buckets = changed = 0
        for index in range(layout.n_buckets):
            start, end = layout.bounds(index)
            bucket_b = self._bucket(layout, content, new_B, start, end, index)
            at: Tensor | None = None
            if former.intact:
                old_b = self._bucket(layout, former.content, old_B, start, end, COMPARED)
                at = delta.changes(old_b, bucket_b, unit)
                if not former.intact:
                    at = None  # some of what was compared may be of a newer version
            ready_b = bucket_b if at is None else delta.encode(bucket_b, at, unit)
            k = delta.WHOLE if at is None else at.numel()
            sums.append(checksum_by_place(bucket_b))
            self._finish_all(deadline_s)  # and only then drop what was being sent
            header, sent_b = torch.tensor([k, round_number], device=self._device), ready_b
            self._start(header, deadline_s)
            self._start(sent_b, deadline_s)
            n_bytes += header.nbytes + sent_b.numel()
            whole_buckets += at is None
            changed += delta.n_units(end - start, unit) if at is None else k
        self._finish_all(deadline_s)
        trailer = self._trailer(sums, round_number)
        self._start(trailer, deadline_s)
        self._finish_all(deadline_s)
        share = changed / delta.n_units(layout.total_bytes, unit)
        return DeltaSent(n_bytes + trailer.nbytes, whole_buckets, share)

    def receive(
        self, round_number: int, layout: BucketLayout, timeout_s: float, version: WeightVersion | None = None
    ) -> list[tuple[str, Tensor]]:
        """Other ranks: take part in a broadcast. Returns the named tensors, views of memory that the next `receive`
        reuses, because the page faults of fresh memory cost more than the transfer. `version`: what comes; with None
        no difference from it can be received later. Raises GroupBroken, GroupInterrupted or WeightsRefused."""
        deadline_s = time.monotonic() + timeout_s
        self._held = None
        if self._run_B is None or self._run_B.numel() != layout.total_bytes:
            self._run_B = torch.empty(layout.total_bytes, dtype=torch.uint8, device=self._device)
        run_B = self._run_B
        buckets_b = _buckets(layout, run_B)
        sums: list[Tensor] = []
        for index, bucket_b in enumerate(buckets_b):
            self._start(bucket_b, deadline_s)
            if index > 0:
                self._finish_oldest(deadline_s)
                sums.append(checksum(buckets_b[index - 1]))
        self._finish_oldest(deadline_s)
        sums.append(checksum(buckets_b[-1]))
        trailer = torch.zeros(layout.n_buckets + 1, dtype=torch.int64, device=self._device)
        self._start(trailer, deadline_s)
        self._finish_all(deadline_s)
        got = self._trailer(sums, round_number)
        wait_for_device(self._device, deadline_s, self._interrupted)
        self._check(got, trailer)
        self._held = version
        return layout.views(run_B)

    def receive_delta(
        self,
        round_number: int,
        layout: BucketLayout,
        timeout_s: float,
        version: WeightVersion,
        base: WeightVersion,
    ) -> list[tuple[str, Tensor]]:
        """Other ranks: as `receive`, from rank 0's `send_delta`. `base`: the version that the differences start from.
        Takes part to the end, whatever is wrong, for the sake of the other members; then raises DeltaRefused unless the
        result is right."""
        deadline_s = time.monotonic() + timeout_s
        unit = delta.unit_bytes(layout.manifest)
        wrong = "" if self._held == base else f"changes since {base} came, but {self._held} is here"
        self._held = None
        if self._run_B is None or self._run_B.numel() != layout.total_bytes:
            self._run_B = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=self._device)
        run_B = self._run_B
        sums: list[Tensor] = []

        def finish(bucket_b: Tensor, delta_b: Tensor, k: int) -> None:
            nonlocal wrong
            if k != delta.WHOLE and not wrong:
                try:
                    delta.apply(delta_b, k, bucket_b, unit)
                except delta.DeltaDamaged as error:
                    wrong = f"bucket {len(sums)}: {error}"
            sums.append(checksum_by_place(bucket_b))

        came: tuple[Tensor, Tensor, int] | None = None
        for index, bucket_b in enumerate(_buckets(layout, run_B)):
            most = delta.most_changes(bucket_b.numel(), unit)
            k = self._announced(index, round_number, most, deadline_s)
            delta_b = bucket_b
            if k != delta.WHOLE:
                delta_b = self._buffer(index, layout.largest_bytes // 2)
                delta_b = delta_b[: delta.delta_bytes(k, bucket_b.numel(), unit)]
            self._start(delta_b, deadline_s)
            if came is not None:
                finish(*came)
            came = bucket_b, delta_b, k
        self._finish_all(deadline_s)
        if came is not None:
            finish(*came)
        trailer = torch.zeros(layout.n_buckets + 1, dtype=torch.int64, device=self._device)
        self._start(trailer, deadline_s)
        self._finish_all(deadline_s)
        got = self._trailer(sums, round_number)
        wait_for_device(self._device, deadline_s, self._interrupted)
        if wrong:
            raise DeltaRefused(wrong)
        try:
            self._check(got, trailer)
        except WeightsRefused as error:
            raise DeltaRefused(str(error)) from None
        self._held = version
        return layout.views(run_B)

    def _announced(self, index: int, round_number: int, most: int, deadline_s: float) -> int:
        """Number of changes in the next bucket, or delta.WHOLE. Completes what came before it."""
        header = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._start(header, deadline_s)
        self._finish_all(deadline_s)
        wait_for_device(self._device, deadline_s, self._interrupted)
        k, number = (int(value) for value in header.tolist())
        if number != round_number or not (k == delta.WHOLE or 0 <= k <= most):
            raise GroupBroken(
                f"{self!r}: bucket {index} is announced with {k} changes in round {number}; expected at most {most}, "
                f"or {delta.WHOLE}, in round {round_number}"
            )
        return k

    def _trailer(self, sums: Sequence[Tensor], round_number: int) -> Tensor:
        number = torch.tensor(round_number, dtype=torch.int64, device=self._device)
        return torch.stack([*sums, number])

    def _check(self, got: Tensor, announced: Tensor) -> None:
        if torch.equal(got, announced):
            return
        if int(got[-1].item()) != int(announced[-1].item()):
            raise WeightsRefused(f"rank 0 sends round {int(announced[-1].item())}, expected {int(got[-1].item())}")
        expect_sums(got[:-1].tolist(), announced[:-1].tolist())


def _buckets(layout: BucketLayout, run_B: Tensor) -> list[Tensor]:
    return [run_B[slice(*layout.bounds(index))] for index in range(layout.n_buckets)]


class CollectiveTransport(GroupHost):
    """Broadcasts to embedded engines. Members keep their connection to one store for all groups."""

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        self._store: Store | None = None

    def close(self) -> None:
        super().close()
        self._store = None

    def _meet_at(self) -> int:
        self._store = self._store or host_store(self._config.host, self._config.store_port)
        return self._store.port

    def _open(self, seats: tuple[GroupSeat, ...]) -> Channel:
        if self._store is None:
            raise RuntimeError("a group is made from a plan that names its store")
        return WeightGroup(
            self._store,
            group_epoch=self._epoch,
            rank=0,
            world_size=self._world_size(seats),
            backend=self._backend,
            device=self._device,
            address=self._config.host,
            interrupted=lambda: self._stop_reason(seats),
        )

    def _layout_of(self, manifest: WeightManifest) -> BucketLayout:
        return EqualBuckets(manifest, self._config.bucket_bytes)
