"""Copies of the weights, taken so that training may go on while they are on their way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from protocol.messages import WeightVersion


class StagedWeights:
    """One set of copies, on the device of the originals; its memory is used again by the next `fill`."""

    def __init__(self) -> None:
        self.version = WeightVersion(0, 0)
        self.named: list[tuple[str, Tensor]] = []
        self._copied: Any = None

    def fill(self, version: WeightVersion, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors. On a GPU the copies are only queued, behind the work that makes the weights."""
        kept = dict(self.named)
        copies: list[tuple[str, Tensor]] = []
        device: torch.device | None = None
        with torch.no_grad():
            for name, tensor in named:
                copy = kept.get(name)
                if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                    copy = torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
                copies.append((name, copy.copy_(tensor.detach())))
                device = tensor.device
        self.version, self.named = version, copies
        self._copied = None
        if device is not None and device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until the copies are made. Before they are read, in the thread that reads them."""
        if self._copied is not None:
            self._copied.synchronize()

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.named)
