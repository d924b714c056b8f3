"""With bfloat16 products the parameters stay float32 masters: what AdamW makes of them, what is saved, what is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.description import resolve_dtype
from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights.staged_weights import StagedWeights
from tests.learner.conftest import make_item, tiny_student

PLAIN: dict[str, Any] = {"dtype": "bfloat16", "max_grad_norm": 0.0, "warmup_steps": 0, "schedule": "constant"}


def _items() -> list[TrainItem]:
    return [make_item("a", [0, 0, 1, 1, 1]), make_item("b", [0, 1, 1, 0, 0, 1, 0, 0]), make_item("c", [0] + [1] * 9)]


def _masters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def test_auto_means_bfloat16_on_a_gpu_and_float32_elsewhere() -> None:
    assert LearnerConfig().dtype == "auto"
    assert [resolve_dtype("auto", device) for device in ("cuda", "cuda:3", "cpu")] == ["bfloat16"] * 2 + ["float32"]
    assert resolve_dtype("float32", "cuda") == "float32" and resolve_dtype("bfloat16", "cpu") == "bfloat16"


def test_auto_on_a_cpu_changes_no_bit_of_a_float32_step() -> None:
    trainers = [Trainer(tiny_student(), LearnerConfig(dtype=dtype), total_steps=9) for dtype in ("auto", "float32")]
    for trainer in trainers:
        trainer.step(_items())
    one, other = map(_masters, trainers)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_updates_too_small_for_bfloat16_add_up_and_reach_the_actors() -> None:
    config, items = LearnerConfig(**PLAIN, lr=3e-5), _items()
    trainer, rounded = (Trainer(tiny_student(), config, total_steps=99) for _ in range(2))
    with torch.no_grad():
        for parameter in rounded.model.parameters():
            parameter.copy_(parameter.bfloat16())
    start = {name: tensor.bfloat16() for name, tensor in _masters(trainer).items()}
    for _ in range(30):
        trainer.step(items)
        rounded.step(items)
        with torch.no_grad():  # as if there were no masters
            for parameter in rounded.model.parameters():
                parameter.copy_(parameter.bfloat16())
    staged = StagedWeights(dtype="bfloat16")
    staged.fill(WeightVersion(0, 30), trainer.weights())
    moved = sum(int((tensor != start[name]).sum()) for name, tensor in staged.named)
    lost = sum(int((tensor.bfloat16() != start[name]).sum()) for name, tensor in _masters(rounded).items())
    assert moved > 3 * lost  # of 3,000 numbers; those near 0 move in bfloat16 too
    masters = _masters(trainer)
    for name, tensor in staged.named:
        assert torch.equal(tensor, masters[name].bfloat16()) and not torch.equal(tensor.float(), masters[name])
