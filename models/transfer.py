"""Copies between host memory and a device, such that the host waits for a GPU only where it must.

torch's plain `.to("cuda")` from ordinary memory waits until everything queued before it is done, as `.item()`, `bool()`
and `nonzero()` do. `upload` only queues a copy; `read` waits, and sleeps meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(values: Tensor | np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """The values on `device`. For a CPU, writable host memory is not copied. `values` on another device are copied by
    that device, in its stream order."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.require(values, requirements="W"))
    if device.type == "cuda" and tensor.device.type == "cpu":
        # torch keeps the pinned memory alive until the copy is done.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def whole(tensor: Tensor) -> Tensor:
    """A tensor in full. If ranks hold it in shares (torch.distributed.tensor.DTensor), all must ask at the same time;
    any other is returned as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def share_of(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; of any but a sharded one, all of it."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def like(parameter: Tensor, values: Tensor) -> Tensor:
    """Values of the parameter's shape, with its dtype, on its device; for a sharded one, this rank's share of them."""
    if not hasattr(parameter, "to_local"):
        return values.to(parameter)
    from torch.distributed.tensor import DTensor, distribute_tensor  # takes a second to load

    assert isinstance(parameter, DTensor)
    local = values.to(device=parameter.device, dtype=parameter.dtype)
    return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)


def read(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, after everything queued before it is done."""
    if tensor.device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # without `blocking` the thread keeps a core busy while it waits
        done.record(torch.cuda.current_stream(tensor.device))
        done.synchronize()
    return tensor.cpu()
