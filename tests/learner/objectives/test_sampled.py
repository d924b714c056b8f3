"""Costs of sampled tokens: the expectation of cost * grad s, summed over the whole vocabulary in float64, against the
analytic gradient of the divergence that the docstring names. Nothing is drawn, so nothing is left to chance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stillhouse.learner.objectives.losses import make_objective
from stillhouse.learner.objectives.registry import COST_TRANSFORMS, DIVERGENCES, find_member
from stillhouse.learner.objectives.sampled import CostFn, k2, k3, seq_kd
from tests.learner.settings import objective_config

V = 5
NAMED_GRADIENT = {"k1": "reverse", "k2": "reverse", "k3": "forward"}


def _logits(seed: int) -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5


def _analytic(student_V: Tensor, teacher_V: Tensor, name: str) -> Tensor:
    """By hand, in Python floats: d/dz_j of KL(p || q) = p_j (log p_j - log q_j - KL), of KL(q || p) = p_j - q_j."""
    p = [math.exp(float(z)) for z in student_V.log_softmax(0)]
    q = [math.exp(float(z)) for z in teacher_V.log_softmax(0)]
    if name == "forward":
        return torch.tensor([p[j] - q[j] for j in range(V)], dtype=torch.float64)
    kl = sum(p[v] * math.log(p[v] / q[v]) for v in range(V))
    return torch.tensor([p[j] * (math.log(p[j] / q[j]) - kl) for j in range(V)], dtype=torch.float64)


def _expected_gradient(cost: CostFn, student_V: Tensor, teacher_V: Tensor) -> Tensor:
    """sum over the vocabulary of p_v * cost_v * grad log p_v."""
    logits_V = student_V.clone().requires_grad_()
    s_V, q_V = logits_V.log_softmax(0), teacher_V.log_softmax(0)
    ((s_V.exp() * cost(s_V, q_V)).detach() * s_V).sum().backward()
    assert logits_V.grad is not None
    return logits_V.grad


def test_every_cost_but_cross_entropy_is_proved_here() -> None:
    assert {*NAMED_GRADIENT, "seq_kd", "null"} == DIVERGENCES.built_in.keys()


@pytest.mark.parametrize("name", NAMED_GRADIENT)
@pytest.mark.parametrize("seed", range(4))
def test_expected_gradient_is_that_of_the_named_divergence(name: str, seed: int) -> None:
    student_V, teacher_V = _logits(seed), _logits(100 + seed)
    got = _expected_gradient(find_member(DIVERGENCES, name), student_V, teacher_V)
    torch.testing.assert_close(got, _analytic(student_V, teacher_V, NAMED_GRADIENT[name]), atol=1e-14, rtol=1e-12)
    other = {"reverse": "forward", "forward": "reverse"}[NAMED_GRADIENT[name]]
    assert float((got - _analytic(student_V, teacher_V, other)).abs().max()) > 0.01


def _k2_loss(s: Tensor, q: Tensor) -> Tensor:
    return 0.5 * (s - q) ** 2


def _k3_loss(s: Tensor, q: Tensor) -> Tensor:
    return torch.exp(q - s) - 1 - (q - s)


@pytest.mark.parametrize(("cost", "loss"), [(k2, _k2_loss), (k3, _k3_loss)], ids=["k2", "k3"])
def test_cost_is_the_derivative_of_the_estimator_as_a_loss(cost: CostFn, loss: CostFn) -> None:
    s_N = (-torch.rand(20, dtype=torch.float64) * 4).requires_grad_()
    q_N = -torch.rand(20, dtype=torch.float64) * 4
    (slope_N,) = torch.autograd.grad(loss(s_N, q_N).sum(), s_N)
    torch.testing.assert_close(cost(s_N.detach(), q_N), slope_N)


@pytest.mark.parametrize("seed", range(4))
def test_cross_entropy_on_the_teachers_tokens_has_the_gradient_of_the_forward_kl(seed: int) -> None:
    """Over the student's own tokens it has none at all, which is why the launcher refuses it there."""
    student_V, teacher_V = _logits(seed), _logits(100 + seed)
    logits_V = student_V.clone().requires_grad_()
    s_V, q_V = logits_V.log_softmax(0), teacher_V.log_softmax(0)
    (q_V.exp() * seq_kd(s_V.detach(), q_V) * s_V).sum().backward()
    assert logits_V.grad is not None
    torch.testing.assert_close(logits_V.grad, _analytic(student_V, teacher_V, "forward"), atol=1e-14, rtol=1e-12)
    assert float(_expected_gradient(seq_kd, student_V, teacher_V).abs().max()) < 1e-15


