"""Layers that compute their activations again: the same step bit for bit, with less kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import LearnerConfig, LoraConfig
from stillhouse.learner.step.lora import Adapters
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.layers import layers
from tests.learner.conftest import make_item, tiny_student


def trainer_of(**settings: Any) -> Trainer:
    config = LearnerConfig(lr=1e-2, warmup_steps=0, **settings)
    model = tiny_student()
    torch.manual_seed(0)
    adapters = Adapters(model, config.lora, base="tiny") if config.lora.rank else None
    return Trainer(model, config, total_steps=9, adapters=adapters)


def batch() -> list[TrainItem]:
    return [make_item("a", [0, 0, 1, 1, 1]), make_item("b", [0] * 20 + [1] * 10)]


def calls(trainer: Trainer) -> list[int]:
    """Times that each layer's attention is computed, counted from now on."""
    counts: list[int] = []

    def count(index: int) -> Callable[..., None]:
        def add(*_: Any) -> None:
            counts[index] += 1

        return add

    for index, layer in enumerate(layers(trainer.model)):
        counts.append(0)
        attention = next(module for name, module in layer.named_modules() if name.endswith("self_attn"))
        assert isinstance(attention, nn.Module)
        attention.register_forward_pre_hook(count(index))
    return counts


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2)], ids=["all weights", "adapters"])
def test_the_step_is_the_same_bit_for_bit_and_layers_run_once_more(lora: LoraConfig) -> None:
    kept, again = trainer_of(lora=lora), trainer_of(lora=lora, recompute=1.0)
    once, twice = calls(kept), calls(again)
    figures = [trainer.step(batch()).as_dict() for trainer in (kept, again)]
    one, other = ({name: value for name, value in each.items() if not name.endswith("_s")} for each in figures)
    assert (once, twice) == ([1, 1], [2, 2])
    assert one == other and len(one) > 10
    for (name, weight), (_, same) in zip(kept.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(weight, same), name


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 0.75), (1.0, 0.5)])
def test_what_a_pass_keeps_shrinks_with_the_share(share: float, expected: float) -> None:
    """Counted by autograd itself: bytes of the tensors that it saves."""

    def saved_bytes(trainer: Trainer) -> int:
        total: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            total[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        parameters = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            trainer.step(batch())
        return sum(n for pointer, n in total.items() if pointer not in parameters)

    whole = saved_bytes(trainer_of())
    assert saved_bytes(trainer_of(recompute=share)) <= expected * whole


def test_a_model_whose_layers_are_not_known_is_refused() -> None:
    model = tiny_student()
    model._no_split_modules = None  # pyright: ignore
    with pytest.raises(ValueError, match=r"expected learner.ranks = 1 and learner.recompute = 0"):
        Trainer(model, LearnerConfig(recompute=0.5), total_steps=9)
