"""With bfloat16 products the parameters stay float32 masters: what AdamW makes of them, what is saved, what is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.checkpoints.checkpoint import LearnerState, capture_rng, load_checkpoint, save_checkpoint
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.description import resolve_dtype
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights.staged_weights import StagedWeights

Make = Callable[..., TrainItem]
Student = Callable[..., PreTrainedModel]

PLAIN: dict[str, Any] = {"dtype": "bfloat16", "max_grad_norm": 0.0, "warmup_steps": 0, "schedule": "constant"}


def _items(make_item: Make) -> list[TrainItem]:
    return [make_item("a", [0, 0, 1, 1, 1]), make_item("b", [0, 1, 1, 0, 0, 1, 0, 0]), make_item("c", [0] + [1] * 9)]


def _masters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def test_auto_means_bfloat16_on_a_gpu_and_float32_elsewhere() -> None:
    assert LearnerConfig().dtype == "auto"
    assert [resolve_dtype("auto", device) for device in ("cuda", "cuda:3", "cpu")] == ["bfloat16"] * 2 + ["float32"]
    assert resolve_dtype("float32", "cuda") == "float32" and resolve_dtype("bfloat16", "cpu") == "bfloat16"


def test_auto_on_a_cpu_changes_no_bit_of_a_float32_step(tiny_student: Student, make_item: Make) -> None:
    trainers = [Trainer(tiny_student(), LearnerConfig(dtype=dtype), total_steps=9) for dtype in ("auto", "float32")]
    for trainer in trainers:
        trainer.step(_items(make_item))
    one, other = map(_masters, trainers)
    assert all(torch.equal(one[name], other[name]) for name in one)


class _SlowAdamW:
    """Loshchilov and Hutter 2019, number by number, in Python's floats, on masters that are rounded to float32."""

    def __init__(self, masters: dict[str, Tensor], config: LearnerConfig) -> None:
        self.masters = {name: tensor.flatten().tolist() for name, tensor in masters.items()}
        self._config = config
        self._first = {name: [0.0] * len(values) for name, values in self.masters.items()}
        self._second = {name: [0.0] * len(values) for name, values in self.masters.items()}
        self._shapes = {name: tensor.shape for name, tensor in masters.items()}
        self._t = 0

    def step(self, gradients: dict[str, Tensor]) -> None:
        self._t += 1
        config, (beta1, beta2) = self._config, self._config.betas
        for name, gradient in gradients.items():
            decay = config.weight_decay if len(self._shapes[name]) >= 2 else 0.0
            first, second, master = self._first[name], self._second[name], self.masters[name]
            for i, g in enumerate(gradient.flatten().tolist()):
                first[i] = beta1 * first[i] + (1 - beta1) * g
                second[i] = beta2 * second[i] + (1 - beta2) * g * g
                m, v = first[i] / (1 - beta1**self._t), second[i] / (1 - beta2**self._t)
                moved = master[i] - config.lr * decay * master[i] - config.lr * m / (math.sqrt(v) + config.eps)
                master[i] = float(torch.tensor(moved, dtype=torch.float32))

    def tensors(self) -> dict[str, Tensor]:
        return {name: torch.tensor(values).view(self._shapes[name]) for name, values in self.masters.items()}


def test_updates_equal_a_slow_adamw_on_float32_masters(tiny_student: Student, make_item: Make) -> None:
    """Updates of 2e-6, a thousandth of what a bfloat16 number of this size can move by."""
    config = LearnerConfig(**PLAIN, lr=2e-6, weight_decay=0.1)
    trainer, items = Trainer(tiny_student(), config, total_steps=9), _items(make_item)
    before, slow = _masters(trainer), _SlowAdamW(_masters(trainer), config)
    for _ in range(3):
        gradients = trainer.gradient(items)
        slow.step(dict(zip(before, gradients, strict=True)))
        trainer.step(items)
    after, expected = _masters(trainer), slow.tensors()
    for name, master in after.items():
        assert master.dtype == torch.float32
        moved, wanted = master.double() - before[name].double(), expected[name].double() - before[name].double()
        torch.testing.assert_close(moved, wanted, rtol=0, atol=2e-7, msg=name)  # 3 float32 roundings of numbers near 1
    largest = max(float((after[name] - before[name]).abs().max()) for name in after)
    assert largest > 3e-6  # what the tolerance is to be compared with


def test_updates_too_small_for_bfloat16_add_up_and_reach_the_actors(tiny_student: Student, make_item: Make) -> None:
    config, items = LearnerConfig(**PLAIN, lr=3e-5), _items(make_item)
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


def test_a_checkpoint_has_the_masters_and_training_goes_on_to_the_bit(
    tiny_student: Student, make_item: Make, tmp_path: Path
) -> None:
    config, items = LearnerConfig(**PLAIN, lr=2e-6), _items(make_item)
    straight = Trainer(tiny_student(), config, total_steps=9)
    for _ in range(2):
        straight.step(items)
    path = save_checkpoint(tmp_path, straight.model, _tokenizer(), _state(straight), keep=1)
    model = load_causal_lm(path, device="cpu", dtype="float32", attention="packed", train=True)
    resumed = Trainer(model, config, total_steps=9)
    resumed.load_state_dict(load_checkpoint(path).optimizer)
    for trainer in (straight, resumed):
        trainer.step(items)
    one, other = _masters(straight), _masters(resumed)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert not all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in one.values())
    moments = straight.state_dict().tensors, resumed.state_dict().tensors
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])


def test_parameters_in_bfloat16_are_refused(tiny_student: Student) -> None:
    with pytest.raises(ValueError, match="load the model with train=True and dtype='float32'"):
        Trainer(tiny_student(dtype=torch.bfloat16), LearnerConfig(), total_steps=1)


def _state(trainer: Trainer) -> LearnerState:
    return LearnerState(
        version=WeightVersion(0, trainer.steps_done),
        optimizer=trainer.state_dict(),
        tasks={},
        ledger=None,
        rng=capture_rng(),
        metrics={},
    )


def _tokenizer(words: Sequence[str] = tuple(f"w{i}" for i in range(23))) -> PreTrainedTokenizerFast:
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w1")
