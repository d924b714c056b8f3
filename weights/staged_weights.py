"""Copies of the weights, taken so that training may go on while they are on their way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from protocol.messages import WeightVersion
from weights.buckets import BucketLayout, manifest_of
from weights.manifest import Manifest, TensorSpec
from weights.members import EMBEDDED, Members
from weights.publish_choices import CPU_BUCKET_BYTES, SentDtype
from weights.streams import Mark, NoStreams, WeightStreams

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Merged:
    """A weight with an adapter (`learner.lora`), added up only when it is copied, and never kept."""

    base: Tensor
    delta: Callable[[], Tensor]
    """Of the shape and dtype of `base`."""

    def tensor(self) -> Tensor:
        return self.base + self.delta()


Weight: TypeAlias = Tensor | Merged


def tensor_of(weight: Weight) -> Tensor:
    """A plain weight itself, without gradient; a merged one in new memory."""
    return weight.tensor() if isinstance(weight, Merged) else weight.detach()


class StagedWeights:
    """One set of copies, on the device of the originals or in the host's memory, all in one run, which a broadcast can
    send as it lies. The next `fill` uses that memory again: fresh memory costs several times what the copying does."""

    def __init__(
        self,
        members: Members = EMBEDDED,
        *,
        dtype: SentDtype = "keep",
        bucket_bytes: int = CPU_BUCKET_BYTES,
        place: Literal["device", "host"] = "device",
        streams: WeightStreams | None = None,
    ) -> None:
        """`members`: for whom, which is how the copies are laid. `dtype`: of all floating-point copies. `place`: beside
        the originals, or in pinned memory of the host. `streams`: of the originals' device; None: a CPU."""
        self.version = WeightVersion(0, 0)
        self.named: list[tuple[str, Tensor]] = []
        self.canary: Tensor | None = None
        """What the student thought of a canary prompt under these weights (weights.canary)."""
        self._members = members
        self._dtype: SentDtype = dtype
        self._place = place
        self._streams = NoStreams() if streams is None else streams
        self._bucket_bytes = bucket_bytes
        self._layout: BucketLayout | None = None
        self._copied: Mark | None = None

    def fill(self, version: WeightVersion, named: Iterable[tuple[str, Weight]]) -> None:
        """Copy the tensors, one after the other: of merged or cast ones no more than one exists at a time. On a GPU the
        copies are only queued, behind the work that makes the weights and before all that comes after. Raises
        ValueError for no tensors, or a name that comes twice."""
        weights = list(named)
        originals = [(name, w.base if isinstance(w, Merged) else w.detach()) for name, w in weights]
        manifest, device = self._cast(manifest_of(originals), originals), originals[0][1].device
        if self._layout is None or self._layout.manifest != manifest:
            self._layout = self._members.staging(manifest, self._bucket_bytes)
            self.named = self._layout.views(self._run(self._layout.total_bytes, device))
        to_host = self._place == "host" and device.type != "cpu"
        for (_, copy), (_, weight) in zip(self.named, weights, strict=True):
            tensor = tensor_of(weight)
            # What goes to the host is cast before: fewer bytes on the way, and the copy is a plain one.
            copy.copy_(tensor.to(copy.dtype) if to_host else tensor, non_blocking=to_host)
        self.version = version
        self._copied = self._streams.mark()

    def wait(self) -> None:
        """Until the copies are made. Before they are read, in the thread that reads them."""
        if self._copied is not None:
            self._copied.synchronize()

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.named)

    def _run(self, n_bytes: int, device: torch.device) -> Tensor:
        in_host = self._place == "host"
        log.info(
            "copies of the weights to be sent: %.2f GB %s, one of up to two",
            n_bytes / 1e9,
            "in pinned memory of the host" if in_host else f"on {device}",
        )
        return self._streams.host_bytes(n_bytes) if in_host else torch.zeros(n_bytes, dtype=torch.uint8, device=device)

    def _cast(self, manifest: Manifest, originals: list[tuple[str, Tensor]]) -> Manifest:
        if self._dtype == "keep":
            return manifest
        return Manifest(
            tuple(
                TensorSpec(spec.name, self._dtype, spec.shape) if tensor.is_floating_point() else spec
                for spec, (_, tensor) in zip(manifest.tensors, originals, strict=True)
            )
        )
