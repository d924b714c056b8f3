"""Weights for an engine in this process: one thread stages what it receives, another swaps it in between two steps.

`EmbeddedWeights` is a rank of the weight group itself. `WeightStage` holds the live version and at most one staged set.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stillhouse.engines.base import TakesWeights
from stillhouse.protocol.messages import WeightPlan, WeightVersion
from stillhouse.weights.buckets import EqualBuckets, PackedLayout, aligned, checksum, torch_dtype
from stillhouse.weights.config import NO_GROUP
from stillhouse.weights.control_messages import Agreed, Round
from stillhouse.weights.errors import GroupBroken, GroupInterrupted, Interrupted, WeightsRefused
from stillhouse.weights.group_operations import Store, connect_store, local_address_towards, wait_for_device
from stillhouse.weights.shared_memory import open_memory
from stillhouse.weights.sink import Receipt
from stillhouse.weights.transports.collective import WeightGroup
from stillhouse.weights.wire import SLOTS, WireMember


class EmbeddedWeights:
    """A WeightSink (weights.sink)."""

    def __init__(self, engine: TakesWeights, *, device: torch.device | str = "cpu") -> None:
        """`device`: the engine's, to which NCCL delivers; gloo always delivers to the CPU."""
        self._engine = engine
        self._device = torch.device(device)
        self._staged: WeightVersion | None = None
        self._stores: dict[tuple[str, int], Store] = {}
        self._group: WeightGroup | None = None
        self._layout: EqualBuckets | None = None
        self._opened: deque[Tensor] = deque(maxlen=SLOTS)
        """Memory of the learner; kept as long as it is used, because mapping it again costs page faults."""
        self._fetched_B: Tensor | None = None
        """Memory that receives the bytes by wire; kept, because the page faults of fresh memory cost more than that."""

    @property
    def version(self) -> WeightVersion:
        version = self._engine.version
        return version if self._staged is None else max(version, self._staged)

    @property
    def stats(self) -> dict[str, float]:
        return {}

    def prepare(self) -> None: ...

    def check(self, plan: WeightPlan) -> None:
        if plan.kind != "engines":
            raise ValueError(f"weight plan {plan.group_epoch} is for {plan.kind}; this actor's engine is embedded")
        if plan.backend == "nccl" and self._device.type != "cuda":
            raise ValueError(f"the plan says nccl, but this engine is on {self._device}; set weights.backend to gloo")

    def join(self, plan: WeightPlan, index: int, timeout_s: float, interrupted: Interrupted) -> None:
        if plan.backend in NO_GROUP:
            raise ValueError(f"weight plan {plan.group_epoch} has no process group; its backend is {plan.backend}")
        self.leave()
        self._layout = None
        self._group = WeightGroup(
            self._store_of(plan),
            group_epoch=plan.group_epoch,
            rank=index + 1,
            world_size=plan.world_size,
            backend=plan.backend,
            device=self._device if plan.backend == "nccl" else "cpu",
            address=local_address_towards(plan.host, plan.port),
            interrupted=interrupted,
        )
        try:
            self._group.join(timeout_s)
        except (GroupBroken, GroupInterrupted):
            # The store may be a new learner's on the same port, and with NCCL a thread may still wait on the old one.
            self._stores.clear()
            raise

    def take(self, header: Round, agreed: Agreed, interrupted: Interrupted, wire: WireMember | None = None) -> Receipt:
        if wire is not None:
            take = self._copy_shared if header.shared else self._fetch
            return take(header, agreed, interrupted, wire)
        if self._group is None:
            raise GroupBroken("no group was joined")
        if self._layout is None or self._layout.manifest != agreed.manifest:
            self._layout = EqualBuckets(agreed.manifest, agreed.bucket_bytes)
        began_s = time.monotonic()
        named = self._group.receive(header.number, self._layout, header.timeout_s)
        return self._taken(header, named, self._layout.total_bytes, began_s, interrupted)

    def _fetch(self, header: Round, agreed: Agreed, interrupted: Interrupted, wire: WireMember) -> Receipt:
        began_s = time.monotonic()
        layout = EqualBuckets(agreed.manifest, agreed.bucket_bytes)
        if self._fetched_B is None or self._fetched_B.numel() != layout.total_bytes:
            self._fetched_B = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        run = self._fetched_B.numpy().data

        def take(at: int, piece: bytes | memoryview) -> None:
            run[at : at + len(piece)] = piece

        wire.fetch(header.number, layout.total_bytes, take, began_s + header.timeout_s, interrupted)
        return self._taken(header, layout.views(self._fetched_B), layout.total_bytes, began_s, interrupted)

    def _copy_shared(self, header: Round, agreed: Agreed, interrupted: Interrupted, wire: WireMember) -> Receipt:
        """The engine copies out of the learner's memory, bucket by bucket. If the learner has not changed a bucket
        until then, as the checksum tells, the copy is whole; else the iterator fails, and the engine takes nothing."""
        began_s = time.monotonic()
        deadline_s = began_s + header.timeout_s
        layout = PackedLayout(agreed.manifest, agreed.bucket_bytes)

        def named() -> Iterator[tuple[str, Tensor]]:
            shared = wire.shared(header.number, layout.n_buckets, deadline_s, interrupted)
            for index, one in enumerate(shared):
                slot_b = open_memory(one.handles[0], layout.slot_bytes)
                self._opened.append(slot_b)
                yield from layout.views_in(index, slot_b)
                wait_for_device(self._device, deadline_s, interrupted)
                start, end = layout.bounds(index)
                if int(checksum(slot_b[: aligned(end - start)]).item()) != one.sum:
                    raise WeightsRefused(f"checksum differs in bucket {index} of {layout.n_buckets}")
            for spec in agreed.manifest.tensors:
                if not spec.n_bytes:
                    yield spec.name, torch.zeros(spec.shape, dtype=torch_dtype(spec))

        return self._taken(header, named(), layout.total_bytes, began_s, interrupted)

    def _taken(
        self, header: Round, named: Iterable[tuple[str, Tensor]], n_bytes: int, began_s: float, interrupted: Interrupted
    ) -> Receipt:
        """Stage received tensors, unless the engine already has this version or a newer one."""
        received_s = time.monotonic()
        staged = header.version > self.version
        if staged:
            self._stage(header.version, named)
            wait_for_device(
                self._device, began_s + header.timeout_s, interrupted
            )  # the copy may only be queued until then
        return Receipt(
            n_bytes=n_bytes,
            receive_s=received_s - began_s,
            stage_s=time.monotonic() - received_s,
            staged=staged,
        )

    def settle(self, timeout_s: float) -> bool:
        return True  # whatever is in progress is abandoned

    def leave(self) -> None:
        self._opened.clear()
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _stage(self, version: WeightVersion, named: Iterable[tuple[str, Tensor]]) -> None:
        self._engine.stage_weights(version, named)
        self._staged = version

    def _store_of(self, plan: WeightPlan) -> Store:
        """One connection for all groups of a learner, because torch resolves host names for every new one."""
        key = (plan.host, plan.port)
        if key not in self._stores:
            self._stores.clear()
            self._stores[key] = connect_store(plan.host, plan.port, plan.join_timeout_s)
        return self._stores[key]


