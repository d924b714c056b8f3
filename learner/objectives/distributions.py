"""Divergences between two distributions given as log-probs of buckets: every token of the vocabulary, or the teacher's
top k and one tail bucket for all the others. Both sides always have all their mass in the buckets; a top-k set without
its tail could be minimised by moving mass out of it.

A member gives the divergence and its *slope* h_b = p_b * dD/dp_b. With softmax logits z below, and v in bucket b(v),

    dD/dz_v = (p_v / p_b) * h_b - p_v * sum over all buckets of h           (a single token's bucket: p_v = p_b)

which holds for every divergence, bucketed or not: all that follows in learner.objectives.head_divergence is the same.

Buckets that are padding hold PADDING on both sides: their probability is exactly 0 and their log-ratio 0.

Legend: C positions, B buckets, K tokens of the teacher's top-k set; p student, q teacher.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from protocol.topk_codec import LOG_TAIL_FLOOR

PADDING = -1e4
"""As a log-prob: exp of it is 0 in float32 and float64, and differences of it are 0 and not NaN."""


@dataclass(frozen=True)
class DistributionOptions:
    weight: float = 0.5
    """mixed: of the forward KL, in [0, 1]."""
    beta: float = 0.5
    """jsd: of the teacher in the mixture, in (0, 1)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.weight <= 1.0:
            raise ValueError(f"weight of the forward KL must be in [0, 1], got {self.weight}")
        if not 0.0 < self.beta < 1.0:
            raise ValueError(
                f"beta of the generalised JSD must be inside (0, 1), got {self.beta}; its limits are 0 on both ends: "
                "use forward_kl or reverse_kl"
            )


class Bucketed(NamedTuple):
    divergence_C: Tensor
    slope_CB: Tensor
    """p_b * dD/dp_b, up to a constant times p_b (which the gradient does not see)."""


DistributionFn: TypeAlias = Callable[[Tensor, Tensor, DistributionOptions], Bucketed]
"""(student log-probs, teacher log-probs, options), both [C, B], each row's probabilities summing to 1 -> Bucketed."""


def forward_kl(student_CB: Tensor, teacher_CB: Tensor, options: DistributionOptions) -> Bucketed:
    """KL(teacher || student) = sum q (log q - log p). Slope -q."""
    q_CB = teacher_CB.exp()
    divergence_C = (q_CB * (teacher_CB - student_CB)).sum(dim=1)
    return Bucketed(divergence_C, q_CB.neg_())


def reverse_kl(student_CB: Tensor, teacher_CB: Tensor, options: DistributionOptions) -> Bucketed:
    """KL(student || teacher) = sum p (log p - log q). Slope p (log p - log q)."""
    slope_CB = student_CB.exp().mul_(student_CB - teacher_CB)
    return Bucketed(slope_CB.sum(dim=1), slope_CB)


def mixed(student_CB: Tensor, teacher_CB: Tensor, options: DistributionOptions) -> Bucketed:
    """weight * forward KL + (1 - weight) * reverse KL."""
    forward = forward_kl(student_CB, teacher_CB, options)
    reverse = reverse_kl(student_CB, teacher_CB, options)
    weight = options.weight
    return Bucketed(
        weight * forward.divergence_C + (1.0 - weight) * reverse.divergence_C,
        forward.slope_CB.mul_(weight).add_(reverse.slope_CB, alpha=1.0 - weight),
    )


def jsd(student_CB: Tensor, teacher_CB: Tensor, options: DistributionOptions) -> Bucketed:
    """beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p (GKD; Agarwal et al. 2024). Slope
    (1 - beta) p log(p / m). Bounded; near beta 0 it is beta times the forward KL, near 1 (1 - beta) times the reverse.
    """
    beta = options.beta
    mixture_CB = torch.logaddexp(teacher_CB + math.log(beta), student_CB + math.log1p(-beta))
    slope_CB = student_CB.exp().mul_(student_CB - mixture_CB).mul_(1.0 - beta)
    from_teacher_C = (teacher_CB.exp() * (teacher_CB - mixture_CB)).sum(dim=1)
    return Bucketed(beta * from_teacher_C + slope_CB.sum(dim=1), slope_CB)


def by_autograd(divergence: Callable[[Tensor, Tensor, DistributionOptions], Tensor]) -> DistributionFn:
    """A member from a differentiable function of the same arguments -> divergence [C]: the slope is worked out."""

    def member(student_CB: Tensor, teacher_CB: Tensor, options: DistributionOptions) -> Bucketed:
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
