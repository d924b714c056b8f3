"""Advantages from rewards: one reward per rollout in, one advantage per rollout out, over the whole batch.

They are worked out once per batch, before it is divided into microbatches, so that packing cannot change them.
Whitening happens here, that is BEFORE any divergence is subtracted: the coefficient of a divergence keeps its meaning
whatever the spread of the rewards (see learner.objectives.combine).

A rollout without a reward (its environment did not judge it) has the advantage 0 and is in no mean.

Legend: R rollouts of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from learner.batch.packing import BatchError
from learner.objectives.options import Grpo
from protocol.settings import Member

EPSILON = 1e-6
"""Added to standard deviations."""


@dataclass(frozen=True)
class Rewards:
    """What the rewards of a batch are known by."""

    reward_R: Tensor
    """float64; any finite number where not `rewarded_R`."""
    rewarded_R: Tensor
    """bool."""
    group_R: Tensor
    """int64: rollouts of one prompt share a number in [0, R)."""
    tokens_R: Tensor
    """int64: trained tokens of the batch."""
    parts: tuple[str, ...] = ()
    """Rollouts that have tokens to train here but go on in a later batch, so that their reward is not known yet."""

    def refuse_parts(self, name: str) -> None:
        """Raises BatchError: half a rollout has no reward, and half a group no mean."""
        if self.parts:
            raise BatchError(
                f"advantage = {name!r} needs whole rollouts, got parts of {list(self.parts)[:8]}; "
                "set buffer.release = 'rollout'",
                self.parts,
            )


AdvantageFn: TypeAlias = Callable[[Rewards, Any], Tensor]
"""(rewards, the member's own options: `learner.objectives.options`) -> advantage_R float64, 0 where not rewarded."""


def no_advantage(rewards: Rewards, options: Member) -> Tensor:
    """0: rewards are not trained on."""
    return torch.zeros_like(rewards.reward_R)


def grpo(rewards: Rewards, options: Grpo) -> Tensor:
    """reward - mean of its group, divided by the group's standard deviation (n - 1) where options.std (GRPO; Shao et
    al. 2024). Without: Dr. GRPO (Liu et al. 2025), which does not favour prompts that are nearly always, or never,
    solved. A group with one judged rollout gives 0."""
    rewards.refuse_parts("grpo")
    centred_R = _centred(rewards)
    if not options.std:
        return centred_R
    n_R = _group_sum(rewards.rewarded_R.double(), rewards)
    variance_R = _group_sum(centred_R.square(), rewards) / (n_R - 1).clamp(min=1)
    return centred_R / (variance_R.sqrt() + EPSILON)


def reinforce_pp(rewards: Rewards, options: Member) -> Tensor:
    """reward, whitened over the trained tokens of the whole batch (REINFORCE++; Hu et al. 2025)."""
    rewards.refuse_parts("reinforce_pp")
    return _whitened(torch.where(rewards.rewarded_R, rewards.reward_R, 0.0), rewards)


def reinforce_pp_baseline(rewards: Rewards, options: Member) -> Tensor:
    """reward - mean of its group (the n-sample baseline), then whitened over the trained tokens of the whole batch."""
    rewards.refuse_parts("reinforce_pp_baseline")
    return _whitened(_centred(rewards), rewards)


def _group_sum(value_R: Tensor, rewards: Rewards) -> Tensor:
    """Sum over the judged rollouts of a group, at each of its rollouts."""
    judged_R = torch.where(rewards.rewarded_R, value_R, 0.0)
    return torch.zeros_like(judged_R).index_add_(0, rewards.group_R, judged_R)[rewards.group_R]


def _centred(rewards: Rewards) -> Tensor:
    n_R = _group_sum(rewards.rewarded_R.double(), rewards).clamp(min=1)
    mean_R = _group_sum(rewards.reward_R, rewards) / n_R
    return torch.where(rewards.rewarded_R, rewards.reward_R - mean_R, 0.0)


def _whitened(value_R: Tensor, rewards: Rewards) -> Tensor:
    """Mean 0 and standard deviation 1 over the trained tokens of judged rollouts."""
    tokens_R = torch.where(rewards.rewarded_R, rewards.tokens_R, 0).double()
    n = tokens_R.sum().clamp(min=1)
    mean = (tokens_R * value_R).sum() / n
    std = ((tokens_R * (value_R - mean).square()).sum() / n).sqrt()
    return torch.where(rewards.rewarded_R, (value_R - mean) / (std + EPSILON), 0.0)