_NAMES_IN_ERROR = 8


@dataclass(frozen=True, slots=True)
class _Staged:
    version: WeightVersion
    tensors: list[Tensor]
    """Copies in the order of the parameters, on their device and in their dtype."""


class WeightStage:
    """Owns the live version and at most one staged set. Thread-safe."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], version: WeightVersion) -> None:
        """`parameters`: named_parameters() of the model; tied weights appear once."""
        self._parameters = parameters
        self._version = version
        self._staged: _Staged | None = None
        self._changed = threading.Condition()
        self.stale_total = 0
        """Ignored stagings: a newer version was already there."""

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def waiting(self) -> bool:
        return self._staged is not None

    def stage(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a full set, replacing one that is not swapped in yet. A version older than the newest known is ignored
        and counted: weights never go back. Raises ValueError for names or shapes that do not fit."""
        staged = _Staged(version, self._checked_copies(tensors))
        with self._changed:
            if version < (self._staged.version if self._staged is not None else self._version):
                self.stale_total += 1
                return
            self._staged = staged
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return when weights are staged, after `wake`, or after `timeout_s`."""
        with self._changed:
            if self._staged is None:
                self._changed.wait(timeout=max(timeout_s, 0.0))

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def swap(self) -> bool:
        """Copy the staged set into the parameters, in place; False if there is none."""
        with self._changed:
            staged, self._staged = self._staged, None
            if staged is None:
                return False
            self._version = staged.version
        for parameter, tensor in zip(self._parameters.values(), staged.tensors, strict=True):
            parameter.copy_(tensor)
        return True

    def _checked_copies(self, tensors: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
        copies: dict[str, Tensor] = {}
        wrong: dict[str, str] = {}
        for name, tensor in tensors:
            parameter = self._parameters.get(name)
            if parameter is None:
                wrong[name] = "is not a parameter of this model"
            elif name in copies:
                wrong[name] = "came twice"
            elif parameter.shape != tensor.shape:
                wrong[name] = f"has shape {tuple(tensor.shape)}, expected {tuple(parameter.shape)}"
            else:
                copies[name] = tensor.detach().to(parameter, copy=True)
        wrong.update({name: "is missing" for name in self._parameters if name not in copies and name not in wrong})
        if wrong:
            listed = "; ".join(f"{name} {what}" for name, what in list(wrong.items())[:_NAMES_IN_ERROR])
            more = f" (and {len(wrong) - _NAMES_IN_ERROR} more)" if len(wrong) > _NAMES_IN_ERROR else ""
            raise ValueError(
                f"weights refused, nothing will be swapped: {listed}{more}. Expected the {len(self._parameters)} "
                "names of named_parameters() of the same model (tied weights once)"
            )
        return [copies[name] for name in self._parameters]
