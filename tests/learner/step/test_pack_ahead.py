"""A batch that was read and packed while another one trained gives the step that it would have given without."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from stillhouse.learner.batch import TrainItem, UnreadableScores
from stillhouse.learner.step.finite_step import finite_step
from stillhouse.learner.step.pack_ahead import PackAhead
from stillhouse.learner.step.train_step import Trainer
from tests.learner.conftest import make_item, tiny_student
from tests.learner.settings import learner_config
from tests.learner.step.payload_batches import VOCAB, with_sets


def _items(*names: str) -> list[TrainItem]:
    return [with_sets(make_item(name, [0, 0, 1, 1, 1], vocab=VOCAB, reward=1.0), k=VOCAB, cut=3) for name in names]


def _trainer(**fields: Any) -> Trainer:
    config = learner_config(warmup_steps=0, schedule="constant", **fields)
    return Trainer(tiny_student(), config, total_steps=10, vocab_tokens=VOCAB, seed=3)


def _weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


class _CountedReads:
    """Stands in for `StepLoss.read`."""

    def __init__(self, read: Callable[[Sequence[TrainItem], int], Sequence[TrainItem]]) -> None:
        self._read = read
        self.steps: list[int] = []

    def __call__(self, items: Sequence[TrainItem], step: int) -> Sequence[TrainItem]:
        self.steps.append(step)
        return self._read(items, step)


@pytest.mark.parametrize("divergence", ["reverse_kl", "multi_sample", "k1"])
def test_steps_of_batches_packed_ahead_are_the_same_to_the_bit(divergence: str) -> None:
    """`multi_sample` draws numbers that depend on the step."""
    batches = [_items("a", "b"), _items("c", "d")]
    plain, ahead = (_trainer(divergence=divergence) for _ in range(2))
    ahead.pack_ahead(batches[0], 0)
    for step, items in enumerate(batches):
        if step + 1 < len(batches):
            ahead.pack_ahead(batches[step + 1], step + 1)
        judged = [replace(one, item=msgspec.structs.replace(one.item, reward=0.5)) for one in items]
        reads = _CountedReads(ahead._loss.read)
        ahead._loss.read = reads
        assert ahead.step(judged).loss == plain.step(judged).loss
        assert not reads.steps, "it was read before"
    for one, other in zip(_weights(ahead), _weights(plain), strict=True):
        assert torch.equal(one, other)


def test_a_pack_of_other_tokens_is_not_trained() -> None:
    items = _items("a", "b")
    ahead = PackAhead(lambda given, step: given, 1000)
    ahead.make(items, 4)
    fewer = replace(items[0], train_mask_L=np.zeros_like(items[0].train_mask_L))
    assert ahead.take([fewer, items[1]], 4) is None
    ahead.make(items, 4)
    assert ahead.take(items[:1], 4) is None
    ahead.make(items, 4)
    assert ahead.take(items, 5) is None, "made for another step"
    assert not ahead._packed, "and not kept"
    ahead.make(items, 4)
    ahead.make(items, 5)
    assert ahead.take(items, 4) is not None and ahead.take(items, 5) is not None


def test_what_cannot_be_read_is_found_by_the_step_and_left_out_of_it() -> None:
    items = _items("a", "b")
    payloads = items[0].payloads.copy()
    payloads[:] = 255
    items[0] = replace(items[0], payloads=payloads)
    trainer = _trainer(divergence="reverse_kl")
    trainer.pack_ahead(items, 0)
    with pytest.raises(UnreadableScores):
        trainer.step(items)
    trainer.pack_ahead(items, 0)
    outcome = finite_step(trainer, items)
    assert outcome.masked == (items[0].item.rollout_id,) and outcome.figures is not None
