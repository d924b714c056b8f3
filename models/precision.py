"""How exact float32 products are, and how far two ways to one result may differ.

On GPUs since Ampere a float32 product may be made in TF32, which rounds its inputs to 11 significant bits: several
times faster, and 1e-3 off. We leave that off: who asks for float32 on a GPU wants float32 (bfloat16 is the fast way).
torch's own switches are turned off here; NVIDIA_TF32_OVERRIDE=1 is read by cuBLAS itself, and cannot be.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

log = logging.getLogger(__name__)

TF32_VARIABLE: Final = "NVIDIA_TF32_OVERRIDE"
_RELATIVE: Final = {torch.float64: 1e-8, torch.float32: 1e-4}
_RELATIVE_HALF: Final = 0.05
_RELATIVE_TF32: Final = 0.01
"""Between float32 and bfloat16: eight times as exact as the latter, which has 8 significant bits."""


def tf32_forced(device_type: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Float32 products are TF32 whatever torch says."""
    return device_type == "cuda" and environment.get(TF32_VARIABLE) == "1"


def relative_tolerance(dtype: torch.dtype, *, tf32: bool) -> float:
    """Of logits, to the largest of them, between two forwards that do the same in another order. `tf32`: forced."""
    if dtype == torch.float32 and tf32:
        return _RELATIVE_TF32
    return _RELATIVE.get(dtype, _RELATIVE_HALF)


def tolerance_name(dtype: torch.dtype, *, tf32: bool) -> str:
    """For messages."""
    return f"{dtype} by TF32, which {TF32_VARIABLE}=1 forces" if dtype == torch.float32 and tf32 else str(dtype)


def turn_tf32_off(device: str) -> None:
    """For this process. Says so where it cannot be done."""
    torch.set_float32_matmul_precision("highest")
    if tf32_forced(torch.device(device).type):
        log.warning("%s=1 is set: float32 products on %s are TF32, about 1e-3 off; unset it", TF32_VARIABLE, device)


def products(device_type: str, *, bfloat16: bool) -> AbstractContextManager[Any]:
    """Inside, matrix products of a model's forward pass are in bfloat16 (autocast), or in its parameters' dtype."""
    return torch.autocast(device_type, torch.bfloat16) if bfloat16 else nullcontext()


@contextmanager
def full_float32() -> Generator[None]:
    """No TF32 inside, as far as it is torch's to say."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
