"""Turns of a batch (`learner.turns`), as tensors.

Legend: N trained tokens of the batch in the order of the items, U turns with a trained token, V all turns; R items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.objectives.advantages import Rewards, TurnRewards
from stillhouse.learner.turns import episode_turns, paid_rewards, turn_rewards, turns_of


class Turns(NamedTuple):
    """int64."""

    turn_N: Tensor
    tokens_U: Tensor
    """Trained tokens of the turn."""
    rollout_U: Tensor
    """Index of its item."""
    depth_U: Tensor


def batch_turns(items: Sequence[TrainItem]) -> Turns:
    each = [turns_of(train_item) for train_item in items]
    counts = [len(one.depth_U) for one in each]
    firsts = np.cumsum([0, *counts[:-1]])
    none = np.zeros(0, np.int64)
    turn_N = np.concatenate([none, *(one.turn_N + first for one, first in zip(each, firsts, strict=True))])
    return Turns(
        turn_N=torch.from_numpy(turn_N),
        tokens_U=torch.from_numpy(np.bincount(turn_N, minlength=sum(counts))),
        rollout_U=torch.from_numpy(np.repeat(np.arange(len(each)), counts)),
        depth_U=torch.from_numpy(np.concatenate([none, *(one.depth_U for one in each)])),
    )


def batch_rewards(items: Sequence[TrainItem], rewards: Rewards) -> TurnRewards:
    """The rewards by turn; a length penalty is in that of the last one."""
    each = [episode_turns(train_item) for train_item in items]
    counts = [len(one.begin_V) for one in each]
    parts = [
        turn_rewards(train_item.item.turn_rewards, one, reward)
        for train_item, one, reward in zip(items, each, rewards.reward_R.tolist(), strict=True)
    ]
    paid = [paid_rewards(*of) for of in zip(items, each, rewards.reward_R.tolist(), strict=True)]
    firsts, before = np.cumsum([0, *counts[:-1]]), (rewards.tokens_R.cumsum(0) - rewards.tokens_R).tolist()
    turn_N = [one.turn_N + first for one, first in zip(each, firsts, strict=True)]
    before_N = [np.where(i.before < 0, -1, i.before + n) for i, n in zip(items, before, strict=True)]
    rollout_V = torch.from_numpy(np.repeat(np.arange(len(each)), counts))
    none = np.zeros(0, np.int64)
    return TurnRewards(
        reward_V=torch.from_numpy(np.concatenate([np.zeros(0), *parts])),
        rewarded_V=rewards.rewarded_R[rollout_V],
        rollout_V=rollout_V,
        group_V=rewards.group_R[rollout_V],
        turn_N=torch.from_numpy(np.concatenate([none, *turn_N])),
        paid_N=torch.from_numpy(np.concatenate([np.zeros(0), *paid])),
        before_N=torch.from_numpy(np.concatenate([none, *before_N])),
    )
