"""What rewards say of every trained token of a batch: one advantage per rollout, spread over its tokens, or advantages
of the tokens themselves, which a value function is needed for and trained by.

It is worked out once per batch, before it is divided into microbatches, so that packing cannot change it.

Legend: R items (rollouts) of the batch, N trained tokens of it in the order of the items.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from learner.objectives.advantages import AdvantageFn, Rewards
from learner.objectives.options import TokenAdvantage
from learner.objectives.registry import ADVANTAGE
from learner.objectives.token_advantages import TokenAdvantageFn, TokenRewards
from protocol.settings import Member


@dataclass(frozen=True)
class ValueTargets:
    """What a value function is trained towards. On the CPU."""

    old_N: Tensor
    """float64: its values before the batch was trained."""
    return_N: Tensor
    """float64; any finite number where not judged."""
    judged_N: Tensor
    """bool: the token's rollout has a reward. Others train no value."""

    def at(self, places: slice | Tensor) -> ValueTargets:
        """Of some of the tokens."""
        return ValueTargets(self.old_N[places], self.return_N[places], self.judged_N[places])

    def followed_by(self, n_tokens: int) -> ValueTargets:
        """And so many tokens that train no value."""
        old_N, return_N = (torch.cat([x, x.new_zeros(n_tokens)]) for x in (self.old_N, self.return_N))
        return ValueTargets(old_N, return_N, torch.cat([self.judged_N, self.judged_N.new_zeros(n_tokens)]))


class TokenSignal(NamedTuple):
    advantage_N: Tensor
    """float64; 0 where the token's rollout has no reward."""
    values: ValueTargets | None
    """None: no value function is asked for."""


Values: TypeAlias = Callable[[], Tensor]
"""The value of each trained token, [N] float64: a forward pass over the whole batch, so asked for only where needed."""


class RewardSignal(Protocol):
    def __call__(self, rewards: Rewards, values: Values) -> TokenSignal:
        """Raises BatchError for parts of rollouts, where they have no reward yet."""
        ...


@dataclass(frozen=True)
class OfRollouts:
    advantage: AdvantageFn
    options: Member

    def __call__(self, rewards: Rewards, values: Values) -> TokenSignal:
        return TokenSignal(self.advantage(rewards, self.options).repeat_interleave(rewards.tokens_R), None)


@dataclass(frozen=True)
class OfTokens:
    advantage: TokenAdvantageFn
    options: TokenAdvantage

    def __call__(self, rewards: Rewards, values: Values) -> TokenSignal:
        rewards.refuse_parts(self.options.name)
        n_rollouts, tokens_R = len(rewards.tokens_R), rewards.tokens_R
        sequence_N = torch.arange(n_rollouts).repeat_interleave(tokens_R)
        paid_N = torch.zeros(len(sequence_N), dtype=torch.float64)
        paid_N[tokens_R.cumsum(0)[tokens_R > 0] - 1] = rewards.reward_R[tokens_R > 0]
        judged_N, old_N = rewards.rewarded_R[sequence_N], values()
        told = self.advantage(
            TokenRewards(paid_N[judged_N], old_N[judged_N], sequence_N[judged_N], n_rollouts), self.options
        )
        advantage_N, return_N = torch.zeros_like(old_N), old_N.clone()
        advantage_N[judged_N], return_N[judged_N] = told.advantage_N, told.return_N
        return TokenSignal(advantage_N, ValueTargets(old_N, return_N, judged_N))


def make_signal(advantage: Member) -> RewardSignal:
    """Raises ValueError for a name that cannot be loaded."""
    function, options, _ = ADVANTAGE.load(advantage)
    if isinstance(options, TokenAdvantage):
        return OfTokens(function, options)
    return OfRollouts(function, options)
