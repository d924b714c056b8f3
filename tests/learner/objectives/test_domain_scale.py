"""The costs of each domain at one size: a slow second implementation, and independence of packing and coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from learner.batch.packing import TrainItem
from learner.objectives.domain_scale import cost_scales
from learner.objectives.sampled import k1, k3
from learner.prompts.config import TaskConfig
from learner.step.train_step import Trainer
from tests.learner.settings import learner_config
from tests.learner.step.gradients import step_gradients

Make = Callable[..., TrainItem]
Student = Callable[..., PreTrainedModel]
ROUTES = {"general": (), "math": ("sums",)}
COEFS = {"general": 0.7, "math": 0.4}


def tagged(train_item: TrainItem, tag: str) -> TrainItem:
    return replace(train_item, item=msgspec.structs.replace(train_item.item, tag=tag))


def batch(make_item: Make) -> list[TrainItem]:
    """Two domains, one with two teachers and log-probs five times as large; one rollout without teachers, one idle."""
    items = [
        tagged(make_item("a", [0, 0, 1, 1, 1], teachers=("general", "math")), "sums"),
        tagged(make_item("b", [0, 1, 1, 0, 1, 1], teachers=("general", "math")), "sums"),
        tagged(make_item("c", [0, 1, 1], teachers=("general",)), "prose"),
        tagged(make_item("d", [0, 0, 1, 1], teachers=("general",)), "prose"),
        tagged(make_item("e", [0, 1, 1], teachers=()), "prose"),
        tagged(make_item("f", [0, 0], teachers=("general",)), "idle"),
    ]
    for train_item in items[:2]:
        train_item.teacher_ML[:] *= 5.0
    return items


def slow_k1(mu: float, q: float) -> float:
    return mu - q


def slow_k3(mu: float, q: float) -> float:
    return 1 - math.exp(q - mu)


def slow_scales(items: list[TrainItem], cost: Callable[[float, float], float]) -> dict[str, float]:
    costs: dict[str, list[float]] = {}
    for train_item in items:
        for t, trained in enumerate(train_item.train_mask_L):
            if trained and train_item.item.teachers:
                mu, scores = float(train_item.behaviour_L[t]), train_item.teacher_ML[:, t]
                costs.setdefault(train_item.item.tag, []).append(sum(cost(mu, float(q)) for q in scores))
    return {tag: math.sqrt(sum(c * c for c in of) / len(of)) for tag, of in costs.items()}


@pytest.mark.parametrize(("fast", "slow"), [(k1, slow_k1), (k3, slow_k3)], ids=["k1", "k3"])
def test_scales_equal_a_loop_over_rollouts_and_tokens(make_item: Make, fast: Any, slow: Any) -> None:
    items = batch(make_item)
    expected = slow_scales(items, slow)
    assert expected["sums"] != pytest.approx(expected["prose"], rel=0.1)
    got = cost_scales(items, fast)
    assert got.tolist() == pytest.approx([expected.get(item.item.tag, 1.0) for item in items], rel=1e-6)


def test_the_gradient_is_that_of_costs_divided_by_their_domains_scale(tiny_student: Student, make_item: Make) -> None:
    items = batch(make_item)
    config = learner_config(
        tasks=TaskConfig(routes=ROUTES), domain_scale="rms", teacher_coefs=COEFS, importance="none", max_grad_norm=0.0
    )
    got = step_gradients(Trainer(tiny_student(dtype=torch.float64), config, total_steps=10), items)
    scales = slow_scales(items, slow_k1)
    model, n_tokens = tiny_student("eager", torch.float64), sum(item.n_trained for item in items)
    total = torch.zeros((), dtype=torch.float64)
    for train_item in items:
        ids_L = torch.from_numpy(train_item.tokens_L).long()
        logprobs_LV = torch.log_softmax(model(input_ids=ids_L[None]).logits[0], dim=-1)
        for t, trained in enumerate(train_item.train_mask_L):
            if not trained:
                continue
            s = logprobs_LV[t - 1, ids_L[t]]
            for name, q in zip(train_item.item.teachers, train_item.teacher_ML[:, t], strict=True):
                total = total - COEFS[name] * (s.item() - float(q)) / scales[train_item.item.tag] * s
    (-total / n_tokens).backward()  # pyright: ignore[reportUnknownMemberType]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("pack_tokens", [1, 7, 100])
def test_packing_and_order_do_not_change_the_gradient(tiny_student: Student, make_item: Make, pack_tokens: int) -> None:
    def gradients(items: list[TrainItem], pack_tokens: int) -> dict[str, torch.Tensor]:
        config = learner_config(tasks=TaskConfig(routes=ROUTES), domain_scale="rms", pack_tokens=pack_tokens)
        return step_gradients(Trainer(tiny_student(dtype=torch.float64), config, total_steps=10), items)

    whole, parts = gradients(batch(make_item), 4096), gradients(batch(make_item)[::-1], pack_tokens)
    assert any(bool(gradient.any()) for gradient in whole.values())
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    "fields", [{"divergence": "reverse_kl"}, {"tasks": TaskConfig(temperature=0.7)}], ids=["distributions", "T"]
)
def test_what_cannot_be_scaled_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"domain_scale|divergence"):
        learner_config(domain_scale="rms", **fields)
