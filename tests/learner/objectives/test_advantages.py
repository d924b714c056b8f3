"""Advantages from rewards, per rollout and per token, against plain loops."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch

from stillhouse.learner.batch import BatchError
from stillhouse.learner.objectives.advantages import EPSILON, Rewards, gae  # pyright: ignore[reportPrivateUsage]
from stillhouse.learner.objectives.options import Grpo
from stillhouse.learner.objectives.registry import ADVANTAGES, find_member


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


def _slow_gae(reward: list[float], value: list[float], discount: float, decay: float) -> list[float]:
    """One rollout: sum over l of (discount * decay)^l * delta_{t+l}."""
    n = len(reward)
    delta = [reward[t] + discount * (value[t + 1] if t + 1 < n else 0.0) - value[t] for t in range(n)]
    return [sum((discount * decay) ** k * delta[t + k] for k in range(n - t)) for t in range(n)]


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (1.0, 0.0)])
def test_equal_to_the_sum_over_later_tokens(discount: float, decay: float) -> None:
    random = np.random.default_rng(0)
    sequence_N = torch.tensor([0, 0, 0, 2, 2, 3, 0, 2, 3, 3])  # of rollouts, interleaved
    before_N = torch.tensor([-1, 0, 1, -1, 3, -1, 2, 4, 5, 8])
    reward_N, value_N = torch.tensor(random.normal(size=(2, 10)))
    advantage_N, return_N = gae(reward_N, value_N, before_N, discount=discount, decay=decay)
    for r in (0, 2, 3):
        own = (sequence_N == r).nonzero().flatten()
        slow = _slow_gae(reward_N[own].tolist(), value_N[own].tolist(), discount, decay)
        np.testing.assert_allclose(advantage_N[own], slow, rtol=1e-12)
    torch.testing.assert_close(return_N, advantage_N + value_N)


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("evil", [-1e4, 50.0, 1e4, 1e10, 1e19, 1e308, math.inf, math.nan])
def test_no_single_reward_takes_the_signal_of_all_others(name: str, evil: float) -> None:
    """Others have 1 or 0: whoever has 1 stays above whoever has 0, or the batch is refused by the rollout's name."""
    values: dict[str, Any] = {
        "reward_R": torch.tensor([evil, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64),
        "rewarded_R": torch.ones(8, dtype=torch.bool),
        "group_R": torch.tensor([0] * 4 + [1] * 4),
        "tokens_R": torch.tensor([10, 20, 30, 5, 7, 9, 11, 13]),
        "rollouts": tuple(f"train-{r}" for r in range(8)),
    }
    if not abs(evil) <= 1e12:
        with pytest.raises(BatchError, match="rollout train-0 has the reward"):
            Rewards(**values)
        return
    got = find_member(ADVANTAGES, name)(Rewards(**values), Grpo()).tolist()
    assert got[4] - got[5] > 0.1 and got[2] - got[1] > 0.05
    assert all(abs(one) <= abs(got[0]) for one in got) and math.copysign(1, got[0]) == math.copysign(1, evil)
