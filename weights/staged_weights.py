"""Copies of the weights, so that training can continue while they are being sent, and the GPU streams involved.

    training thread    optimizer step | copies of the weights | mark | next forward ...
    publisher thread                            waits for the mark | checksums, broadcasts, snapshots

By default both threads would queue on one stream, torch's default, and each broadcast would wait for a forward or
backward pass. So the publisher's thread has a stream of its own, on which nothing starts before the host has seen the
mark. The copies stay on the training stream, because the next optimizer step changes the weights they read. Their
memory is kept for the whole run, so that no allocator reuses it while another stream reads it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from stillhouse.models.transfer import whole
from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights.buckets import BucketLayout, Content, WholeTensors, manifest_of
from stillhouse.weights.config import CPU_BUCKET_BYTES, Place, SentDtype
from stillhouse.weights.manifest import TensorSpec, WeightManifest, in_pieces
from stillhouse.weights.roster import EMBEDDED, GroupMembers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Merged:
    """A weight and its adapter (`learner.lora`). The sum is computed only when it is copied, and never kept."""

    base: Tensor
    """On the meta device for one that is kept in fewer bits."""
    delta: Callable[[], Tensor]
    """Has the shape and dtype of `base`; the whole sum if that has no numbers."""

    def tensor(self) -> Tensor:
        return self.delta() if self.base.is_meta else whole(self.base + self.delta())


Weight: TypeAlias = Tensor | Merged


def tensor_of(weight: Weight) -> Tensor:
    """A plain weight itself, without gradient; a merged or a sharded one in new memory."""
    return weight.tensor() if isinstance(weight, Merged) else whole(weight.detach())


def sent_manifest(weights: Sequence[tuple[str, Weight]], dtype: SentDtype) -> WeightManifest:
    """The tensors as they are sent; sharded ones count as whole. Raises ValueError for no tensors, or a name that comes
    twice."""
    originals = [(name, _original(weight)) for name, weight in weights]
    specs = manifest_of(originals).tensors
    if dtype != "keep":
        specs = tuple(
            TensorSpec(spec.name, dtype, spec.shape) if tensor.is_floating_point() else spec
            for spec, (_, tensor) in zip(specs, originals, strict=True)
        )
    return WeightManifest(specs)


def _original(weight: Weight) -> Tensor:
    return weight.base if isinstance(weight, Merged) else weight.detach()


class Mark(Protocol):
    def synchronize(self) -> None:
        """Sleep until everything that was queued before the mark is done."""
        ...


class WeightStreams(Protocol):
    def mark(self) -> Mark | None:
        """A mark after everything the calling thread has queued. None: nothing is ever queued on this device."""
        ...

    def own(self) -> AbstractContextManager[Any]:
        """Within this context the calling thread queues on a stream of its own."""
        ...

    def host_bytes(self, n_bytes: int) -> Tensor:
        """Host memory into which the device can copy directly, [n_bytes] uint8, zeros; kept for the whole run."""
        ...


class NoStreams:
    """Streams of a CPU, which queues nothing."""

    def mark(self) -> None:
        return None

    def own(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def host_bytes(self, n_bytes: int) -> Tensor:
        return torch.zeros(n_bytes, dtype=torch.uint8)


class CudaStreams:
    """Streams of one GPU."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """`cuda`: torch.cuda, or a stand-in for it in tests."""
        self._device = device
        self._cuda = cuda

    def mark(self) -> Mark:
        event = self._cuda.Event(blocking=True)  # otherwise waiting for it keeps a core busy
        event.record(self._cuda.current_stream(self._device))
        return event

    def own(self) -> AbstractContextManager[Any]:
        return self._cuda.stream(self._cuda.Stream(self._device))  # this also sets the thread's current device

    def host_bytes(self, n_bytes: int) -> Tensor:
        """Ordinary memory that is pinned afterwards, because torch rounds its own pinned memory up to a power of two.
        It is never unpinned."""
        run_B = torch.zeros(n_bytes, dtype=torch.uint8)
        error = int(self._cuda.cudart().cudaHostRegister(run_B.data_ptr(), n_bytes, 0))
        if error:
            log.warning(
                "%.1f GB of host memory for copies of the weights could not be pinned (CUDA error %d; see ulimit -l): "
                "copying to it takes several times as long",
                n_bytes / 1e9,
                error,
            )
        return run_B


def streams_of(device: torch.device) -> WeightStreams:
    return CudaStreams(device) if device.type == "cuda" else NoStreams()


class StagedVersion(ABC):
    """The copies of one version after the other."""

    def __init__(self) -> None:
        self.version = WeightVersion(0, 0)
        self.canary: Tensor | None = None
        """The student's log-probs of the canary prompt under these weights (weights.server_checks)."""

    @abstractmethod
    def fill(self, version: WeightVersion, named: Iterable[tuple[str, Weight]]) -> None:
        """Copy the weights, in place of those of another version. Raises ValueError for no tensors, or a name that
        comes twice."""
        ...

    @abstractmethod
    def wait(self) -> None:
        """Wait until the copies are made. Call it before reading them, in the thread that reads them."""

    @property
    @abstractmethod
    def manifest(self) -> WeightManifest:
        """Names, dtypes and shapes of the tensors as they are sent."""

    @property
    @abstractmethod
    def content(self) -> Content: ...

    @property
    def n_bytes(self) -> int:
        return sum(spec.n_bytes for spec in self.manifest.tensors)


