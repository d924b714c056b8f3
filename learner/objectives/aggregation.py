"""From losses of tokens to the loss of a batch: a share per rollout and one divisor, both of the WHOLE batch.

    loss = sum_t share[rollout of t] * loss_t / divisor

Neither knows of microbatches, so packing does not change the gradient; there is no mean of microbatch means.

Legend: R rollouts of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class Shares(NamedTuple):
    share_R: Tensor
    """float64; what each trained token of a rollout counts."""
    divisor: int


class AggregationOptions(NamedTuple):
    max_new_tokens: int
    """The most that a rollout may have."""


AggregationFn: TypeAlias = Callable[[Tensor, AggregationOptions], Shares]
"""(tokens_R int64: trained tokens, at least one of the batch; options) -> Shares."""


def token_mean(tokens_R: Tensor, options: AggregationOptions) -> Shares:
    """Mean over all trained tokens: every token counts the same, long rollouts more."""
    return Shares(torch.ones_like(tokens_R, dtype=torch.float64), int(tokens_R.sum()))


def sequence_mean(tokens_R: Tensor, options: AggregationOptions) -> Shares:
    """Mean over rollouts of the mean over a rollout's trained tokens: every rollout with a trained token counts the
    same, tokens of long ones less."""
    return Shares(1.0 / tokens_R.clamp(min=1).double(), int((tokens_R > 0).sum()))


def constant(tokens_R: Tensor, options: AggregationOptions) -> Shares:
    """Sum over all trained tokens, divided by the rollouts with a trained token times max_new_tokens: the divisor knows
    nothing of how long they became, so that long wrong answers are not favoured (Dr. GRPO; Liu et al. 2025)."""
    return Shares(torch.ones_like(tokens_R, dtype=torch.float64), int((tokens_R > 0).sum()) * options.max_new_tokens)