def test_k3_stays_exact_where_student_and_teacher_nearly_agree() -> None:
    assert float(k3(torch.tensor(-1.0), torch.tensor(-1.0 + 1e-6))) == pytest.approx(-1e-6, rel=0.1)


@pytest.mark.parametrize("threshold", [0.5, 1.5, 30.0])
def test_the_null_teacher_lowers_the_probability_of_unlikely_tokens_whatever_a_teacher_says(threshold: float) -> None:
    """The expected gradient is that of cost * P(s < -threshold), the set of tokens held."""
    config = objective_config(divergence=("null", {"threshold": threshold, "cost": 0.25}))
    cost, student_V = make_objective(config, max_new_tokens=1).divergences.common.cost, _logits(0)
    got_V = _expected_gradient(cost, student_V, _logits(1))
    s_V = student_V.log_softmax(0).tolist()
    p, unlikely = [math.exp(s) for s in s_V], [s < -threshold for s in s_V]
    mass = sum(x for x, is_one in zip(p, unlikely, strict=True) if is_one)
    assert any(unlikely) == (threshold < 30.0)
    expected = [0.25 * p[j] * (unlikely[j] - mass) for j in range(V)]
    torch.testing.assert_close(got_V, torch.tensor(expected, dtype=torch.float64), atol=1e-15, rtol=1e-12)
    for teacher in (torch.zeros(3, V), torch.full((3, V), -math.inf)):
        costs = cost(torch.tensor(s_V), teacher)
        assert costs.tolist() == [[0.25 if is_one else 0.0 for is_one in unlikely]] * 3


# ------------------------------------------------------------------------------------------------------- transforms

TRANSFORMS = {"none": "none", "clip": ("clip", {"limit": 0.7}), "log": "log"}


def _by_hand(name: str, cost: float) -> float:
    if name == "clip":
        return 0.7 if cost > 0.7 else -0.7 if cost < -0.7 else cost
    if name == "log":
        return math.log(1 + cost) if cost >= 0 else -math.log(1 - cost)
    return cost


def test_every_transform_is_tested_here() -> None:
    assert TRANSFORMS.keys() == COST_TRANSFORMS.built_in.keys()


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("divergence", ["k1", "k3"])
def test_the_expected_gradient_is_that_of_the_transformed_cost(name: str, divergence: str) -> None:
    """d/dz_j of sum p_v f(cost_v) log p_v, costs held: p_j (f_j - sum p f), in Python floats."""
    config = objective_config(divergence=divergence, cost_transform=TRANSFORMS[name])
    student_V, teacher_V = _logits(0), _logits(1)
    got_V = _expected_gradient(make_objective(config, max_new_tokens=1).divergences.common.cost, student_V, teacher_V)
    s_V, q_V = student_V.log_softmax(0).tolist(), teacher_V.log_softmax(0).tolist()
    costs = [s - q if divergence == "k1" else 1.0 - math.exp(q - s) for s, q in zip(s_V, q_V, strict=True)]
    assert max(map(abs, costs)) > 0.7 > min(map(abs, costs))  # some beyond the limit, some below it
    assert divergence == "k3" or max(costs) > 0.7 > -0.7 > min(costs)
    p, f = [math.exp(s) for s in s_V], [_by_hand(name, cost) for cost in costs]
    mean = sum(a * b for a, b in zip(p, f, strict=True))
    expected = [p[j] * (f[j] - mean) for j in range(V)]
    torch.testing.assert_close(got_V, torch.tensor(expected, dtype=torch.float64), atol=1e-14, rtol=1e-12)


def test_only_costs_of_sampled_tokens_are_transformed() -> None:
    with pytest.raises(
        ValueError, match="cost_transform = 'clip' with divergence = 'jsd': only costs of sampled tokens"
    ):
        objective_config(divergence="jsd", cost_transform="clip")