class Staging(Protocol):
    """Makes copies for a publisher. Arguments as of `StagedWeights`."""

    def __call__(
        self,
        members: GroupMembers,
        *,
        dtype: SentDtype,
        bucket_bytes: int,
        place: Place,
        streams: WeightStreams,
    ) -> StagedVersion: ...


class StagedWeights(StagedVersion):
    """Copies of all weights in this process, on the originals' device or in host memory, in one contiguous run that a
    broadcast can send in place. The next `fill` reuses the memory: fresh memory costs several times as much as the
    copying."""

    def __init__(
        self,
        members: GroupMembers = EMBEDDED,
        *,
        dtype: SentDtype = "keep",
        bucket_bytes: int = CPU_BUCKET_BYTES,
        place: Place = "device",
        streams: WeightStreams | None = None,
    ) -> None:
        """`members`: the receivers, which decide the layout. `dtype`: of all floating-point copies. `place`: next to
        the originals or in pinned host memory. `streams`: those of the originals' device; None: a CPU's."""
        super().__init__()
        self.named: list[tuple[str, Tensor]] = []
        """The copies by the names by which they are sent."""
        self.run_B = torch.empty(0, dtype=torch.uint8)
        """The memory of the copies."""
        self._members = members
        self._dtype: SentDtype = dtype
        self._place = place
        self._streams = NoStreams() if streams is None else streams
        self._bucket_bytes = bucket_bytes
        self._layout: BucketLayout | None = None
        self._sent: WeightManifest | None = None
        self._copies: list[Tensor] = []
        """One per original."""
        self._copied: Mark | None = None

    def fill(self, version: WeightVersion, named: Iterable[tuple[str, Weight]]) -> None:
        """Copy the tensors one after the other, so that at most one merged or cast tensor exists at a time. On a GPU
        the copies are only queued, between the work that computes the weights and the work that follows."""
        weights = list(named)
        manifest, device = sent_manifest(weights, self._dtype), _original(weights[0][1]).device
        if self._layout is None or self._layout.manifest != manifest:
            self._layout = self._members.staging(manifest, self._bucket_bytes)
            self.run_B = self._run(self._layout.total_bytes, device)
            self._copies = [copy for _, copy in self._layout.views(self.run_B)]
            self._sent = in_pieces(manifest, self._members.pieces)
            self.named = self._members.staging(self._sent, self._bucket_bytes).views(self.run_B)
        to_host = self._place == "host" and device.type != "cpu"
        for copy, (_, weight) in zip(self._copies, weights, strict=True):
            tensor = tensor_of(weight)
            # Cast before a copy to the host: fewer bytes to move, and the copy is a plain one.
            copy.copy_(tensor.to(copy.dtype) if to_host else tensor, non_blocking=to_host)
        self.version = version
        self._copied = self._streams.mark()

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    @property
    def manifest(self) -> WeightManifest:
        if self._sent is None:
            raise RuntimeError("nothing is staged")
        return self._sent

    @property
    def content(self) -> Content:
        return WholeTensors(self.named)

    def _run(self, n_bytes: int, device: torch.device) -> Tensor:
        in_host = self._place == "host"
        log.info(
            "copies of the weights to be sent: %.2f GB %s, one of up to two",
            n_bytes / 1e9,
            "in pinned memory of the host" if in_host else f"on {device}",
        )
        return self._streams.host_bytes(n_bytes) if in_host else torch.zeros(n_bytes, dtype=torch.uint8, device=device)
