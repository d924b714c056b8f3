"""Arrays of a batch as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Without a copy where the device is the CPU and the array may be written to."""
    return torch.from_numpy(np.require(array, requirements="W")).to(device)
