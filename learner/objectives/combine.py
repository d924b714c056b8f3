"""One advantage per token out of rewards and several teachers.

    A_t = A_reward_t - sum over the token's teachers m of coef_m * cost_mt

A_reward comes in as it is to be used (already whitened, learner.objectives.advantages); what is subtracted is not
whitened with it. A token that no teacher grades has A = A_reward: zero in pure distillation, the reward alone in mixed.

Legend: N trained tokens of a microbatch, M teachers of the batch, D domains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def combined_advantage(reward_advantage_N: Tensor, cost_MN: Tensor, routed_MN: Tensor, coef_M: Tensor) -> Tensor:
    """[N] the formula above; what `cost_MN` holds where a teacher is not routed is not looked at."""
    return reward_advantage_N - torch.where(routed_MN, coef_M[:, None] * cost_MN, 0.0).sum(dim=0)


def teacher_coefs(teachers: Sequence[str], coef: float, own: Mapping[str, float]) -> list[float]:
    """Coefficient of each teacher, in their order: its own one, else the common one."""
    return [own.get(name, coef) for name in teachers]


def domain_sums(cost_N: Tensor, domain_N: Tensor, n_domains: int) -> tuple[Tensor, Tensor]:
    """(sum of squared costs [D], tokens [D]), float64. They add up over microbatches."""
    squares_D = cost_N.new_zeros(n_domains, dtype=torch.float64).index_add_(0, domain_N, cost_N.double().square())
    return squares_D, torch.bincount(domain_N, minlength=n_domains)


def domain_scales(squares_D: Tensor, tokens_D: Tensor, *, floor: float = 1e-3) -> Tensor:
    """[D] root mean square of the cost per domain, at least `floor`; 1 where a domain has no token. Costs divided by it
    pull equally hard in every domain, whatever teachers and texts make of the size of their log-probs. To be taken of
    the whole batch (or of the steps before), never of a microbatch."""
    rms_D = (squares_D / tokens_D.clamp(min=1)).sqrt().clamp(min=floor)
    return torch.where(tokens_D > 0, rms_D, 1.0)
