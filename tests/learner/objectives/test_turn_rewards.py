"""Rewards of turns: where they are paid, and the advantages from them, against loops over tokens and turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.objectives.advantages import gae
from stillhouse.learner.objectives.batch_terms import BatchTerms, batch_terms
from stillhouse.learner.objectives.losses import make_objective
from stillhouse.protocol.messages import TurnReward
from tests.learner.conftest import remade
from tests.learner.objectives.test_turns import rollout, slow_turns
from tests.learner.settings import objective_config

Rewards = dict[str, dict[int, float]]
"""Rollout -> end of a turn -> its reward."""


def batch(*, final: bool = True) -> list[TrainItem]:
    """Two groups. In "b" a branch and a root; in "c" the first turn and the end of the last were trained before; "d"
    has a part of its reward for no turn; "e" has no reward, "f" one for the whole rollout, "g" nothing to train."""
    shapes: dict[str, dict[str, Any]] = {
        "a": {"sampled": [0, 1, 1, 0, 1, 0, 1, 1], "task_id": 1},
        "b": {"sampled": [0, 0, 1, 1, 0, 1, 0, 1, 1], "branches": [(4, 3), (6, 0)], "task_id": 1},
        "c": {"sampled": [0, 1, 0, 1, 1, 0, 1, 1], "already": [1, 6, 7], "task_id": 1},
        "d": {"sampled": [0, 1, 0, 1], "task_id": 2},
        "e": {"sampled": [0, 1, 0, 1], "task_id": 2},
        "f": {"sampled": [0, 1, 0, 1, 1], "task_id": 2},
        "g": {"sampled": [0, 1, 0, 1], "already": [1, 3], "task_id": 2},
    }
    items: list[TrainItem] = []
    for name, fields in shapes.items():
        plain = rollout(name, reward=WHOLE.get(name), final=final, **fields)
        parts = tuple(TurnReward(end, reward) for end, reward in PARTS.get(name, {}).items())
        items.append(remade(plain, turn_rewards=parts))
    return items


PARTS: Rewards = {"a": {3: 0.5, 8: -1.0}, "b": {4: 1.0, 9: 0.25}, "c": {2: 2.0, 8: 0.5}, "d": {2: 0.75}, "g": {2: 1.0}}
WHOLE = {"a": -0.5, "b": 1.25, "c": 2.5, "d": 1.0, "f": 3.0, "g": 1.0}
TURNS: dict[str, list[tuple[int, int]]] = {
    "a": [(1, 3), (4, 5), (6, 8)],
    "b": [(2, 4), (5, 6), (7, 9)],
    "c": [(1, 2), (3, 5), (6, 8)],
    "d": [(1, 2), (3, 4)],
    "e": [(1, 2), (3, 4)],
    "f": [(1, 2), (3, 5)],
    "g": [(1, 2), (3, 4)],
}
"""[begin, end) of each turn, read off the shapes."""


def of_turns(name: str) -> list[float]:
    found = [PARTS.get(name, {}).get(end, 0.0) for _, end in TURNS[name]]
    found[-1] += WHOLE.get(name, 0.0) - sum(PARTS.get(name, {}).values())
    return found


def terms(items: Sequence[TrainItem], advantage: Any, values: torch.Tensor | None = None, **fields: Any) -> BatchTerms:
    objective = make_objective(objective_config(advantage=advantage, **fields), max_new_tokens=9)
    return batch_terms(items, objective, values=lambda: torch.zeros(0) if values is None else values)


@pytest.mark.parametrize("std", [False, True])
@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_turn_returns_are_normalised_over_the_turns_of_the_group(std: bool, discount: float) -> None:
    items = batch()
    returns: dict[str, list[float]] = {}
    for name in TURNS:
        rewards = of_turns(name)
        returns[name] = [
            sum(discount ** (k - j) * rewards[k] for k in range(j, len(rewards))) for j in range(len(rewards))
        ]
    expected: list[float] = []
    for train_item in items:
        name = train_item.item.rollout_id
        group = [i.item.rollout_id for i in items if i.item.task_id == train_item.item.task_id]
        judged = [value for other in group if other in WHOLE for value in returns[other]]
        spread = statistics.stdev(judged) + 1e-6 if std else 1.0
        firsts = [begin for begin, _ in TURNS[name]]
        for first, _ in slow_turns(train_item).values():
            value = (returns[name][firsts.index(first)] - statistics.fmean(judged)) / spread
            expected.append(value if name in WHOLE else 0.0)
    got = terms(items, ("turn_returns", {"discount": discount, "std": std}))
    assert got.reward_advantage_N.tolist() == pytest.approx(expected)
    assert len(set(expected)) > 5


def test_gae_pays_a_turn_s_reward_at_its_last_trained_token() -> None:
    """Or, where none of its tokens is trained here, at the last one before it, or the first of the rollout."""
    items = batch()
    paid: dict[str, list[float]] = {
        "a": [0.0, 0.5, 0.0, 0.0, -1.0],
        "b": [0.0, 1.0, 0.0, 0.0, 0.25],
        "c": [2.0, 0.5],  # trained: 3 and 4
        "d": [0.75, 0.25],
        "e": [],
        "f": [0.0, 0.0, 3.0],
    }
    numbers = torch.arange(sum(item.n_trained for item in items), dtype=torch.float64) / 7
    judged = torch.cat([torch.full((i.n_trained,), i.item.reward is not None) for i in items])
    before = [-1, 0, 1, 2, 3, -1, 5, 5, -1, 8, -1, 10, -1, 12, -1, 14, 15]  # in "b" two branches and a root
    reward_N = torch.tensor([value for of in paid.values() for value in of], dtype=torch.float64)
    advantage_N, return_N = gae(reward_N, numbers[judged], torch.tensor(before), discount=0.9, decay=0.8)
    got = terms(items, ("gae", {"discount": 0.9, "decay": 0.8}), numbers)
    white_N = (advantage_N - advantage_N.mean()) / (advantage_N.std(correction=0) + 1e-6)
    torch.testing.assert_close(got.reward_advantage_N[judged], white_N)
    assert got.values is not None
    torch.testing.assert_close(got.values.return_N[judged], return_N)


def test_what_advantages_of_rollouts_see_is_the_sum() -> None:
    items = batch()
    plain = [remade(one, turn_rewards=()) for one in items]
    for advantage in ("grpo", "reinforce_pp"):
        one, other = terms(items, advantage), terms(plain, advantage)
        assert torch.equal(one.reward_advantage_N, other.reward_advantage_N)


def test_a_length_penalty_is_a_reward_of_the_last_turn() -> None:
    items = batch()[3:4]  # "d": 2 tokens of 9, no penalty; and with a margin of 1 -2/9
    got = terms(items, ("turn_returns", {"std": False}), length_penalty=("overlong", {"margin": 1.0}))
    first, last = 1.0 - 2 / 9, 0.25 - 2 / 9
    mean = (first + last) / 2
    assert got.reward_advantage_N.tolist() == pytest.approx([first - mean, last - mean])
