"""Advantages combined from rewards and several teachers, and costs scaled by domain: against loops and enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.objectives.batch_terms import cost_scales, prefix_weights
from stillhouse.learner.objectives.divergences import Divergence, Divergences
from stillhouse.learner.objectives.sampled import k1, k3
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol.messages import Branch
from tests.learner.conftest import make_item, remade, tiny_student
from tests.learner.settings import learner_config
from tests.learner.step.gradients import assert_close, of_loss, step_gradients


def batch() -> list[TrainItem]:
    """Two domains, one with two teachers and log-probs five times as large; one rollout without teachers, one idle."""
    items = [
        remade(make_item("a", [0, 0, 1, 1, 1], teachers=("general", "math")), tag="sums"),
        remade(make_item("b", [0, 1, 1, 0, 1, 1], teachers=("general", "math")), tag="sums"),
        remade(make_item("c", [0, 1, 1], teachers=("general",)), tag="prose"),
        remade(make_item("d", [0, 0, 1, 1], teachers=("general",)), tag="prose"),
        remade(make_item("e", [0, 1, 1], teachers=()), tag="prose"),
        remade(make_item("f", [0, 0], teachers=("general",)), tag="idle"),
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
def test_scales_equal_a_loop_over_rollouts_and_tokens(fast: Any, slow: Any) -> None:
    items = batch()
    expected = slow_scales(items, slow)
    assert expected["sums"] != pytest.approx(expected["prose"], rel=0.1)
    got = cost_scales(items, Divergences(Divergence(fast)))
    assert got.tolist() == pytest.approx([expected.get(item.item.tag, 1.0) for item in items], rel=1e-6)


def test_a_rollout_with_branches_has_the_gradient_of_its_branches_as_one_sequence() -> None:
    """Against a loop: each token behind its own branch, and all of them with one rollout's share."""
    plain, other = make_item("a", [0, 0, 1, 1, 0, 1, 0, 1, 1]), make_item("b", [0, 1, 1])
    branched = remade(plain, branches=(Branch(4, 3), Branch(6, 0)))
    paths = {2: [0, 1], 3: [0, 1, 2], 5: [0, 1, 2, 4], 7: [6], 8: [6, 7]}
    config = learner_config(aggregation="sequence_mean", importance="none", max_grad_norm=0.0)
    got = step_gradients(Trainer(tiny_student(dtype=torch.float64), config, total_steps=10), [branched, other])
    model = tiny_student("eager", torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for train_item, before in ((branched, paths), (other, {1: [0], 2: [0, 1]})):
        for t, path in before.items():
            ids_L = torch.from_numpy(train_item.tokens_L).long()
            s = torch.log_softmax(model(input_ids=ids_L[path][None]).logits[0, -1], dim=-1)[ids_L[t]]
            total = total + (s.item() - float(train_item.teacher_ML[0, t])) * s / (2 * len(before))
    assert_close(got, of_loss(model, total))


@pytest.mark.parametrize(
    "fields", [{"divergence": "reverse_kl"}, {"tasks": TaskConfig(temperature=0.7)}], ids=["distributions", "T"]
)
def test_what_cannot_be_scaled_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"domain_scale|divergence"):
        learner_config(domain_scale="rms", **fields)


# -------------------------------------------------------------------------------------------------- prefix weights


def _iw_opd(mu: list[float], q: list[list[float]], gamma: float) -> list[float]:
    """The published formula, one rollout, in Python floats. q: one list per teacher."""
    distances = [abs(sum(mu[t] - of_one[t] for of_one in q)) for t in range(len(mu))]
    return [1.0 + gamma * (1.0 - sum(distances[:t]) / sum(distances)) for t in range(len(mu))]


