"""Tensors that leave their device for a while, and come back to where everything that refers to them finds them.

A tensor keeps its storage, which is emptied; so views, tied weights and optimizers need not know."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from stillhouse.models.transfer import share_of
from stillhouse.weights.buckets import aligned
from stillhouse.weights.staged_weights import streams_of


class Parked:
    """A set of tensors on one device. Not thread-safe."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """`tensors`: asked each time that they are to leave. The host memory that they need is kept, pinned for a GPU,
        so that the next time costs the copy alone."""
        self._tensors = tensors
        self._host_B = torch.empty(0, dtype=torch.uint8)
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []
        """Storages, and their bytes in host memory."""

    @property
    def n_bytes(self) -> int:
        """What is away."""
        return sum(host_B.numel() for _, host_B in self._away)

    @torch.no_grad()
    def leave(self) -> None:
        """Copy them to host memory and free the device's. Nothing that uses them is queued by other threads. Storages
        that cannot be emptied (a file in memory) stay. Idempotent."""
        if self._away:
            return
        storages = {share_of(t).untyped_storage().data_ptr(): share_of(t).untyped_storage() for t in self._tensors()}
        there = [storage for storage in storages.values() if storage.nbytes() and storage.resizable()]
        if not there:
            return
        device = there[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # other streams may still read them
        rooms = [aligned(storage.nbytes()) for storage in there]
        if self._host_B.numel() < sum(rooms):
            self._host_B = streams_of(device).host_bytes(sum(rooms))
        at = 0
        for storage, room in zip(there, rooms, strict=True):
            host_B = self._host_B[at : at + storage.nbytes()]
            host_B.copy_(_bytes_of(storage))
            self._away.append((storage, host_B))
            storage.resize_(0)
            at += room
        if device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def come_back(self) -> None:
        """Idempotent."""
        for storage, host_B in self._away:
            storage.resize_(host_B.numel())
            _bytes_of(storage).copy_(host_B)
        self._away.clear()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]
