"""Divergences estimated from sampled tokens: s of the student against q of the teacher, nothing else of either.

A member is a *cost* c(s, q) per sampled token. It is used as a negative advantage, so it IS its gradient: the loss of a
token has the gradient c * grad s, and each docstring says of which divergence E[c * grad s] is the gradient when the
token was sampled by the student. For an estimator known as a loss L(s, q) the cost is dL/ds.

The estimators are those of Schulman, "Approximating KL divergence" (2020). What a name promises as a value it need not
give as a gradient: k3 estimates the REVERSE KL, and its gradient is the FORWARD KL's. `tests/learner/objectives`
proves every line below by enumeration of a vocabulary. `seq_kd` is an exception, for tokens that the teacher sampled,
and `null`, which knows no teacher.

A cost may then be transformed: made smaller where it is large. A transform keeps the sign, and what it returns is the
cost in all that follows (baseline, scale, coefficient).

Legend: N tokens, M teachers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stillhouse.learner.objectives.options import Clip, Null
from stillhouse.protocol.settings import Member

CostFn: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(student log-probs without gradient, teacher log-probs), shapes that broadcast -> cost per sampled token. One that
brings options of its own takes them as its third argument."""
CostTransformFn: TypeAlias = Callable[[Tensor, Any], Tensor]
"""(costs, the member's own options: `learner.objectives.options`) -> costs."""


def k1(student: Tensor, teacher: Tensor) -> Tensor:
    """s - q. Gradient: reverse KL(student || teacher). As a plain loss, k1 = s - q would have the gradient grad s,
    whose expectation is zero: it would teach nothing. It only works as a cost."""
    return student - teacher


def k2(student: Tensor, teacher: Tensor) -> Tensor:
    """d/ds of (s - q)^2 / 2, which is s - q. Gradient: reverse KL(student || teacher), the same number as k1's for
    every single token. Its value as an estimate, (s - q)^2 / 2, is biased; its gradient is not."""
    return student - teacher


def k3(student: Tensor, teacher: Tensor) -> Tensor:
    """d/ds of exp(q - s) - 1 - (q - s), which is 1 - exp(q - s). Gradient: FORWARD KL(teacher || student).
    exp(q - s) is an importance weight from student to teacher: unbounded where the teacher finds a token much likelier.
    """
    return -torch.expm1(teacher - student)


def seq_kd(student: Tensor, teacher: Tensor) -> Tensor:
    """-1: with it A = 1, and the loss is -s, plain cross-entropy (sequence-level distillation; Kim and Rush 2016). Not
    for the student's own tokens, over which grad s has mean 0; where the TEACHER sampled the token, the expected
    gradient is that of the FORWARD KL(teacher || student)."""
    return -torch.ones_like(student + teacher)


def null(student: Tensor, teacher: Tensor, options: Null) -> Tensor:
    """options.cost where s < -options.threshold, else 0, whatever the teacher says: the null teacher, a control for any
    claim about distillation (arXiv 2608.31046). The expected gradient is that of cost * P(s < -threshold): it makes the
    student surer of what it says already."""
    unlikely = (student < -options.threshold).to(student.dtype) * options.cost
    return unlikely.expand_as(student + teacher)


def unchanged(cost: Tensor, options: Member) -> Tensor:
    """The cost as it is."""
    return cost


def clip(cost: Tensor, options: Clip) -> Tensor:
    """The cost, limited to [-limit, limit]: one token on which student and teacher differ by many nats no longer
    decides the gradient of a batch (arXiv 2607.13399)."""
    return cost.clamp(-options.limit, options.limit)


def log(cost: Tensor, options: Member) -> Tensor:
    """sign(cost) * log(1 + |cost|): small costs stay as they are, large ones grow with their logarithm (arXiv
    2607.13399)."""
    return cost.sign() * cost.abs().log1p()
