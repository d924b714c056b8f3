"""Causal self-attention by torch's fused kernels, with or without grouped queries (several query heads per key head).

On CUDA `scaled_dot_product_attention` takes the first kernel that accepts the call, else its math fallback, which keeps
all scores: 77 GB for 4,096 tokens, 32 heads and 36 layers in float32. The kernels' conditions, from torch 2.13's
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp:

    flash             float16, bfloat16; no mask; one head size for q, k and v, at most 256 (with gradients 192 on
                      sm86, sm89, sm120); grouped queries (`check_batch_size_and_num_heads_dense<true>`)
    memory-efficient  float32, float16, bfloat16; masks; any head size; no grouped queries in 2.13 (<false>; torch's
                      main has begun to take them)
    cuDNN             float16, bfloat16 only; torch 2.11 tries it first on Hopper. It is turned off here: it compiles a
                      plan for each shape and keeps it, and in a packed forward or a decode step nearly every shape is
                      new

So where flash does not apply, keys and values are repeated once per query head for the memory-efficient kernel. This
costs 2 * T * N * D more numbers per layer (64 MB each for 4,096 tokens of 32 * 128 in float32).

Queries of the last L of M tokens (`attend_last`) need a causal mask that is aligned at its lower right. torch's kernels
for CUDA have one. The one for CPUs would need the mask as a tensor, 2 GB for 16,384 of 32,768 tokens; there the prefix
and the L tokens themselves are two calls, which are put together by their normalisers.

Legend: B sequences, N query heads, G key/value heads, L tokens, M tokens attended to, D head size.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

torch.backends.cuda.enable_cudnn_sdp(False)
_FLASH_DTYPES: Final = (torch.float16, torch.bfloat16)
_CPU_KERNEL: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
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
    key, value, grouped = _fitting_heads(query, key, value, masked=mask_LM is not None)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask_LM, is_causal=mask_LM is None, scale=scaling, enable_gqa=grouped
    )


def attend_last(query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> Tensor:
    """[B, N, L, D of value] of the last L of M tokens: each sees itself and all before it. Shapes and dtypes as in
    `attend`; under autocast, the tensors must be in its dtype already."""
    if query.shape[2] == key.shape[2]:
        return attend(query, key, value, mask_LM=None, scaling=scaling)
    if query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        return cast(Tensor, _LastOnCpu.apply(query, key, value, scaling))
    return _attend_aligned(query, key, value, scaling)


def _attend_aligned(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """`attend_last` by torch's own mask, which is no tensor where a fused kernel for CUDA applies."""
    key, value, grouped = _fitting_heads(query, key, value, masked=False)
    mask = cast(Tensor, causal_lower_right(query.shape[2], key.shape[2]))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)


def _fitting_heads(query: Tensor, key: Tensor, value: Tensor, *, masked: bool) -> tuple[Tensor, Tensor, bool]:
    """Keys and values, repeated where a fused kernel needs that, and whether several query heads share one of them."""
    groups = query.shape[1] // key.shape[1]
    repeated = repeats_heads(
        query.device.type,
        computed_in(query),
        masked=masked,
        query_size=query.shape[-1],
        value_size=value.shape[-1],
        grouped=groups > 1,
    )
    if repeated:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return key, value, groups > 1 and not repeated


class _LastOnCpu(torch.autograd.Function):
    """Softmax over the P = M - L tokens of the prefix and over the L tokens, each with its logarithm z of the sum of
    exponentials; then out = (e^z1 out1 + e^z2 out2) / (e^z1 + e^z2). The kernel's backward pass takes the output and
    the normaliser of the whole, so that each part gives its own share of the gradient (as in ring attention, Liu et al.
    2023, arXiv:2310.01889)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:  # pyright: ignore
        ctx.prefix, ctx.scaling = key.shape[2] - query.shape[2], scaling
        own = [_at_least_float32(x) for x in (query, key, value)]
        (out_1, log_1), (out_2, log_2) = (
            _CPU_KERNEL(own[0], own[1][:, :, part], own[2][:, :, part], 0.0, causal, scale=scaling)
            for part, causal in _parts(ctx.prefix)
        )
        log = torch.logaddexp(log_1, log_2)
        out = out_1.mul_((log_1 - log).exp_()[..., None]).add_(out_2.mul_((log_2 - log).exp_()[..., None]))
        ctx.save_for_backward(query, key, value, out.to(query.dtype), log)
        return out.to(query.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        saved = cast(tuple[Tensor, ...], ctx.saved_tensors)
        grad_wide, query, key, value, out, log = (_at_least_float32(x) for x in (grad, *saved))
        (query_1, *rest_1), (query_2, *rest_2) = (
            _CPU_BACKWARD(
                grad_wide, query, key[:, :, part], value[:, :, part], out, log, 0.0, causal, scale=ctx.scaling
            )
            for part, causal in _parts(ctx.prefix)
        )
        key_grad, value_grad = (torch.cat(both, dim=2) for both in zip(rest_1, rest_2, strict=True))
        return *(x.to(grad.dtype) for x in (query_1 + query_2, key_grad, value_grad)), None


def _parts(prefix: int) -> tuple[tuple[slice, bool], tuple[slice, bool]]:
    """(keys, whether the mask is causal) of the prefix and of the tokens behind it."""
    return (slice(prefix), False), (slice(prefix, None), True)


def _at_least_float32(tensor: Tensor) -> Tensor:
    """Two parts that are rounded to bfloat16 would give a less exact sum than one kernel does."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def computed_in(tensor: Tensor) -> torch.dtype:
    """The dtype of products with this tensor: autocast's where it is on (it does not change float64)."""
    kind = tensor.device.type
    known = torch.amp.is_autocast_available(kind)  # pyright: ignore[reportPrivateImportUsage]
    on = tensor.dtype != torch.float64 and known and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else tensor.dtype
