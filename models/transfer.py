"""Copies between this process's memory and a device, so that the host waits for a GPU only where it must.

torch's plain `.to("cuda")` from ordinary memory waits until everything queued before it is done, as `.item()`, `bool()`
and `nonzero()` do. `upload` only queues; `read` is the one that waits, and it sleeps meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(values: Tensor | np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """On `device`. A CPU's own memory is not copied where it may be written to. `values` on another device than a CPU
    are copied by that device, in its order."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.require(values, requirements="W"))
    if device.type == "cuda" and tensor.device.type == "cpu":
        # torch keeps the pinned memory until the copy was made.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def read(tensor: Tensor) -> Tensor:
    """On the CPU, when all that was queued before it is done."""
    if tensor.device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # else the thread keeps a core busy while it waits
        done.record(torch.cuda.current_stream(tensor.device))
        done.synchronize()
    return tensor.cpu()
