"""Memory that other processes of this machine map: on a GPU by CUDA IPC, in host memory as a named segment.

torch's own primitives do both, and SGLang opens what they name (torch.multiprocessing.reductions). A segment is watched
by torch's `torch_shm_manager`, which removes it when no process that used it lives any more, however they ended.

Each handle is for one receiver, which must open it once: handles are counted, on a GPU too.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage

from stillhouse.weights.control_messages import CpuHandle, CudaHandle, MemoryHandle
from stillhouse.weights.errors import WeightsRefused

SEGMENTS: Final = Path("/dev/shm")
_EXPANDABLE: Final = b"e"
"""Second byte of torch's handle of memory in an expandable segment (SHAREABLE_CUDA_EXPANDABLE_SEGMENT)."""
_ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_kept: Final[list[Any]] = []
"""The pools of shared memory on GPUs, which last as long as the process."""


class NoSharedMemory(RuntimeError):
    """There is too little of it, or it cannot be shared."""


def shareable(n_bytes: int, device: torch.device) -> Tensor:
    """[n_bytes] uint8, zeros, on this device. Raises NoSharedMemory."""
    if device.type == "cuda":
        return _on_gpu(n_bytes, device)
    try:
        storage: Any = UntypedStorage._new_using_filename_cpu(n_bytes)  # type: ignore[attr-defined] # pyright: ignore
        _, name, _ = storage._share_filename_cpu_()
        _reserve(SEGMENTS / name.decode().lstrip("/"), n_bytes)
    except (OSError, RuntimeError) as error:
        raise NoSharedMemory(
            f"{SEGMENTS}: no {n_bytes / 1e9:.2f} GB for a bucket of the weights: {error}; expected two to fit (docker: "
            "--shm-size or --ipc=host), a smaller weights.bucket_bytes, or weights.transport = collective"
        ) from error
    return _bytes_of(storage).zero_()


class Loans:
    """Handles of memory, and what torch must keep as long as their receivers may open it."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def export(self, run_B: Tensor) -> MemoryHandle:
        """A handle of the memory of this tensor, which is the whole of its storage, for one receiver. On a GPU what
        this thread has queued comes before what the receiver does. Raises NoSharedMemory."""
        if run_B.device.type != "cuda":
            return export(run_B)
        # Every handle puts a counter and an event around the storage that it is made of (torch/csrc/StorageSharing.cpp,
        # CudaIPCTypes.cpp), and they last as long as that storage: so each has a storage of its own.
        alias: Any = vars(torch)["_C"]._construct_storage_from_data_pointer(
            run_B.data_ptr(), run_B.device, run_B.untyped_storage().nbytes()
        )
        self._kept.append(alias)
        return _export_cuda(alias, run_B.device)


def export(run_B: Tensor) -> CpuHandle:
    """A handle of a segment in host memory, for one receiver."""
    storage: Any = run_B.untyped_storage()  # torch has no public names for what follows
    manager, name, n_bytes = storage._share_filename_cpu_()
    storage._shared_incref()  # whoever opens it takes this away again
    return CpuHandle(manager, name, n_bytes)


def _export_cuda(storage: Any, device: torch.device) -> CudaHandle:
    _, handle, n_bytes, offset, counter, counter_offset, event, sync = storage._share_cuda_()
    if handle[1:2] == _EXPANDABLE:
        raise NoSharedMemory(
            "the memory for the weights is in an expandable segment of torch's allocator, which SGLang's torch may be "
            "unable to open; set weights.transport = collective"
        )
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return CudaHandle(uuid, handle, n_bytes, offset, counter, counter_offset, event, sync)


def open_memory(handle: MemoryHandle, n_bytes: int) -> Tensor:
    """[n_bytes] uint8: the memory itself. Raises WeightsRefused when it is not there, or of another size."""
    if handle.n_bytes != n_bytes:
        raise WeightsRefused(f"the shared memory has {handle.n_bytes} bytes, expected {n_bytes}")
    from torch.multiprocessing import reductions

    try:
        if isinstance(handle, CpuHandle):
            name = SEGMENTS / handle.name.decode().lstrip("/")
            if name.stat().st_size < n_bytes:
                raise WeightsRefused(f"{name} has {name.stat().st_size} bytes, expected {n_bytes}")
            return _bytes_of(reductions.rebuild_storage_filename(UntypedStorage, handle.manager, handle.name, n_bytes))
        return reductions.rebuild_cuda_tensor(
            *(Tensor, (n_bytes,), (1,), 0, torch.storage.TypedStorage, torch.uint8, _device(handle.uuid)),
            *(handle.handle, handle.n_bytes, handle.offset_bytes, False, handle.ref_counter),
            *(handle.ref_counter_offset, handle.event, handle.event_sync),
        )
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise WeightsRefused(f"the learner's memory cannot be opened here: {error}; is this its machine?") from error


def _device(uuid: str) -> int:
    """CUDA_VISIBLE_DEVICES gives a GPU another number in each process, so it is known by its UUID."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise WeightsRefused(f"the weights are on GPU {uuid}, which this process does not see")


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _reserve(segment: Path, n_bytes: int) -> None:
    """A segment gets its memory only when it is written to, and who writes more than there is dies by SIGBUS."""
    with segment.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, max(segment.stat().st_size, n_bytes))


def _on_gpu(n_bytes: int, device: torch.device) -> Tensor:
    """In a pool of its own, so that the segment that the receivers map holds nothing else, and not in an expandable
    one. Its pool never gives it to anybody else."""
    pool = torch.cuda.MemPool()
    _kept.append(pool)
    with _plain_segments(), torch.cuda.use_mem_pool(pool, device):
        run_B = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    Loans().export(run_B)  # fails now, if it ever does
    return run_B


@contextmanager
def _plain_segments() -> Generator[None]:
    """New segments of torch's allocator are plain ones meanwhile."""
    asked = next((os.environ[name] for name in _ALLOCATOR if os.environ.get(name)), "")
    if "expandable_segments:True" not in asked:
        yield
        return
    allocator: Any = vars(torch)["_C"]
    allocator._accelerator_setAllocatorSettings(asked.replace("expandable_segments:True", "expandable_segments:False"))
    try:
        yield
    finally:
        allocator._accelerator_setAllocatorSettings(asked)
