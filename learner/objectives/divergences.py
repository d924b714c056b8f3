"""The divergences of a run, ready to be computed: a common one, and those that single pools of teachers have.

Legend: N tokens, M teachers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from stillhouse.learner.objectives.config import ObjectiveConfig, has_baseline
from stillhouse.learner.objectives.distributions import DistributionFn
from stillhouse.learner.objectives.options import Distributions, KlStudent, LogRatio, SampledDivergence
from stillhouse.learner.objectives.registry import COST_TRANSFORM, DIVERGENCE
from stillhouse.learner.objectives.sampled import CostFn
from stillhouse.protocol.settings import Member


@dataclass(frozen=True)
class Compared:
    """A divergence between distributions, with its options."""

    function: DistributionFn
    options: Distributions


@dataclass(frozen=True)
class Divergence:
    """A cost of sampled tokens, or a divergence between distributions; with the latter the cost is 0."""

    cost: CostFn
    """With its options, transformed."""
    kl_student: KlStudent = "current"
    has_baseline: bool = False
    between: Compared | None = None

    @property
    def reads_payloads(self) -> bool:
        """Whether it needs what teachers send beside the log-probs of sampled tokens."""
        return self.has_baseline or self.between is not None


@dataclass(frozen=True)
class Divergences:
    common: Divergence
    own: Mapping[str, Divergence] = field(default_factory=dict[str, Divergence])
    """Pool -> its divergence, in place of the common one."""

    def of(self, pool: str) -> Divergence:
        return self.own.get(pool, self.common)

    @property
    def every(self) -> tuple[Divergence, ...]:
        """The common one first."""
        return (self.common, *self.own.values())

    def costs(self, student_N: Tensor, behaviour_N: Tensor, teacher_MN: Tensor, teachers: Sequence[str]) -> Tensor:
        """[M, N] cost of each sampled token by each teacher's divergence; 0 for one between distributions. `teachers`:
        the names of the M pools."""
        if not self.own:
            return self._cost(self.common, student_N, behaviour_N, teacher_MN)
        cost_MN = torch.empty_like(teacher_MN, dtype=torch.result_type(student_N, teacher_MN))
        for m, name in enumerate(teachers):
            cost_MN[m] = self._cost(self.of(name), student_N, behaviour_N, teacher_MN[m, None])[0]
        return cost_MN

    @staticmethod
    def _cost(one: Divergence, student_N: Tensor, behaviour_N: Tensor, teacher_MN: Tensor) -> Tensor:
        compared_N = student_N if one.kl_student == "current" else behaviour_N
        return one.cost(compared_N[None], teacher_MN)


def make_divergences(config: ObjectiveConfig) -> Divergences:
    """Load all of them. Raises ValueError listing the known names."""
    common = config.divergence_of("")  # of all pools that the configuration does not name
    named = {pool: config.divergence_of(pool) for pool in (*config.teacher_divergences, *config.teacher_coefs)}
    own = {pool: _loaded(divergence, config) for pool, divergence in named.items() if divergence != common}
    return Divergences(_loaded(common, config), own)


def _loaded(member: Member, config: ObjectiveConfig) -> Divergence:
    function, options, own_options = DIVERGENCE.load(member)
    if isinstance(member, Distributions):
        return Divergence(no_cost, between=Compared(function, cast(Distributions, options)))
    more = (options,) if own_options and not isinstance(options, LogRatio) else ()  # a baseline is not part of the cost
    transform, how, _ = COST_TRANSFORM.load(config.cost_transform)

    def cost(student: Tensor, teacher: Tensor) -> Tensor:
        return transform(function(student, teacher, *more), how)

    kl_student = member.kl_student if isinstance(member, SampledDivergence) else "current"
    return Divergence(cost, kl_student, has_baseline(member))


def no_cost(student: Tensor, teacher: Tensor) -> Tensor:
    """Cost 0, for a divergence between distributions."""
    return torch.zeros_like(teacher)