@pytest.mark.parametrize("teachers", [("default",), ("math", "style")])
def test_prefix_weights_fall_from_1_plus_gain_with_the_distance_so_far(teachers: tuple[str, ...]) -> None:
    train_item = make_item("a", [0, 1, 1, 0, 1, 1, 1], teachers=teachers)
    at = np.flatnonzero(train_item.train_mask_L)
    mu, q = train_item.behaviour_L[at].tolist(), train_item.teacher_ML[:, at].tolist()
    got = prefix_weights(train_item, 0.5).tolist()
    assert got == pytest.approx(_iw_opd(mu, q, 0.5), rel=1e-12)
    assert got[0] == 1.5 and got == sorted(got, reverse=True) and got[-1] > 1.0


def test_prefix_weights_multiply_the_cost_of_each_token_in_a_step() -> None:
    """One token at a time: the gradient with the gain is the sum of plain gradients, each times its weight."""
    items = [make_item("a", [0, 1, 1, 1], seed=1), make_item("b", [0, 0, 1, 1, 0, 1], seed=2)]

    def gradients(of: list[TrainItem], **fields: Any) -> dict[str, torch.Tensor]:
        config = learner_config(max_grad_norm=0.0, warmup_steps=0, pack_tokens=5, **fields)
        return step_gradients(Trainer(tiny_student(dtype=torch.float64), config, total_steps=9), of)

    got = gradients(items, prefix_gain=0.7)
    expected = {name: torch.zeros_like(gradient) for name, gradient in got.items()}
    n_tokens = sum(one.n_trained for one in items)
    for one in items:
        at = np.flatnonzero(one.train_mask_L)
        weights = _iw_opd(one.behaviour_L[at].tolist(), one.teacher_ML[:, at].tolist(), 0.7)
        for place, weight in zip(at, weights, strict=True):
            alone = replace(one, train_mask_L=np.arange(len(one.train_mask_L)) == place)
            for name, gradient in gradients([alone]).items():
                expected[name] += weight * gradient / n_tokens
    assert_close(got, expected)
    plain = gradients(items)
    assert max(float((plain[name] - gradient).abs().max()) for name, gradient in got.items()) > 1e-3


# -------------------------------------------------------------------------------------------------- balanced teachers


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("coefs", [{}, {"math": 3.0}], ids=["even", "3 to 1"])
def test_balanced_teachers_have_the_same_total_weight_however_many_tokens_they_score(
    aggregation: str, coefs: dict[str, float]
) -> None:
    """The same gradient as with coefficients worked out by hand; packing and order change nothing."""
    items = [
        make_item("a", [0, 1, 1], teachers=("math",), seed=1),
        make_item("b", [0] + [1] * 9, teachers=("style",), seed=2),
        make_item("c", [0, 1, 1, 1], teachers=("math", "style"), seed=3),
        make_item("d", [0, 0], teachers=("idle",), seed=4),
        make_item("e", [0, 1, 1, 1], teachers=(), seed=5),
    ]
    routes = {"math": ("m",), "style": ("s",), "idle": ("i",)}

    def gradients(of: list[TrainItem], **fields: Any) -> dict[str, torch.Tensor]:
        plain: dict[str, Any] = {"max_grad_norm": 0.0, "warmup_steps": 0, "tasks": TaskConfig(routes=routes)}
        config = learner_config(**plain, aggregation=aggregation, **fields)
        return step_gradients(Trainer(tiny_student(dtype=torch.float64), config, total_steps=9), of)

    weight = {"math": 2 + 3, "style": 9 + 3} if aggregation == "token_mean" else {"math": 2, "style": 2}
    factor = {name: sum(weight.values()) / 2 / one for name, one in weight.items()}
    assert sum(factor[name] * weight[name] for name in weight) == sum(weight.values())
    by_hand = {name: factor[name] * coefs.get(name, 0.5) for name in factor}
    expected = gradients(items, teacher_coefs=by_hand)
    balanced: dict[str, Any] = {"teacher_balance": "tokens", "coef": 0.5, "teacher_coefs": coefs}
    for got in (gradients(items, **balanced), gradients(items[::-1], pack_tokens=4, **balanced)):
        assert_close(got, expected)
    if aggregation == "token_mean":
        unbalanced = gradients(items, coef=0.5, teacher_coefs=coefs)
        assert max(float((unbalanced[n] - expected[n]).abs().max()) for n in expected) > 1e-3
