"""Precision of float32 products, and tolerances for comparing two ways to compute one result.

GPUs since Ampere can compute a float32 product in TF32, which rounds its inputs to 11 significant bits: several times
faster, with errors of 1e-3. It stays off, because a user who asks for float32 on a GPU wants float32 (bfloat16 is the
fast choice). This module turns torch's switches off; NVIDIA_TF32_OVERRIDE=1 is read by cuBLAS itself and cannot be
overridden.
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
"""Between float32 and bfloat16: TF32 is eight times as exact as bfloat16, which has 8 significant bits."""


def tf32_forced(device_type: str, environment: Mapping[str, str] = os.environ) -> bool:
    """True when float32 products are TF32 regardless of torch's switches."""
    return device_type == "cuda" and environment.get(TF32_VARIABLE) == "1"


def relative_tolerance(dtype: torch.dtype, *, tf32: bool) -> float:
    """Allowed difference of logits, relative to the largest, between two forwards that sum in another order. `tf32`:
    forced."""
    if dtype == torch.float32 and tf32:
        return _RELATIVE_TF32
    return _RELATIVE.get(dtype, _RELATIVE_HALF)


def tolerance_name(dtype: torch.dtype, *, tf32: bool) -> str:
    """Name of a precision, for messages."""
    return f"{dtype} by TF32, which {TF32_VARIABLE}=1 forces" if dtype == torch.float32 and tf32 else str(dtype)


def turn_tf32_off(device: str) -> None:
    """Turn TF32 off for this process; warns where that is impossible."""
    torch.set_float32_matmul_precision("highest")
    if tf32_forced(torch.device(device).type):
        log.warning("%s=1 is set: float32 products on %s are TF32, about 1e-3 off; unset it", TF32_VARIABLE, device)


def products(device_type: str, *, bfloat16: bool) -> AbstractContextManager[Any]:
    """Context in which matrix products of a forward pass are in bfloat16 (autocast), or in the parameters' dtype."""
    return torch.autocast(device_type, torch.bfloat16) if bfloat16 else nullcontext()


def halve_frozen(model: torch.nn.Module) -> int:
    """Keep in bfloat16 the weights that only products read and no optimizer changes, for use with `products`. It rounds
    them there anyway, so no result changes. Returns the bytes saved. A head that is tied to the embedding stays."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    saved = 0
    for layer in model.modules():
        if not isinstance(layer, torch.nn.Linear) or id(layer.weight) in tables:
            continue
        if layer.weight.dtype == torch.float32 and not layer.weight.requires_grad:
            layer.weight.data = layer.weight.data.bfloat16()
            saved += layer.weight.nbytes
    return saved


@contextmanager
def full_float32() -> Generator[None]:
    """Context without TF32, as far as torch decides it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
