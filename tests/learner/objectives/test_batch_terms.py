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
from stillhouse.learner.objectives.advantages import whitened
from stillhouse.learner.objectives.batch_terms import cost_scales, prefix_weights
from stillhouse.learner.objectives.divergences import Divergence, Divergences
from stillhouse.learner.objectives.losses import (
    AggregationFn,
    AggregationOptions,
    TokenInputs,
    constant,
    make_objective,
    sequence_mean,
    token_loss,
    token_mean,
    total_cost,
)
from stillhouse.learner.objectives.sampled import k1, k3
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol.messages import Branch
from tests.learner.conftest import make_item, remade, tiny_student
from tests.learner.settings import learner_config, objective_config
from tests.learner.step.gradients import assert_close, of_loss, step_gradients

OPTIONS = AggregationOptions(max_new_tokens=9)


def test_token_without_a_teacher_has_the_reward_alone_and_in_pure_mode_nothing() -> None:
    cost_MN, routed_MN = torch.full((2, 2), math.nan), torch.zeros((2, 2)).bool()
    assert total_cost(cost_MN, routed_MN, torch.ones(2)).tolist() == [0.0, 0.0]
    no_teachers = torch.zeros((0, 2))
    assert total_cost(no_teachers, no_teachers.bool(), torch.zeros(0)).tolist() == [0.0, 0.0]


def test_coefficient_keeps_its_meaning_whatever_the_spread_of_the_rewards() -> None:
    """Whitening behind the subtraction would divide the divergence by the spread of the rewards, too."""
    random = np.random.default_rng(0)
    cost_N = torch.tensor(random.normal(0.5, 1.0, 200))
    raw_N = torch.tensor(random.normal(size=200))
    routed_MN, coef_M = torch.ones((1, 200)).bool(), torch.tensor([0.3], dtype=torch.float64)

    def share_of_the_divergence(scale: float) -> float:
        """d(advantage) / d(cost): what one more nat of cost takes away."""
        cost_MN = cost_N[None].clone().requires_grad_()
        reward_N = whitened(raw_N * scale)
        (reward_N - total_cost(cost_MN, routed_MN, coef_M))[0].backward()
        assert cost_MN.grad is not None
        return float(cost_MN.grad[0, 0])

    assert share_of_the_divergence(1.0) == share_of_the_divergence(1000.0) == -0.3
    one_more_N = cost_N.clone()
    one_more_N[0] += 1.0
    behind = [
        float((whitened(raw_N * scale - 0.3 * one_more_N) - whitened(raw_N * scale - 0.3 * cost_N))[0])
        for scale in (1.0, 1000.0)
    ]
    assert -0.4 < behind[0] < -0.2 and -0.001 < behind[1] < 0.0


def test_the_constant_divisor_knows_rollouts_and_their_limit_only() -> None:
    for tokens_R in (torch.tensor([2, 0, 6]), torch.tensor([9, 0, 1])):
        shares = constant(tokens_R, OPTIONS)
        assert (shares.share_R.tolist(), shares.divisor) == ([1.0, 1.0, 1.0], 2 * 9)


@pytest.mark.parametrize("aggregation", [token_mean, sequence_mean, constant])
@pytest.mark.parametrize("kl_student", ["current", "behaviour"])
def test_mixed_loss_and_gradient_equal_a_loop_over_rollouts_and_tokens(
    aggregation: AggregationFn, kl_student: Any
) -> None:
    """Two teachers, rewards, k3, PPO's clip, all aggregations: one sum after the other in Python floats."""
    config = objective_config(
        divergence=("k3", {"kl_student": kl_student}), importance=("ppo", {"low": 0.8, "high": 1.28})
    )
    random = np.random.default_rng(3)
    lengths = [4, 1, 7]
    sequence_N = torch.tensor([r for r, n in enumerate(lengths) for _ in range(n)])
    n = len(sequence_N)
    student_N, behaviour_N = (torch.tensor(-random.exponential(size=n)) for _ in range(2))
    behaviour_N = student_N + 0.3 * (behaviour_N - student_N)
    teacher_MN, routed_MN = torch.tensor(-random.exponential(size=(2, n))), torch.tensor(random.random((2, n)) < 0.6)
    reward_R, coefs = random.normal(size=3), [0.4, 1.5]
    tokens_R = torch.tensor(lengths)
    shares = aggregation(tokens_R, OPTIONS)
    student_N.requires_grad_()
    inputs = TokenInputs(
        behaviour_N,
        teacher_MN,
        routed_MN,
        teachers=("math", "style"),
        coef_M=torch.tensor(coefs, dtype=torch.float64),
        reward_advantage_N=torch.tensor(reward_R)[sequence_N],
        share_N=shares.share_R[sequence_N],
        sequence_N=sequence_N,
        n_sequences=3,
    )
    terms = token_loss(student_N, inputs, make_objective(config, max_new_tokens=9), shares.divisor)
    terms.loss.backward()
    losses, gradient = [], []
    for t in range(n):
        s, mu = float(student_N.detach()[t]), float(behaviour_N[t])
        advantage = float(reward_R[sequence_N[t]])
        for m in range(2):
            if routed_MN[m, t]:
                compared = s if kl_student == "current" else mu
                advantage -= coefs[m] * (1 - math.exp(float(teacher_MN[m, t]) - compared))
        r = math.exp(s - mu)
        weight = 0.0 if (advantage > 0 and r > 1.28) or (advantage < 0 and r < 0.8) else r
        expected: dict[AggregationFn, float] = {
            token_mean: 1 / n,
            sequence_mean: 1 / lengths[int(sequence_N[t])] / len(lengths),
            constant: 1 / (len(lengths) * OPTIONS.max_new_tokens),
        }
        share = expected[aggregation]
        losses.append(-weight * advantage * s * share)
        gradient.append(-weight * advantage * share)
    assert terms.loss.item() == pytest.approx(sum(losses), rel=1e-6)
    assert student_N.grad is not None
    np.testing.assert_allclose(student_N.grad.numpy(), gradient, rtol=1e-6)
    assert 0.0 in gradient


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
