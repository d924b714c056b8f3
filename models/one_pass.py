"""Loss and its gradients with respect to hidden states and head, in one pass over chunks of positions.

`models.logprobs` returns log-probs for any later computation, and so computes every chunk's logits twice: once for the
log-probs, once for the gradient. Where a position's loss can be differentiated as soon as its logits are known, the
forward pass can store the gradients, and the backward pass multiplies them by one number: three head products as in the
plain version, and still no [T, V] tensor.

Legend: T positions, H hidden size, V rows of the head, C positions of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from stillhouse.models.logprobs import DEFAULT_CHUNK_TOKENS, LmHead

ChunkLoss: TypeAlias = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(logits [C, V] at temperature 1, their slice of T) -> (loss per position [C], its derivative by the logits [C, V]).
Runs without autograd; may overwrite the logits."""


def one_pass_loss(
    head: LmHead, hidden_TH: Tensor, chunk_loss: ChunkLoss, *, chunk_tokens: int = DEFAULT_CHUNK_TOKENS
) -> Tensor:
    """Scalar sum of the positions' losses, differentiable once in hidden states, head weight and bias.

    `chunk_loss` is called for each chunk in turn, during the forward pass. float32 (float64 for float64 in). Raises
    ValueError for shapes that do not fit."""
    if hidden_TH.ndim != 2 or hidden_TH.shape[1] != head.weight_VH.shape[1]:
        raise ValueError(f"hidden states {tuple(hidden_TH.shape)}; the head needs [T, {head.weight_VH.shape[1]}]")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens {chunk_tokens}; expected at least 1")
    how = _How(chunk_loss, chunk_tokens, head.scale, head.softcap)
    return cast(Tensor, _OnePass.apply(hidden_TH, head.weight_VH, head.bias_V, how))


@dataclass(frozen=True)
class _How:
    chunk_loss: ChunkLoss
    chunk_tokens: int
    scale: float
    softcap: float | None


class _OnePass(torch.autograd.Function):
    """Gradients are computed in `forward`, up to the factor that `backward` receives."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, how: _How
    ) -> Tensor:
        head = LmHead(weight_VH, bias_V, how.scale, how.softcap)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        accumulate = torch.promote_types(weight_VH.dtype, torch.float32)
        grad_hidden_TH = torch.empty_like(hidden_TH) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=accumulate) if needs_weight else None
        grad_bias_V = torch.zeros_like(weight_VH[:, 0], dtype=accumulate) if needs_bias else None
        total = hidden_TH.new_zeros((), dtype=torch.promote_types(hidden_TH.dtype, torch.float32))
        for start in range(0, hidden_TH.shape[0], how.chunk_tokens):
            chunk = slice(start, min(start + how.chunk_tokens, hidden_TH.shape[0]))
            hidden_CH = hidden_TH[chunk]
            z_CV = head.logits(hidden_CH)
            bent_CV = None if how.softcap is None else 1.0 - (z_CV / how.softcap).square()
            loss_C, grad_CV = how.chunk_loss(z_CV, chunk)
            total += loss_C.sum()
            if bent_CV is not None:
                grad_CV.mul_(bent_CV)
            if how.scale != 1.0:
                grad_CV.mul_(how.scale)
            grad_CV = grad_CV.to(hidden_TH.dtype)
            if grad_hidden_TH is not None:
                grad_hidden_TH[chunk] = grad_CV @ weight_VH
            if grad_weight_VH is not None:
                if accumulate == hidden_TH.dtype:
                    grad_weight_VH.addmm_(grad_CV.T, hidden_CH)  # without a temporary [V, H]
                else:
                    grad_weight_VH.add_(grad_CV.T @ hidden_CH)
            if grad_bias_V is not None:
                grad_bias_V.add_(grad_CV.sum(dim=0))
        ctx.gradients = (grad_hidden_TH, grad_weight_VH, grad_bias_V)
        ctx.dtype = weight_VH.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        if ctx.gradients is None:
            raise RuntimeError("a one-pass loss keeps its gradients for one backward pass; compute the loss again")
        hidden_TH, weight_VH, bias_V = cast(tuple[Tensor | None, ...], ctx.gradients)
        ctx.gradients = None  # scaled in place: a copy of a head's gradient takes gigabytes
        return (
            None if hidden_TH is None else hidden_TH.mul_(grad),
            None if weight_VH is None else weight_VH.mul_(grad).to(ctx.dtype),
            None if bias_V is None else bias_V.mul_(grad).to(ctx.dtype),
            None,
        )
