"""The baseline of a cost of sampled tokens, by enumeration of a vocabulary in float64: every token that could have been
sampled, with its probability. Nothing is drawn. The gradient of each token is that of `token_loss`; the baseline is
summed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stillhouse.learner.objectives.distributions import mean_cost
from stillhouse.learner.objectives.losses import make_objective, token_loss
from stillhouse.learner.objectives.sampled import k1, k3
from tests.learner.objectives.test_losses import token_inputs
from tests.learner.settings import objective_config

V = 6


def _logprobs(seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(V, generator=generator, dtype=torch.float64).log_softmax(0).tolist()


def _mean_gradient(s_V: list[float], mu_V: list[float], q_V: list[float], importance: Any, baseline: float) -> Tensor:
    """Expected gradient by the student's logits, [V]."""
    objective = make_objective(objective_config(importance=importance), max_new_tokens=1)
    mean_V = torch.zeros(V, dtype=torch.float64)
    for v in range(V):
        logits_V = torch.tensor(s_V, dtype=torch.float64).requires_grad_()
        mu, q = torch.tensor([mu_V[v]], dtype=torch.float64), torch.tensor([[q_V[v]]], dtype=torch.float64)
        baseline_MN = torch.tensor([[baseline]], dtype=torch.float64)
        inputs = token_inputs(mu, q, torch.ones((1, 1), dtype=torch.bool), baseline_MN=baseline_MN)
        token_loss(logits_V.log_softmax(0)[v : v + 1], inputs, objective, 1).loss.backward()
        assert logits_V.grad is not None
        mean_V += math.exp(mu_V[v]) * logits_V.grad
    return mean_V


def _kl(s_V: list[float], q_V: list[float]) -> float:
    return sum(math.exp(s) * (s - q) for s, q in zip(s_V, q_V, strict=True))


def _pooled_kl(s_V: list[float], q_V: list[float], k: int) -> float:
    """From the teacher's k likeliest tokens and one bucket for the others."""
    top = sorted(range(V), key=lambda v: -q_V[v])[:k]
    inside = sum(math.exp(s_V[v]) * (s_V[v] - q_V[v]) for v in top)
    p, q = (sum(math.exp(side[v]) for v in range(V) if v not in top) for side in (s_V, q_V))
    return inside + p * (math.log(p) - math.log(q))


@pytest.mark.parametrize("importance", ["none", ("truncated", {"cap": 1e9})], ids=["none", "truncated"])
@pytest.mark.parametrize("k", [V, 2])
@pytest.mark.parametrize("seed", range(4))
def test_the_expected_gradient_is_unchanged(importance: Any, k: int, seed: int) -> None:
    """`none` where the student itself sampled; `truncated` below its cap where an older student did. A pooled tail
    changes the baseline, and still not the expectation."""
    s_V, q_V = _logprobs(seed), _logprobs(100 + seed)
    mu_V = s_V if importance == "none" else _logprobs(200 + seed)
    baseline = _kl(s_V, q_V) if k == V else _pooled_kl(s_V, q_V, k)
    assert baseline > 0.1
    without_V, having_V = (_mean_gradient(s_V, mu_V, q_V, importance, b) for b in (0.0, baseline))
    torch.testing.assert_close(having_V, without_V, atol=1e-14, rtol=1e-12)
    p, kl = [math.exp(s) for s in s_V], _kl(s_V, q_V)
    expected_V = [p[v] * (s_V[v] - q_V[v] - kl) for v in range(V)]
    torch.testing.assert_close(having_V, torch.tensor(expected_V, dtype=torch.float64), atol=1e-14, rtol=1e-12)


def test_the_mean_cost_is_the_sum_over_the_vocabulary() -> None:
    s, q = (torch.tensor([_logprobs(seed) for seed in range(first, first + 3)]) for first in (0, 50))
    got = mean_cost(s, q, k1)
    assert got.tolist() == pytest.approx([_kl(a, b) for a, b in zip(s.tolist(), q.tolist(), strict=True)], rel=1e-5)
    assert float(mean_cost(s, q, k3).abs().max()) < 1e-6  # 1 - sum of q: k3 has no use for a baseline
