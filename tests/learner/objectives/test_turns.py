"""Turns of a rollout, and losses that count by turn: against loops over tokens, one path at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.objectives.turns import batch_turns
from stillhouse.learner.step.train_step import Trainer
from stillhouse.learner.turns import turns_of
from stillhouse.protocol.messages import Branch, VersionSpan, WeightVersion
from tests.learner.conftest import make_item, remade, tiny_student
from tests.learner.settings import learner_config
from tests.learner.step.gradients import PLAIN, assert_close, of_loss, step_gradients

BARE: dict[str, Any] = {**PLAIN, "importance": "none"}


def rollout(
    name: str,
    sampled: Sequence[int],
    *,
    branches: Sequence[tuple[int, int]] = (),
    already: Sequence[int] = (),
    **fields: Any,
) -> TrainItem:
    """`sampled`: 1 where the student wrote; `already`: offsets that an earlier batch trained."""
    mask = [int(bool(s) and t not in already) for t, s in enumerate(sampled)]
    plain = make_item(name, mask, **fields)
    spans = [VersionSpan(WeightVersion(0, t % 2), t, t + 1) for t, s in enumerate(sampled) if s]
    return remade(plain, spans=tuple(spans), branches=tuple(Branch(*pair) for pair in branches))


def path_before(train_item: TrainItem, t: int) -> list[int]:
    """Offsets that one reads before token `t`: token by token backwards."""
    starts = {branch.start: branch.follows for branch in train_item.item.branches}
    path: list[int] = []
    while t > 0:
        t = starts.get(t, t) - 1
        if t >= 0:
            path.append(t)
    return path[::-1]


def slow_turns(train_item: TrainItem) -> dict[int, tuple[int, int]]:
    """Trained token -> (first token of its turn in the row, depth)."""
    sampled = {t for span in train_item.item.spans for t in range(span.start, span.end)}
    sampled |= set(np.flatnonzero(train_item.train_mask_L).tolist())
    starts = {branch.start for branch in train_item.item.branches}
    found: dict[int, tuple[int, int]] = {}
    for t in np.flatnonzero(train_item.train_mask_L).tolist():
        first = t
        while before := path_before(train_item, first):
            last = before[-1]
            ends_there = last + 1 not in sampled or last + 1 in starts  # else it is the middle of another turn
            if last not in sampled or (first in starts and not ends_there):
                break
            first = last
        before = [p in sampled for p in path_before(train_item, first)]
        found[t] = first, sum(a and not b for a, b in itertools.pairwise(before))
    return found


def random_rollout(seed: int) -> TrainItem:
    random = np.random.default_rng(seed)
    n = int(random.integers(6, 40))
    starts = sorted(random.choice(np.arange(2, n), size=int(random.integers(0, 4)), replace=False).tolist())
    branches = [(int(s), int(random.choice([0, random.integers(0, s)]))) for s in starts]
    sampled = (random.random(n) < 0.6).astype(int)
    sampled[[0, *(s for s, follows in branches if follows == 0)]] = 0  # a root's first token
    already = np.flatnonzero(random.random(n) < 0.2).tolist()
    return rollout(f"r{seed}", sampled.tolist(), branches=branches, already=already)


def test_turns_of_random_branching_rollouts_are_those_of_a_walk_back_from_each_token() -> None:
    depths: set[int] = set()
    for seed in range(300):
        train_item = random_rollout(seed)
        turns, slow = turns_of(train_item), slow_turns(train_item)
        firsts = [first for first, _ in slow.values()]
        assert turns.turn_N.tolist() == [sorted(set(firsts)).index(first) for first in firsts]
        assert turns.depth_U[turns.turn_N].tolist() == [depth for _, depth in slow.values()] if slow else True
        depths |= set(turns.depth_U.tolist())
    assert depths >= {0, 1, 2, 3}


def test_the_turns_of_a_batch_are_numbered_through() -> None:
    items = [rollout("a", [0, 1, 1, 0, 1], already=[1, 2]), make_item("b", [0, 0]), rollout("c", [0, 1, 0, 1, 1])]
    turns = batch_turns(items)
    assert turns.turn_N.tolist() == [0, 1, 2, 2] and turns.tokens_U.tolist() == [1, 1, 2]
    assert (turns.rollout_U.tolist(), turns.depth_U.tolist()) == ([0, 2, 2], [1, 0, 1])


def mixed_batch() -> list[TrainItem]:
    """Turns of unequal lengths; branches (a second line, a root); a rollout whose first turn was trained before; one
    without anything to train."""
    return [
        rollout("a", [0, 1, 1, 1, 0, 1, 0, 1, 1], task_id=1, reward=1.0),
        rollout("b", [0, 0, 1, 1, 0, 1, 0, 1, 1, 1], branches=[(4, 3), (6, 0)], task_id=1, reward=0.0),
        rollout("c", [0, 1, 1, 0, 0, 1, 1, 0, 1], already=[1, 2, 5], task_id=2, reward=0.5),
        make_item("d", [0, 0, 0], task_id=2, reward=1.0),
    ]


def slow_gradients(
    model: PreTrainedModel, items: Sequence[TrainItem], share: Callable[[TrainItem, int], float]
) -> dict[str, Tensor]:
    """sum over tokens of share * (s - q) * s, one forward pass per token along its own path."""
    total = torch.zeros((), dtype=torch.float64)
    for train_item in items:
        ids_L = torch.from_numpy(train_item.tokens_L).long()
        for t in np.flatnonzero(train_item.train_mask_L).tolist():
            before = path_before(train_item, t)
            s = torch.log_softmax(model(input_ids=ids_L[before][None]).logits[0, -1], dim=-1)[ids_L[t]]
            total = total + share(train_item, t) * (s.item() - float(train_item.teacher_ML[0, t])) * s
    return of_loss(model, total)


@pytest.mark.parametrize("aggregation", ["turn_mean", "sequence_turn_mean"])
@pytest.mark.parametrize("pack_tokens", [1, 12, 4096])
def test_every_turn_weighs_the_same_however_long_it_is(aggregation: str, pack_tokens: int) -> None:
    items = mixed_batch()
    turns = {item.item.rollout_id: slow_turns(item) for item in items}
    firsts = {name: [first for first, _ in of.values()] for name, of in turns.items()}
    n_turns = {name: len(set(of)) for name, of in firsts.items()}

    def share(train_item: TrainItem, t: int) -> float:
        name = train_item.item.rollout_id
        of_turn = 1.0 / firsts[name].count(turns[name][t][0])
        if aggregation == "turn_mean":
            return of_turn / sum(n_turns.values())
        return of_turn / n_turns[name] / sum(n > 0 for n in n_turns.values())

    config = learner_config(aggregation=aggregation, pack_tokens=pack_tokens, **BARE)
    got = step_gradients(Trainer(tiny_student(dtype=torch.float64), config, total_steps=9), items[::-1])
    expected = slow_gradients(tiny_student("eager", torch.float64), items, share)
    assert_close(got, expected)


@pytest.mark.parametrize("pack_tokens", [1, 4096])
@pytest.mark.parametrize("discount", [0.0, 0.5])
def test_a_discounted_divergence_falls_with_the_depth_of_the_turn(discount: float, pack_tokens: int) -> None:
    items = mixed_batch()
    turns = {item.item.rollout_id: slow_turns(item) for item in items}
    n_tokens = sum(item.n_trained for item in items)
    config = learner_config(turn_discount=discount, pack_tokens=pack_tokens, **BARE)
    got = step_gradients(Trainer(tiny_student(dtype=torch.float64), config, total_steps=9), items)
    expected = slow_gradients(
        tiny_student("eager", torch.float64),
        items,
        lambda train_item, t: discount ** turns[train_item.item.rollout_id][t][1] / n_tokens,
    )
    assert {depth for of in turns.values() for _, depth in of.values()} == {0, 1, 2}
    assert_close(got, expected)
