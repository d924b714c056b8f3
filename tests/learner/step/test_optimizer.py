"""Learning-rate schedule, weight decay groups, and optimizer state that goes on exactly where it was taken."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.step.optimizer import learning_rate
from stillhouse.learner.step.optimizers import make_optimizer
from stillhouse.learner.step.train_step import Trainer
from tests.learner.conftest import make_item, tiny_student


def test_warm_up_then_cosine_down_to_the_floor() -> None:
    config = LearnerConfig(lr=2.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 24) for step in range(30)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert all(a > b for a, b in itertools.pairwise(rates[3:24]))
    assert rates[13] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[23:] == [pytest.approx(0.2)] * 7


def test_constant_schedule_and_no_warm_up() -> None:
    config = LearnerConfig(lr=3.0, warmup_steps=0, schedule="constant")
    assert {learning_rate(config, step, 5) for step in range(9)} == {3.0}
    assert learning_rate(LearnerConfig(lr=3.0, warmup_steps=10), 9, 5) == 3.0


def test_norms_and_biases_do_not_decay() -> None:
    model = tiny_student()
    decayed, kept = make_optimizer(model, LearnerConfig(weight_decay=0.1)).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and kept["weight_decay"] == 0.0
    assert all("norm" in names[id(p)] for p in kept["params"])
    assert not any("norm" in names[id(p)] for p in decayed["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_restored_trainer_makes_bit_for_bit_the_same_steps() -> None:
    batches = [[make_item(f"{k}{i}", [0, 0] + [1] * 5, seed=10 * k + i) for i in range(3)] for k in range(6)]
    config = LearnerConfig(weight_decay=0.01, warmup_steps=2)
    straight = Trainer(tiny_student(), config, total_steps=6)
    for batch in batches[:3]:
        straight.step(batch)
    state = straight.state_dict()
    weights = {name: p.detach().clone() for name, p in straight.model.named_parameters()}
    resumed = Trainer(tiny_student(), config, total_steps=6)
    resumed.model.load_state_dict(weights, strict=False)
    resumed.load_state_dict(state)
    assert resumed.steps_done == 3
    for batch in batches[3:]:
        one, other = straight.step(batch).as_dict(), resumed.step(batch).as_dict()
        assert {**one, "step_s": 0} == {**other, "step_s": 0}
    for (name, a), (_, b) in zip(straight.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_state_before_the_first_step_is_empty_and_loads() -> None:
    trainer = Trainer(tiny_student(), LearnerConfig(), total_steps=6)
    state = trainer.state_dict()
    assert not state.tensors and len(state.never_stepped) == len(list(trainer.model.parameters()))
    trainer.load_state_dict(state)
    assert trainer.steps_done == 0


@pytest.mark.parametrize("spoil", ["missing", "unknown", "shape"])
def test_state_of_another_model_is_refused_and_nothing_changes(spoil: str) -> None:
    trainer = Trainer(tiny_student(), LearnerConfig(), total_steps=6)
    trainer.step([make_item("a", [0, 1, 1])])
    state = trainer.state_dict()
    tensors: dict[str, Any] = dict(state.tensors)
    name = "exp_avg/model.norm.weight"
    if spoil == "unknown":
        tensors["exp_avg/other"] = tensors[name]
    elif spoil == "shape":
        tensors[name] = tensors[name][:-1]
    else:
        del tensors[name]
    with pytest.raises(ValueError, match="belongs to another architecture"):
        trainer.load_state_dict(replace(state, tensors=tensors, steps_done=9))
    assert trainer.steps_done == 1
