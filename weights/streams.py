"""In what order a GPU trains, copies weights and sends them.

    training thread    optimizer step | copies of the weights | mark | next forward ...
    publisher thread                            waits for the mark | checksums, broadcasts, snapshots

Both threads would queue on one stream, torch's default, and each broadcast would stand behind a forward or backward
pass. So the publisher's thread has a stream of its own; nothing on it begins before the host has seen the mark. The
copies stay on the training stream: the next optimizer step changes what they read. They are kept for the whole run, so
that no allocator gives their memory away while another stream reads it.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Mark(Protocol):
    def synchronize(self) -> None:
        """The calling thread sleeps until what was queued before the mark is done."""
        ...


class WeightStreams(Protocol):
    def mark(self) -> Mark | None:
        """Behind all that the calling thread has queued. None: nothing is ever queued here."""
        ...

    def own(self) -> AbstractContextManager[Any]:
        """The calling thread queues on a stream of its own."""
        ...

    def host_bytes(self, n_bytes: int) -> Tensor:
        """Memory of the host into which the device copies without help, [n_bytes] uint8, zeros. For the whole run."""
        ...


class NoStreams:
    """Of a CPU."""

    def mark(self) -> None:
        return None

    def own(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def host_bytes(self, n_bytes: int) -> Tensor:
        return torch.zeros(n_bytes, dtype=torch.uint8)


class CudaStreams:
    """Of one GPU."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """`cuda`: torch.cuda, or what stands for it."""
        self._device = device
        self._cuda = cuda

    def mark(self) -> Mark:
        event = self._cuda.Event(blocking=True)  # else a core is kept busy by waiting
        event.record(self._cuda.current_stream(self._device))
        return event

    def own(self) -> AbstractContextManager[Any]:
        return self._cuda.stream(self._cuda.Stream(self._device))  # which also makes its device the thread's

    def host_bytes(self, n_bytes: int) -> Tensor:
        """Ordinary memory that is then pinned: torch's own pinned memory is rounded up to a power of two. It is not
        unpinned again."""
        run_B = torch.zeros(n_bytes, dtype=torch.uint8)
        error = int(self._cuda.cudart().cudaHostRegister(run_B.data_ptr(), n_bytes, 0))
        if error:
            log.warning(
                "%.1f GB of host memory for copies of the weights could not be pinned (CUDA error %d; see ulimit -l): "
                "copies to it take several times as long",
                n_bytes / 1e9,
                error,
            )
        return run_B


def streams_of(device: torch.device) -> WeightStreams:
    return CudaStreams(device) if device.type == "cuda" else NoStreams()
