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


def read(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, after everything queued before it is done."""
    if tensor.device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # without `blocking` the thread keeps a core busy while it waits
        done.record(torch.cuda.current_stream(tensor.device))
        done.synchronize()
    return tensor.cpu()
