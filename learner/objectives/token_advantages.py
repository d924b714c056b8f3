"""Advantages of single tokens, from rewards and a value function: the members of registry.TOKEN_ADVANTAGES.

Sampled tokens of one rollout follow one another as if an environment's tokens were not there: a state is the context of
a sampled token. A rollout's reward is paid at its last one, behind which there is nothing.

Legend: N trained tokens of the batch's judged rollouts, R rollouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from learner.objectives.options import TokenAdvantage
from learner.objectives.values import gae, whitened


@dataclass(frozen=True)
class TokenRewards:
    """Of the whole batch; rollouts without a reward have no token here."""

    reward_N: Tensor
    """float64: what is paid at the token."""
    value_N: Tensor
    """float64: what the value function expects from there on, before the batch is trained."""
    sequence_N: Tensor
    """int64 in [0, R); tokens of one rollout stand in their order."""
    n_sequences: int
    """R."""


class TokenAdvantages(NamedTuple):
    advantage_N: Tensor
    """As it is to be used: whitened, if that is wanted."""
    return_N: Tensor
    """What the value function shall learn to expect."""


TokenAdvantageFn: TypeAlias = Callable[[TokenRewards, Any], TokenAdvantages]
"""(rewards, the member's own options, a `TokenAdvantage`) -> TokenAdvantages. float64 in, float64 out, no gradient."""


def gae_whitened(rewards: TokenRewards, options: TokenAdvantage) -> TokenAdvantages:
    """`learner.objectives.values.gae`, whitened over all tokens of the judged rollouts (PPO)."""
    advantage_N, return_N = gae(
        rewards.reward_N,
        rewards.value_N,
        rewards.sequence_N,
        rewards.n_sequences,
        discount=options.discount,
        decay=options.decay,
    )
    return TokenAdvantages(whitened(advantage_N) if len(advantage_N) else advantage_N, return_N)
