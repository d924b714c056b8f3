"""Terms that are added to rewards, by the length of a rollout: the number of tokens that the student wrote, over all
turns and branches. They come before advantages are computed. A rollout without a reward stays without one.

Legend: R rollouts of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from stillhouse.learner.objectives.advantages import Rewards
from stillhouse.learner.objectives.options import GroupLength, Overlong
from stillhouse.learner.objectives.registry import LENGTH_PENALTY
from stillhouse.protocol.settings import Member

SOLVED: Final = 0.5
"""Least reward of a rollout that counts as correct, as in evaluations."""


class Lengths(NamedTuple):
    """Float64, int64 and bool, as in Rewards."""

    length_R: Tensor
    reward_R: Tensor
    rewarded_R: Tensor
    group_R: Tensor
    max_new_tokens: int
    """Longest possible rollout."""


LengthPenaltyFn: TypeAlias = Callable[[Lengths, Any], Tensor]
"""(lengths, the member's own options: `learner.objectives.options`) -> term_R float64; ignored where not rewarded."""
LengthPenalty: TypeAlias = Callable[[Rewards], Tensor]


def none(lengths: Lengths, options: Member) -> Tensor:
    return torch.zeros_like(lengths.reward_R)


def overlong(lengths: Lengths, options: Overlong) -> Tensor:
    """Soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), with L_max = max_new_tokens and
    L_cache = margin * L_max:

        0                                       |y| <= L_max - L_cache
        ((L_max - L_cache) - |y|) / L_cache     between
        -1                                      |y| > L_max
    """
    cache = options.margin * lengths.max_new_tokens
    over_R = lengths.length_R.double() - (lengths.max_new_tokens - cache)
    return -options.weight * (over_R / cache).clamp(0.0, 1.0)


def group_length(lengths: Lengths, options: GroupLength) -> Tensor:
    """Length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3), over the rollouts of a group that have a reward:

    lambda = 0.5 - (len - min_len) / (max_len - min_len)
    term   = lambda if correct else min(0, lambda)          all 0 where max_len = min_len
    """
    length_R, n = lengths.length_R.double(), len(lengths.length_R)
    limits: list[Tensor] = []
    for reduce, outside in (("amin", torch.inf), ("amax", -torch.inf)):
        judged_R = torch.where(lengths.rewarded_R, length_R, outside)
        limit_G = torch.full((n,), outside, dtype=torch.float64)
        limits.append(limit_G.scatter_reduce(0, lengths.group_R, judged_R, reduce)[lengths.group_R])
    shortest_R, longest_R = limits
    differ_R = lengths.rewarded_R & (longest_R > shortest_R)
    rank_R = torch.where(differ_R, (length_R - shortest_R) / (longest_R - shortest_R), 0.5)
    lambda_R = 0.5 - rank_R
    return options.weight * torch.where(lengths.reward_R >= SOLVED, lambda_R, lambda_R.clamp(max=0.0))


def make_length_penalty(penalty: Member, *, max_new_tokens: int) -> LengthPenalty | None:
    """None if there is none. Raises ValueError for a name that cannot be loaded."""
    if penalty.name == "none":
        return None
    function, options, _ = LENGTH_PENALTY.load(penalty)

    def term(rewards: Rewards) -> Tensor:
        assert rewards.lengths_R is not None
        rewards.refuse_parts(penalty.name, "length_penalty")
        return function(
            Lengths(rewards.lengths_R, rewards.reward_R, rewards.rewarded_R, rewards.group_R, max_new_tokens), options
        )

    return term
