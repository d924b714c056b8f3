"""The distillation objective on packed 1-D tensors: pure functions, no model.

    k_t  = cost(sg[s_t], q_t)                       DIVERGENCES, per teacher; k1: s - q
    A_t  = -coef * sum over the token's teachers of k_t
    w_t  = sg[weight(exp(s_t - mu_t))]              learner.importance
    loss = -sum_t w_t * A_t * s_t / n_global        n_global: trained tokens of the WHOLE batch, not of a microbatch

s: the current student's log-prob of the sampled token (the only thing with a gradient); mu: as reported by the engine
that sampled it; q: a teacher's. Discount 0: a token answers only for itself.

Legend: N trained tokens of a microbatch, M teachers of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from learner.config import KlStudent, LearnerConfig
from learner.importance import IMPORTANCE, ImportanceFn, ImportanceOptions

_Member = TypeVar("_Member")

CostFn: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(student log-probs without gradient, teacher log-probs), same shape -> cost per sampled token. As an advantage
-cost, it defines the gradient E[cost * grad s]; its docstring says of which divergence that is the gradient."""


def k1(student: Tensor, teacher: Tensor) -> Tensor:
    """s - q. E[(s - q) grad s] is the gradient of the reverse KL(student || teacher)."""
    return student - teacher


DIVERGENCES: dict[str, CostFn] = {"k1": k1}


@dataclass(frozen=True)
class TokenInputs:
    """What a loss knows of the trained tokens of a microbatch, beside the student's log-probs."""

    behaviour_N: Tensor
    """mu."""
    teacher_MN: Tensor
    """q; any finite number where not routed."""
    routed_MN: Tensor
    """bool: this teacher grades this token. A column of False: no teacher, zero advantage."""


@dataclass(frozen=True)
class Objective:
    """The members chosen from the registries."""

    cost: CostFn
    coef: float
    kl_student: KlStudent
    importance: ImportanceFn
    options: ImportanceOptions


@dataclass(frozen=True)
class LossTerms:
    """Everything per token, for the metrics; only `loss` has a gradient."""

    loss: Tensor
    """Scalar: this microbatch's share of the batch's loss (shares add up)."""
    student_N: Tensor
    """sg[s]."""
    ratio_N: Tensor
    weights_N: Tensor
    cut_N: Tensor
    reverse_kl_N: Tensor
    """sg[s] - q, summed over the token's teachers; 0 where it has none."""
    advantage_N: Tensor


def make_objective(config: LearnerConfig) -> Objective:
    """Look the configured names up. Raises ValueError naming the members there are."""
    return Objective(
        cost=_member(DIVERGENCES, "divergence", config.divergence),
        coef=config.coef,
        kl_student=config.kl_student,
        importance=_member(IMPORTANCE, "importance", config.importance),
        options=ImportanceOptions(config.ratio_cap, config.ratio_low, config.ratio_high),
    )


def distillation_loss(student_N: Tensor, inputs: TokenInputs, objective: Objective, n_global: int) -> LossTerms:
    """The objective above. `student_N` carries the gradient; `n_global` >= 1 trained tokens in the whole batch."""
    current_N = student_N.detach()
    compared_N = current_N if objective.kl_student == "current" else inputs.behaviour_N
    cost_MN = _where_routed(objective.cost(compared_N[None], inputs.teacher_MN), inputs.routed_MN)
    advantage_N = -objective.coef * cost_MN.sum(dim=0)
    ratio_N = torch.exp(current_N - inputs.behaviour_N)
    weights_N, cut_N = objective.importance(ratio_N, objective.options)
    return LossTerms(
        loss=-(weights_N * advantage_N * student_N).sum() / n_global,
        student_N=current_N,
        ratio_N=ratio_N,
        weights_N=weights_N,
        cut_N=cut_N,
        reverse_kl_N=_where_routed(current_N[None] - inputs.teacher_MN, inputs.routed_MN).sum(dim=0),
        advantage_N=advantage_N,
    )


def _where_routed(value_MN: Tensor, routed_MN: Tensor) -> Tensor:
    return torch.where(routed_MN, value_MN, 0.0)


def _member(registry: dict[str, _Member], kind: str, name: str) -> _Member:
    if name not in registry:
        raise ValueError(f"{kind} = {name!r}; expected one of {', '.join(registry)}")
    return registry[name]
