"""Compares estimators on identical data: the gradient of each on the same recorded batches, at the same weights. No
step is made.

    g_b       gradient of batch b, before clipping              mean = average of g_b over the batches
    norm      |mean|                                            cosine = angle between two means
    noise     root of sum |g_b - mean|^2 / (n - 1): how far the gradient of one batch is from the mean
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stillhouse.learner.steps import SourceBatch


@dataclass(frozen=True)
class Estimate:
    """Result for one estimator. NaN where undefined: the noise of a single batch, the cosine with a zero vector."""

    name: str
    norm: float
    noise: float
    cosine: float
    """Cosine with the mean gradient of the first estimator."""


def compare(
    names: Sequence[str], batches: Sequence[SourceBatch], gradient_of: Callable[[str, SourceBatch], list[Tensor]]
) -> list[Estimate]:
    """Compare the estimators. `gradient_of(name, batch)` returns one tensor per parameter. One sum of gradients per
    estimator is kept in memory."""
    if not batches:
        raise ValueError("nothing to compare: got no batches, expected at least one")
    sums: list[Tensor] = []
    squares: list[float] = []
    for name in names:
        total: Tensor | None = None
        square = 0.0
        for batch in batches:
            flat = torch.cat([gradient.double().flatten() for gradient in gradient_of(name, batch)])
            total = flat if total is None else total.add_(flat)
            square += float(flat.square().sum())
        assert total is not None
        sums.append(total / len(batches))
        squares.append(square)
    first = sums[0]
    return [
        Estimate(name, float(mean.norm()), _noise(square, mean, len(batches)), _cosine(mean, first))
        for name, mean, square in zip(names, sums, squares, strict=True)
    ]


def _noise(square: float, mean: Tensor, n: int) -> float:
    if n < 2:
        return math.nan
    return math.sqrt(max(0.0, square - n * float(mean.square().sum())) / (n - 1))


def _cosine(one: Tensor, other: Tensor) -> float:
    norms = float(one.norm() * other.norm())
    return float(one @ other) / norms if norms > 0 else math.nan
