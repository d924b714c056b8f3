"""The baseline of the costs of sampled tokens through a whole optimizer step, from payloads as they come off the wire:
against a plain model, and sums over the vocabulary token by token, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.options import Capped, Clip
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.step.train_step import Trainer
from tests.learner.settings import learner_config
from tests.learner.step import test_hidden_step as hidden
from tests.learner.step.gradients import step_gradients
from tests.learner.step.test_top_k_step import PLAIN, ROUTES, VOCAB, items_with_sets, teacher_logprobs, with_sets

Make = Callable[..., TrainItem]
Student = Callable[..., PreTrainedModel]
BASELINE = ("k1", {"baseline": "expected_cost"})


def _config(**fields: Any) -> LearnerConfig:
    return learner_config(tasks=TaskConfig(routes=ROUTES), **{**PLAIN, "divergence": BASELINE, **fields})


def _trainer(model: PreTrainedModel, config: LearnerConfig) -> Trainer:
    return Trainer(model, config, total_steps=10, vocab_tokens=VOCAB, head_of=hidden.head_of)


def _transformed(cost: float, config: LearnerConfig) -> float:
    transform = config.objective.cost_transform
    return max(-transform.limit, min(transform.limit, cost)) if isinstance(transform, Clip) else cost


def _mean_cost(p_V: Tensor, q_V: Tensor, k: int, config: LearnerConfig) -> float:
    top = set(torch.argsort(-q_V)[:k].tolist())
    pairs = [(float(p_V[v]), float(q_V[v])) for v in range(VOCAB) if v in top]
    if k < VOCAB:
        pairs.append((1.0 - sum(p for p, _ in pairs), 1.0 - sum(q for _, q in pairs)))
    return sum(p * _transformed(math.log(p / q), config) for p, q in pairs)


def _slow(
    model: PreTrainedModel,
    items: Sequence[TrainItem],
    config: LearnerConfig,
    k: int,
    logprobs_of: Callable[[TrainItem, str], Tensor],
) -> dict[str, Tensor]:
    """Item by item, token by token, teacher by teacher; weights truncated, of tokens or of whole rollouts."""
    objective, n_tokens = config.objective, sum(t.n_trained for t in items)
    assert isinstance(objective.importance, Capped)
    loss = torch.zeros((), dtype=torch.float64)
    for train_item in items:
        trained = np.flatnonzero(train_item.train_mask_L).tolist()
        ids_L = torch.from_numpy(train_item.tokens_L).long()
        logits_LV = model(input_ids=ids_L[None]).logits[0]
        every_LV, tokens_LV = torch.log_softmax(logits_LV, dim=-1), torch.softmax(logits_LV[:, :VOCAB], dim=-1)
        log_ratios = {t: every_LV[t - 1, ids_L[t]].item() - float(train_item.behaviour_L[t]) for t in trained}
        for t in trained:
            s, advantage = every_LV[t - 1, ids_L[t]], 0.0
            for m, name in enumerate(train_item.item.teachers):
                cost = _transformed(s.item() - float(train_item.teacher_ML[m, t]), config)
                mean = _mean_cost(tokens_LV[t - 1].detach(), logprobs_of(train_item, name)[t].exp(), k, config)
                advantage -= objective.teacher_coefs.get(name, objective.coef) * (cost - mean)
            whole = objective.importance.name == "sequence"
            log_ratio = sum(log_ratios.values()) if whole else log_ratios[t]
            loss = loss - min(math.exp(log_ratio), objective.importance.cap) * advantage * s / n_tokens
    loss.backward()  # pyright: ignore[reportUnknownMemberType]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _compare(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=3e-4 * scale, rtol=3e-3, msg=name)


def _of_sets(train_item: TrainItem, name: str) -> Tensor:
    return torch.from_numpy(teacher_logprobs(train_item, name))


@pytest.mark.parametrize("importance", ["truncated", "sequence"])
@pytest.mark.parametrize("k", [VOCAB, 6])
def test_gradient_equals_the_slow_reference(tiny_student: Student, make_item: Make, importance: str, k: int) -> None:
    """Payloads of 16 bits: what is left is their rounding."""
    items = items_with_sets(make_item, k=k)
    config = _config(
        importance=importance, coef=0.3, teacher_coefs={"math": 2.0}, pack_tokens=16, logprob_chunk_tokens=5
    )
    got = step_gradients(_trainer(tiny_student(dtype=torch.float64), config), items)
    _compare(got, _slow(tiny_student("eager", torch.float64), items, config, k, _of_sets))
    without = _config(**{"divergence": "k1"}, importance=importance, coef=0.3, teacher_coefs={"math": 2.0})
    plain = step_gradients(_trainer(tiny_student(dtype=torch.float64), without), items)
    scale = max(float(gradient.abs().max()) for gradient in plain.values())
    assert max(float((got[name] - gradient).abs().max()) for name, gradient in plain.items()) > 0.1 * scale


def test_with_a_transform_the_baseline_is_the_mean_of_the_transformed_cost(
    tiny_student: Student, make_item: Make
) -> None:
    items, config = items_with_sets(make_item), _config(cost_transform=("clip", {"limit": 0.8}))
    got = step_gradients(_trainer(tiny_student(dtype=torch.float64), config), items)
    _compare(got, _slow(tiny_student("eager", torch.float64), items, config, VOCAB, _of_sets))


@pytest.mark.parametrize("importance", ["truncated", "sequence"])
def test_hidden_states_give_the_mean_over_the_whole_vocabulary(
    tiny_student: Student, make_item: Make, importance: str
) -> None:
    items = hidden.items_with_states(make_item)
    config = _config(importance=importance, pack_tokens=16, logprob_chunk_tokens=5)
    got = step_gradients(_trainer(tiny_student(dtype=torch.float64), config), items)
    _compare(got, _slow(tiny_student("eager", torch.float64), items, config, VOCAB, hidden.dense_q))
    metrics = _trainer(tiny_student(dtype=torch.float64), config).step(items)
    assert metrics.hidden_error is not None and metrics.hidden_error < 1e-5


def test_the_metrics_have_the_cost_without_the_baseline(tiny_student: Student, make_item: Make) -> None:
    """The mean of cost minus baseline would be near 0 whatever the student does."""
    items = [with_sets(make_item("a", [0, 1, 1, 1, 1], vocab=VOCAB))]
    metrics = _trainer(tiny_student(), _config()).step(items)
    assert metrics.divergence == pytest.approx(metrics.reverse_kl)
    assert metrics.advantage_mean != pytest.approx(-(metrics.reverse_kl or 0.0), abs=1e-3)
