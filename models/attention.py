"""Causal self-attention by torch's fused kernels, with or without grouped queries (several query heads per key head).

On CUDA `scaled_dot_product_attention` takes the first kernel that accepts the call, else its math fallback, which keeps
all scores: 77 GB for 4,096 tokens, 32 heads and 36 layers in float32. The kernels' conditions, from torch 2.13's
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp:

    flash             float16, bfloat16; no mask; one head size for q, k and v, at most 256 (with gradients 192 on
                      sm86, sm89, sm120); grouped queries (`check_batch_size_and_num_heads_dense<true>`)
    memory-efficient  float32, float16, bfloat16; masks; any head size; no grouped queries in 2.13 (<false>; torch's
                      main has begun to take them)
    cuDNN             tried after those two; float16, bfloat16 only

So where flash does not apply, keys and values are repeated once per query head for the memory-efficient kernel. This
costs 2 * T * N * D more numbers per layer (64 MB each for 4,096 tokens of 32 * 128 in float32).

Legend: B sequences, N query heads, G key/value heads, L tokens, M tokens attended to, D head size.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_FLASH_DTYPES: Final = (torch.float16, torch.bfloat16)
_FLASH_HEAD_SIZE: Final = 192
"""Largest head size that flash accepts on every GPU that it supports."""


def repeats_heads(
    device_type: str, dtype: torch.dtype, *, masked: bool, query_size: int, value_size: int, grouped: bool
) -> bool:
    """True when keys and values must be repeated so that a fused kernel accepts the call. `dtype`: that of the
    computation, which under autocast differs from the tensors'. Sizes are those of one head."""
    if not grouped or device_type != "cuda":
        return False  # torch's kernel for CPUs takes grouped queries in any dtype, with and without a mask
    flash = dtype in _FLASH_DTYPES and not masked and query_size == value_size <= _FLASH_HEAD_SIZE
    return not flash


def attend(query: Tensor, key: Tensor, value: Tensor, *, mask_LM: Tensor | None, scaling: float | None) -> Tensor:
    """[B, N, L, D of value]; query [B, N, L, D], key and value [B, G, M, D]. `mask_LM`: bool, True where a token is
    seen; None, with M = L: each token sees itself and all before it. `scaling`: None = 1 / sqrt(D)."""
    groups = query.shape[1] // key.shape[1]
    repeated = repeats_heads(
        query.device.type,
        computed_in(query),
        masked=mask_LM is not None,
        query_size=query.shape[-1],
        value_size=value.shape[-1],
        grouped=groups > 1,
    )
    if repeated:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask_LM,
        is_causal=mask_LM is None,
        scale=scaling,
        enable_gqa=groups > 1 and not repeated,
    )


def computed_in(tensor: Tensor) -> torch.dtype:
    """The dtype of products with this tensor: autocast's where it is on (it does not change float64)."""
    kind = tensor.device.type
    if tensor.dtype == torch.float64 or not _has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return tensor.dtype
    return torch.get_autocast_dtype(kind)


def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)  # pyright: ignore[reportPrivateImportUsage]
