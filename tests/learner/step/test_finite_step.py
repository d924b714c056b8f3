"""A step on what is finite: as if the rest had never been there, and a clock that goes on whatever happens."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
import torch

from stillhouse.learner.batch import EmptyBatchError
from stillhouse.learner.step.finite_step import finite_step
from stillhouse.learner.step.train_step import Trainer
from tests.learner.conftest import make_item, tiny_student
from tests.learner.settings import learner_config

NAMES = ("a", "b", "c", "d")


def make_trainer(**settings: Any) -> Trainer:
    return Trainer(tiny_student(), learner_config(pack_tokens=4, **settings), total_steps=10)  # a rollout each


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_the_others_are_trained_as_if_the_culprits_had_been_context() -> None:
    items = [make_item(name, [0, 1, 1]) for name in NAMES]
    context = [make_item(name, [0, 1, 1] if name in "ac" else [0, 0, 0]) for name in NAMES]
    for mine, other in zip(items, context, strict=True):
        other.tokens_L[:] = mine.tokens_L
        other.behaviour_L[:], other.teacher_ML[:] = mine.behaviour_L, mine.teacher_ML
    items[1].teacher_ML[:] = items[3].teacher_ML[:] = -1e38  # in two microbatches, so found one after the other
    ours, plain = make_trainer(), make_trainer()
    outcome = finite_step(ours, items)
    expected = plain.step(context)
    assert outcome.masked == ("b", "d")
    assert outcome.figures is not None and outcome.figures.tokens == expected.tokens == 4
    for a, b in zip(weights(ours), weights(plain), strict=True):
        torch.testing.assert_close(a, b)
    assert items[1].n_trained == 2, "the batch itself is not touched"


def test_a_rollout_that_is_left_out_stays_in_the_mean_reward_of_its_group() -> None:
    """Rewards 0, 1, 1, 1: with the first left out by mistake the others would have no advantage at all."""
    rewards = {"advantage": ("grpo", {"std": False}), "coef": 0.01}
    items = [make_item(name, [0, 1, 1], task_id=3, reward=float(n > 0)) for n, name in enumerate(NAMES)]
    others = [dataclasses.replace(items[0], train_mask_L=np.zeros_like(items[0].train_mask_L)), *items[1:]]
    ours, plain = (make_trainer(**rewards) for _ in range(2))
    before, expected = weights(ours), plain.step(others)
    items[0].teacher_ML[:] = -1e38
    outcome = finite_step(ours, items)
    assert outcome.masked == ("a",)
    assert outcome.figures is not None and outcome.figures.grad_norm == pytest.approx(expected.grad_norm)
    assert expected.grad_norm > 0 and not all(map(torch.equal, before, weights(ours)))
    for a, b in zip(weights(ours), weights(plain), strict=True):
        torch.testing.assert_close(a, b)


def test_a_step_of_which_nothing_is_left_counts_and_changes_nothing() -> None:
    items = [make_item(name, [0, 1, 1]) for name in NAMES]
    trainer = make_trainer()
    lr = trainer.next_lr
    for train_item in items:
        train_item.teacher_ML[:] = -1e38
    before = weights(trainer)
    outcome = finite_step(trainer, items)
    assert outcome == (None, NAMES)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    assert trainer.steps_done == 1 and trainer.next_lr != lr, "the schedule goes on with the version"


def test_all_are_left_out_where_only_their_sum_is_not_finite() -> None:
    """Any two of these overflow together, and none by itself: to leave one out would train the others on what is left,
    by chance of its place in the batch."""
    names = [f"{n}" for n in range(8)]
    items = [make_item(name, [0, 1], seed=3) for name in names]
    config = learner_config(pack_tokens=64, importance="none", aggregation="sequence_mean")
    trainer = Trainer(tiny_student(), config, total_steps=10)
    with torch.no_grad():
        cast(torch.nn.Embedding, trainer.model.get_input_embeddings()).weight.mul_(40.0)
    s = abs(float(trainer.logprobs(items[0].tokens_L.tolist())[0]))
    assert s > 8.0
    for train_item in items[1:3]:
        train_item.teacher_ML[:] = -2.2e38 * len(items) / s
    before = weights(trainer)
    assert finite_step(trainer, items) == (None, tuple(names))
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))


def test_a_batch_that_never_had_a_token_is_no_skipped_step() -> None:
    with pytest.raises(EmptyBatchError):
        finite_step(make_trainer(), [make_item("a", [0, 0, 0])])
