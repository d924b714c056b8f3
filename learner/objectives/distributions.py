"""Divergences between two distributions given as log-probs of buckets: every token of the vocabulary, or the teacher's
top k and one tail bucket for all the others. Both sides always have all their mass in the buckets; a top-k set without
its tail could be minimised by moving mass out of it.

A member gives the divergence and its *slope* h_b = p_b * dD/dp_b. With softmax logits z below, and v in bucket b(v),

    dD/dz_v = (p_v / p_b) * h_b - p_v * sum over all buckets of h           (a single token's bucket: p_v = p_b)

which holds for every divergence, bucketed or not: all that follows in learner.objectives.head_divergence is the same.

Buckets that are padding hold PADDING on both sides: their probability is exactly 0 and their log-ratio 0.

Legend: C positions, B buckets, K tokens of the teacher's top-k set, S draws per position; p student, q teacher.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from learner.objectives.options import Distributions, Jsd, Mixed, MultiSample
from protocol.topk_codec import LOG_TAIL_FLOOR

PADDING = -1e4
"""As a log-prob: exp of it is 0 in float32 and float64, and differences of it are 0 and not NaN."""


class Bucketed(NamedTuple):
    divergence_C: Tensor
    slope_CB: Tensor
    """p_b * dD/dp_b, up to a constant times p_b (which the gradient does not see)."""


DistributionFn: TypeAlias = Callable[[Tensor, Tensor, Any], Bucketed]
"""(student log-probs, teacher log-probs, the member's own options: `learner.objectives.options`), both log-probs
[C, B], each row's probabilities summing to 1 -> Bucketed. One whose options are a `MultiSample` also takes the keyword
`uniform_CS`: independent numbers in [0, 1) of these positions, one per draw."""
Between: TypeAlias = Callable[[Tensor, Tensor], Bucketed]
"""The same, given its options and draws."""


def forward_kl(student_CB: Tensor, teacher_CB: Tensor, options: Distributions) -> Bucketed:
    """KL(teacher || student) = sum q (log q - log p). Slope -q."""
    q_CB = teacher_CB.exp()
    divergence_C = (q_CB * (teacher_CB - student_CB)).sum(dim=1)
    return Bucketed(divergence_C, q_CB.neg_())


def reverse_kl(student_CB: Tensor, teacher_CB: Tensor, options: Distributions) -> Bucketed:
    """KL(student || teacher) = sum p (log p - log q). Slope p (log p - log q)."""
    slope_CB = student_CB.exp().mul_(student_CB - teacher_CB)
    return Bucketed(slope_CB.sum(dim=1), slope_CB)


def mixed(student_CB: Tensor, teacher_CB: Tensor, options: Mixed) -> Bucketed:
    """weight * forward KL + (1 - weight) * reverse KL."""
    forward = forward_kl(student_CB, teacher_CB, options)
    reverse = reverse_kl(student_CB, teacher_CB, options)
    weight = options.weight
    return Bucketed(
        weight * forward.divergence_C + (1.0 - weight) * reverse.divergence_C,
        forward.slope_CB.mul_(weight).add_(reverse.slope_CB, alpha=1.0 - weight),
    )


def jsd(student_CB: Tensor, teacher_CB: Tensor, options: Jsd) -> Bucketed:
    """beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p (GKD; Agarwal et al. 2024). Slope
    (1 - beta) p log(p / m). Bounded; near beta 0 it is beta times the forward KL, near 1 (1 - beta) times the reverse.
    """
    beta = options.beta
    mixture_CB = torch.logaddexp(teacher_CB + math.log(beta), student_CB + math.log1p(-beta))
    slope_CB = student_CB.exp().mul_(student_CB - mixture_CB).mul_(1.0 - beta)
    from_teacher_C = (teacher_CB.exp() * (teacher_CB - mixture_CB)).sum(dim=1)
    return Bucketed(beta * from_teacher_C + slope_CB.sum(dim=1), slope_CB)


def multi_sample(student_CB: Tensor, teacher_CB: Tensor, options: MultiSample, *, uniform_CS: Tensor) -> Bucketed:
    """Reverse KL from S tokens drawn at each position from the student: the mean of log p_b - log q_b over their
    buckets b (a token that the teacher did not send is a draw of the tail). Slope: the same, each bucket with its share
    of the draws, so that the gradient is mean (log p_b - log q_b) * grad log p_b. Value and gradient have those of
    `reverse_kl` as their expectation, and 1/S of the variance of one draw.

    No leave-one-out baseline: it takes the mean of the costs, KL, out of the variance, and brings in that of S - 1
    draws, which is more where the two distributions are near each other. Raises ValueError for a `uniform_CS` without a
    column per sample."""
    if uniform_CS.shape[1] != options.samples:
        raise ValueError(
            f"multi_sample has {uniform_CS.shape[1]} numbers per position to draw by, expected {options.samples}"
        )
    up_to_CB = student_CB.double().exp().cumsum(dim=1)
    sought_CS = uniform_CS.double() * up_to_CB[:, -1:]  # which rounding leaves a little off 1
    drawn_CS = torch.searchsorted(up_to_CB, sought_CS, right=True).clamp_(max=student_CB.shape[1] - 1)
    draws_CB = torch.zeros_like(student_CB).scatter_add_(1, drawn_CS, torch.ones_like(sought_CS).to(student_CB.dtype))
    slope_CB = draws_CB.div_(uniform_CS.shape[1]).mul_(student_CB - teacher_CB)
    return Bucketed(slope_CB.sum(dim=1), slope_CB)


def by_autograd(divergence: Callable[[Tensor, Tensor, Any], Tensor]) -> DistributionFn:
    """A member from a differentiable function of the same arguments -> divergence [C]: the slope is worked out."""

    def member(student_CB: Tensor, teacher_CB: Tensor, options: Any) -> Bucketed:
        with torch.enable_grad():
            free_CB = student_CB.detach().requires_grad_()
            divergence_C = divergence(free_CB, teacher_CB, options)
            (slope_CB,) = torch.autograd.grad(divergence_C.sum(), free_CB)
        return Bucketed(divergence_C.detach(), slope_CB)

    return member


def log_tail(logprobs_CK: Tensor) -> Tensor:
    """[C] log1p(-sum p) of a teacher's top-k set, where all it sent is the set; at least LOG_TAIL_FLOOR. In float64:
    the sum is near 1 in the rule."""
    mass_C = torch.logsumexp(logprobs_CK.double(), dim=1).clamp(max=0.0)
    tail_C = torch.where(mass_C > -math.log(2.0), (-torch.expm1(mass_C)).log(), torch.log1p(-mass_C.exp()))
    return tail_C.clamp(min=LOG_TAIL_FLOOR).to(logprobs_CK.dtype)
