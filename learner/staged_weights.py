"""Copies of the weights, taken so that training may go on while they are on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from engines.buckets import manifest_of
from engines.manifest import Manifest, TensorSpec
from learner.members import EMBEDDED, AnyLayout, Members
from learner.publish_config import PublishDtype
from protocol.messages import WeightVersion

_DEFAULT_BUCKET_BYTES = 64 << 20


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
    """One set of copies, on the device of the originals, all in one run of memory, which a broadcast can send as it
    lies. The next `fill` uses that memory again: fresh memory costs several times what the copying does."""

    def __init__(
        self,
        members: Members = EMBEDDED,
        *,
        dtype: PublishDtype = "keep",
        bucket_bytes: int = _DEFAULT_BUCKET_BYTES,
    ) -> None:
        """`members`: for whom, which is how the copies are laid. `dtype`: of all floating-point copies."""
        self.version = WeightVersion(0, 0)
        self.named: list[tuple[str, Tensor]] = []
        self._members = members
        self._dtype: PublishDtype = dtype
        self._bucket_bytes = bucket_bytes
        self._layout: AnyLayout | None = None
        self._copied: Any = None

    def fill(self, version: WeightVersion, named: Iterable[tuple[str, Weight]]) -> None:
        """Copy the tensors, one after the other: of merged ones no more than one exists at a time. On a GPU the copies
        are only queued, behind the work that makes the weights. Raises ValueError for no tensors, or a name that comes
        twice."""
        weights = list(named)
        originals = [(name, w.base if isinstance(w, Merged) else w.detach()) for name, w in weights]
        manifest, device = self._cast(manifest_of(originals), originals), originals[0][1].device
        if self._layout is None or self._layout.manifest != manifest or self.named[0][1].device != device:
            self._layout = self._members.staging(manifest, self._bucket_bytes)
            self.named = self._layout.views(torch.zeros(self._layout.total_bytes, dtype=torch.uint8, device=device))
        for (_, copy), (_, weight) in zip(self.named, weights, strict=True):
            copy.copy_(tensor_of(weight))
        self.version = version
        self._copied = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until the copies are made. Before they are read, in the thread that reads them."""
        if self._copied is not None:
            self._copied.synchronize()

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.named)

    def _cast(self, manifest: Manifest, originals: list[tuple[str, Tensor]]) -> Manifest:
        if self._dtype == "keep":
            return manifest
        return Manifest(
            tuple(
                TensorSpec(spec.name, self._dtype, spec.shape) if tensor.is_floating_point() else spec
                for spec, (_, tensor) in zip(manifest.tensors, originals, strict=True)
            )
        )
