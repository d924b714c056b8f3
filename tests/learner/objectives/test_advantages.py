"""Advantages from rewards against plain Python, and what must not change them."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
import torch

from learner.batch.packing import BatchError
from learner.objectives.advantages import EPSILON, Rewards
from learner.objectives.options import Grpo
from learner.objectives.registry import ADVANTAGES, find_member


def _rewards(seed: int = 0, **fields: Any) -> Rewards:
    """Nine rollouts of three prompts; one without a reward, one without a token, one group all alike."""
    random = np.random.default_rng(seed)
    reward_R = random.normal(2.0, 1.5, 9)
    group_R = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2])
    reward_R[group_R == 2] = 0.7
    rewarded_R = np.ones(9, bool)
    rewarded_R[3] = False
    values: dict[str, Any] = {
        "reward_R": torch.tensor(np.where(rewarded_R, reward_R, 55.0)),
        "rewarded_R": torch.tensor(rewarded_R),
        "group_R": torch.tensor(group_R),
        "tokens_R": torch.tensor([5, 1, 9, 4, 30, 2, 7, 0, 3]),
    }
    return Rewards(**values, **fields)


def _slow(name: str, rewards: Rewards, *, std: bool) -> list[float]:
    reward, group = rewards.reward_R.tolist(), rewards.group_R.tolist()
    judged, tokens = rewards.rewarded_R.tolist(), rewards.tokens_R.tolist()
    if name == "none":
        return [0.0] * len(reward)
    values: list[float] = []
    for r in range(len(reward)):
        members = [reward[i] for i in range(len(reward)) if judged[i] and group[i] == group[r]]
        value = reward[r] if name == "reinforce_pp" else reward[r] - statistics.fmean(members)
        if name == "grpo" and std:
            value /= (statistics.stdev(members) if len(members) > 1 else 0.0) + EPSILON
        values.append(value if judged[r] else 0.0)
    if name.startswith("reinforce_pp"):
        everyone = [values[r] for r in range(len(reward)) if judged[r] for _ in range(tokens[r])]
        mean, spread = statistics.fmean(everyone), statistics.pstdev(everyone)
        values = [(value - mean) / (spread + EPSILON) if judged[r] else 0.0 for r, value in enumerate(values)]
    return values


@pytest.mark.parametrize("name", ADVANTAGES.built_in)
@pytest.mark.parametrize("std", [True, False])
def test_equal_to_plain_python(name: str, std: bool) -> None:
    rewards = _rewards()
    got_R = find_member(ADVANTAGES, name)(rewards, Grpo(std=std))
    np.testing.assert_allclose(got_R.numpy(), _slow(name, rewards, std=std), atol=1e-9)
    assert got_R[3] == 0


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp_baseline"])
def test_group_that_is_all_alike_teaches_nothing_by_itself(name: str) -> None:
    rewards = Rewards(
        torch.full((4,), 0.1, dtype=torch.float64), torch.ones(4).bool(), torch.zeros(4).long(), torch.ones(4).long()
    )
    assert float(find_member(ADVANTAGES, name)(rewards, Grpo()).abs().max()) < 1e-9


@pytest.mark.parametrize("name", ADVANTAGES.built_in)
def test_batch_without_any_reward_gives_zeros(name: str) -> None:
    rewards = Rewards(torch.zeros(3).double(), torch.zeros(3).bool(), torch.arange(3), torch.ones(3).long())
    assert find_member(ADVANTAGES, name)(rewards, Grpo()).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ADVANTAGES.built_in)
def test_parts_of_rollouts_are_refused_where_rewards_are_trained_on(name: str) -> None:
    rewards = _rewards(parts=("train-4-0-0",))
    member = find_member(ADVANTAGES, name)
    if name == "none":
        assert not member(rewards, Grpo()).any()
        return
    with pytest.raises(BatchError, match=r"whole rollouts, got parts of \['train-4-0-0'\]; set buffer.release") as told:
        member(rewards, Grpo())
    assert told.value.rollout_ids == ("train-4-0-0",)
