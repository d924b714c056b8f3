"""Importance weights: how much a token counts that an older policy sampled. One registry, pure functions.

    r_t = exp(s_t - mu_t)      s: log-prob under the policy being trained, mu: under the one that sampled the token

Legend: N trained tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class ImportanceOptions(NamedTuple):
    """Bounds on r; each function reads those that its name is about."""

    cap: float
    low: float
    high: float


class Weights(NamedTuple):
    """No gradient flows through either."""

    weights_N: Tensor
    cut_N: Tensor
    """bool: the weight is not r itself (capped, or outside of the range)."""


ImportanceFn: TypeAlias = Callable[[Tensor, ImportanceOptions], Weights]
"""(ratio_N without gradient, options) -> Weights."""


def no_weights(ratio_N: Tensor, options: ImportanceOptions) -> Weights:
    """w = 1: tokens count as if the current policy had sampled them. Biased as soon as it did not."""
    return Weights(torch.ones_like(ratio_N), torch.zeros_like(ratio_N, dtype=torch.bool))


def truncated(ratio_N: Tensor, options: ImportanceOptions) -> Weights:
    """w = min(r, cap), token by token (TIS; Ionides 2008, Espeholt et al. 2018)."""
    return Weights(ratio_N.clamp(max=options.cap), ratio_N > options.cap)


def masked(ratio_N: Tensor, options: ImportanceOptions) -> Weights:
    """w = r where low <= r <= high, else 0: tokens on which the two policies disagree teach nothing."""
    inside_N = (ratio_N >= options.low) & (ratio_N <= options.high)
    return Weights(torch.where(inside_N, ratio_N, 0.0), ~inside_N)  # not a product: inf * 0 is NaN


IMPORTANCE: dict[str, ImportanceFn] = {
    "none": no_weights,
    "truncated": truncated,
    "masked": masked,
}
