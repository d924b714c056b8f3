"""Length penalties: each rollout alone, as the papers write them, and their way into the advantage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.objectives.batch_terms import BatchTerms, batch_terms
from stillhouse.learner.objectives.losses import make_objective
from stillhouse.protocol.messages import VersionSpan, WeightVersion
from tests.learner.conftest import make_item, remade
from tests.learner.settings import objective_config

L_MAX = 10
LENGTHS = (2, 8, 9, 10, 6, 6, 4, 12, 5)
GROUPS = (1, 1, 1, 1, 2, 2, 3, 3, 4)
REWARDS = (1.0, 0.0, 0.5, None, 1.0, 0.0, 0.25, 1.0, 1.0)


def batch(*, final: bool = True) -> list[TrainItem]:
    """Rollouts of these lengths, of which two tokens at most are trained here: the others were before."""
    items: list[TrainItem] = []
    for i, (length, group, reward) in enumerate(zip(LENGTHS, GROUPS, REWARDS, strict=True)):
        mask = [0] * (1 + length - 2) + [1] * 2
        plain = make_item(f"r{i}", mask, task_id=group, reward=reward, final=final)
        items.append(remade(plain, spans=(VersionSpan(WeightVersion(0, 0), 1, 1 + length),)))
    return items


def slow_overlong(i: int, *, margin: float) -> float:
    cache, length = margin * L_MAX, LENGTHS[i]
    if length <= L_MAX - cache:
        return 0.0
    return ((L_MAX - cache) - length) / cache if length <= L_MAX else -1.0


def slow_group_length(i: int) -> float:
    of_group = [LENGTHS[j] for j in range(len(LENGTHS)) if GROUPS[j] == GROUPS[i] and REWARDS[j] is not None]
    if max(of_group) == min(of_group):
        return 0.0
    lam = 0.5 - (LENGTHS[i] - min(of_group)) / (max(of_group) - min(of_group))
    return lam if (REWARDS[i] or 0.0) >= 0.5 else min(0.0, lam)


def terms(items: Sequence[TrainItem], advantage: Any, penalty: Any) -> BatchTerms:
    config = objective_config(advantage=advantage, length_penalty=penalty)
    return batch_terms(items, make_objective(config, max_new_tokens=L_MAX), values=lambda: torch.zeros(0))


def expected_advantages(penalties: dict[int, float]) -> list[float]:
    """Dr. GRPO on the penalised rewards, for the two trained tokens of each rollout."""
    rewards = {i: reward + penalties[i] for i, reward in enumerate(REWARDS) if reward is not None}
    found: list[float] = []
    for i, group in enumerate(GROUPS):
        of_group = [value for j, value in rewards.items() if GROUPS[j] == group]
        found += [rewards[i] - sum(of_group) / len(of_group) if i in rewards else 0.0] * 2
    return found


@pytest.mark.parametrize("margin", [0.2, 0.5, 1.0])
def test_overlong_is_the_punishment_of_dapo(margin: float) -> None:
    judged = {i: 2.0 * slow_overlong(i, margin=margin) for i, reward in enumerate(REWARDS) if reward is not None}
    got = terms(batch(), ("grpo", {"std": False}), ("overlong", {"margin": margin, "weight": 2.0}))
    assert got.reward_advantage_N.tolist() == pytest.approx(expected_advantages(judged))
    assert got.length_penalty == pytest.approx(sum(judged.values()) / len(judged)) and min(judged.values()) == -2.0


def test_group_length_is_the_reward_of_kimi() -> None:
    judged = {i: 0.5 * slow_group_length(i) for i, reward in enumerate(REWARDS) if reward is not None}
    got = terms(batch(), ("grpo", {"std": False}), ("group_length", {"weight": 0.5}))
    assert got.reward_advantage_N.tolist() == pytest.approx(expected_advantages(judged))
    assert judged[0] == 0.25 and judged[1] < 0.0 and judged[4] == judged[5] == judged[6] == judged[8] == 0.0


def test_without_a_penalty_rewards_are_the_same_to_the_bit() -> None:
    items = batch()
    objective = make_objective(objective_config(advantage="grpo"), max_new_tokens=L_MAX)
    got = batch_terms(items, objective, values=lambda: torch.zeros(0))
    assert (objective.length_penalty, got.length_penalty) == (None, None)
    none = terms(items, "grpo", "none")
    assert torch.equal(got.reward_advantage_N, none.reward_advantage_N)
