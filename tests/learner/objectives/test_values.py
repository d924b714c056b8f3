"""Generalised advantage estimation against a loop over tokens, and against its two known limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.objectives.values import ValueHead, gae, value_loss, whitened


def _slow(reward: list[float], value: list[float], discount: float, decay: float) -> list[float]:
    """One rollout: sum over l of (discount * decay)^l * delta_{t+l}."""
    n = len(reward)
    delta = [reward[t] + discount * (value[t + 1] if t + 1 < n else 0.0) - value[t] for t in range(n)]
    return [sum((discount * decay) ** k * delta[t + k] for k in range(n - t)) for t in range(n)]


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (1.0, 0.0)])
def test_equal_to_the_sum_over_later_tokens(discount: float, decay: float) -> None:
    random = np.random.default_rng(0)
    sequence_N = torch.tensor([0, 0, 0, 2, 2, 3, 0, 2, 3, 3])  # rollout 1 has no token; others are interleaved
    reward_N, value_N = torch.tensor(random.normal(size=(2, 10)))
    advantage_N, return_N = gae(reward_N, value_N, sequence_N, 4, discount=discount, decay=decay)
    for r in (0, 2, 3):
        own = (sequence_N == r).nonzero().flatten()
        slow = _slow(reward_N[own].tolist(), value_N[own].tolist(), discount, decay)
        np.testing.assert_allclose(advantage_N[own], slow, rtol=1e-12)
    torch.testing.assert_close(return_N, advantage_N + value_N)


def test_without_a_value_function_every_token_answers_for_the_reward_at_the_end() -> None:
    reward_N = torch.tensor([0.0, 0.0, 1.0, 0.0, -2.0])
    advantage_N, _ = gae(reward_N, torch.zeros(5), torch.tensor([0, 0, 0, 1, 1]), 2, decay=1.0)
    assert advantage_N.tolist() == [1.0, 1.0, 1.0, -2.0, -2.0]


def test_no_token_at_all() -> None:
    advantage_N, return_N = gae(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64), 3)
    assert advantage_N.shape == return_N.shape == (0,)


def test_value_head_starts_at_zero_and_leaves_the_model_alone_unless_told() -> None:
    for through in (False, True):
        hidden_NH = torch.randn((4, 6), requires_grad=True)
        head = ValueHead(6, through_backbone=through)
        assert head(hidden_NH).tolist() == [0.0] * 4
        torch.nn.init.ones_(head.linear.weight)
        head(hidden_NH).sum().backward()
        assert (hidden_NH.grad is not None) == through and head.linear.weight.grad is not None


def test_value_loss_is_the_larger_of_the_plain_and_the_clipped_error() -> None:
    value_N, old_N, return_N = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 4.0])
    assert value_loss(value_N, old_N, return_N).tolist() == [0.0, 0.5]
    assert value_loss(value_N, old_N, return_N, clip=0.5).tolist() == [0.5 * 0.25, 0.5 * 3.5**2]


def test_whitened_has_mean_zero_and_spread_one() -> None:
    white_N = whitened(torch.tensor([1.0, 5.0, -3.0, 100.0], dtype=torch.float64))
    assert float(white_N.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(white_N.std(correction=0)) == pytest.approx(1.0, rel=1e-6)
