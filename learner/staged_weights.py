"""Copies of the weights, taken so that training may go on while they are on their way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from engines.buckets import ALIGN_BYTES, Layout, manifest_of
from protocol.messages import WeightVersion


class StagedWeights:
    """One set of copies, on the device of the originals, all in one run of memory, which a broadcast can send as it
    lies. The next `fill` uses that memory again: fresh memory costs several times what the copying does."""

    def __init__(self) -> None:
        self.version = WeightVersion(0, 0)
        self.named: list[tuple[str, Tensor]] = []
        self._layout: Layout | None = None
        self._copied: Any = None

    def fill(self, version: WeightVersion, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors. On a GPU the copies are only queued, behind the work that makes the weights. Raises
        ValueError for no tensors, or a name that comes twice."""
        originals = [(name, tensor.detach()) for name, tensor in named]
        manifest, device = manifest_of(originals), originals[0][1].device
        if self._layout is None or self._layout.manifest != manifest or self.named[0][1].device != device:
            self._layout = Layout(manifest, ALIGN_BYTES)
            self.named = self._layout.views(torch.zeros(self._layout.total_bytes, dtype=torch.uint8, device=device))
        for (_, copy), (_, original) in zip(self.named, originals, strict=True):
            copy.copy_(original)
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
