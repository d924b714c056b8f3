"""Divergences of distributions against loops over the vocabulary in float64, and the traps of top-k sets.

Random numbers of tokens: they depend on what is named, on all of it, and on nothing else.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from stillhouse.learner.objectives.distributions import PADDING, DistributionFn, jsd, log_tail, uniforms
from stillhouse.learner.objectives.options import Jsd, Mixed
from stillhouse.learner.objectives.registry import DISTRIBUTION_DIVERGENCES, find_member

V = 6


class Every(NamedTuple):
    """The options of all members: each reads its own."""

    weight: float
    beta: float


OPTIONS = Every(weight=0.3, beta=0.2)
NAMES = [name for name in DISTRIBUTION_DIVERGENCES.built_in if name != "multi_sample"]  # test_multi_sample


def _slow(name: str, p: list[float], q: list[float]) -> float:
    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * (math.log(x) - math.log(y)) for x, y in zip(a, b, strict=True) if x > 0)

    if name == "forward_kl":
        return kl(q, p)
    if name == "reverse_kl":
        return kl(p, q)
    if name == "mixed":
        return 0.3 * kl(q, p) + 0.7 * kl(p, q)
    m = [0.2 * y + 0.8 * x for x, y in zip(p, q, strict=True)]
    return 0.2 * kl(q, m) + 0.8 * kl(p, m)


def _logits(seed: int, n: int = 4) -> Tensor:
    return torch.randn((n, V), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def _member(name: str) -> DistributionFn:
    return find_member(DISTRIBUTION_DIVERGENCES, name)


@pytest.mark.parametrize("name", NAMES)
def test_value_equals_the_loop(name: str) -> None:
    student_CB, teacher_CB = _logits(0).log_softmax(1), _logits(1).log_softmax(1)
    got_C = _member(name)(student_CB, teacher_CB, OPTIONS).divergence_C
    expected = [_slow(name, student_CB[c].exp().tolist(), teacher_CB[c].exp().tolist()) for c in range(4)]
    np.testing.assert_allclose(got_C, expected, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_slope_gives_the_derivative_by_logits(name: str) -> None:
    """Against central differences of the loop: nothing of torch's is trusted."""
    logits_CB, teacher_CB = _logits(0, 1), _logits(1, 1).log_softmax(1)
    student_CB = logits_CB.log_softmax(1)
    slope_CB = _member(name)(student_CB, teacher_CB, OPTIONS).slope_CB
    got = (slope_CB - student_CB.exp() * slope_CB.sum())[0]
    q = teacher_CB[0].exp().tolist()
    for v in range(V):
        shift = torch.zeros(V, dtype=torch.float64)
        shift[v] = 1e-5
        up, down = ((logits_CB[0] + sign * shift).softmax(0).tolist() for sign in (1, -1))
        assert float(got[v]) == pytest.approx((_slow(name, up, q) - _slow(name, down, q)) / 2e-5, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing(name: str) -> None:
    student_CB, teacher_CB = _logits(0).log_softmax(1).float(), _logits(1).log_softmax(1).float()
    pad_C2 = torch.full((4, 2), PADDING)
    plain = _member(name)(student_CB, teacher_CB, OPTIONS)
    padded = _member(name)(torch.cat([student_CB, pad_C2], 1), torch.cat([teacher_CB, pad_C2], 1), OPTIONS)
    torch.testing.assert_close(padded.divergence_C, plain.divergence_C)
    torch.testing.assert_close(padded.slope_CB[:, :V], plain.slope_CB)
    assert not padded.slope_CB[:, V:].any()


def test_jsd_goes_over_into_both_kls_and_is_bounded() -> None:
    student_CB, teacher_CB = _logits(0).log_softmax(1), _logits(1).log_softmax(1)
    for beta, name in ((1e-6, "forward_kl"), (1 - 1e-6, "reverse_kl")):
        got_C = jsd(student_CB, teacher_CB, Jsd(beta=beta)).divergence_C / min(beta, 1 - beta)
        torch.testing.assert_close(
            got_C, _member(name)(student_CB, teacher_CB, OPTIONS).divergence_C, rtol=1e-4, atol=0
        )
    apart = torch.tensor([[0.0, -80.0]]), torch.tensor([[-80.0, 0.0]])
    assert float(jsd(*apart, Jsd()).divergence_C) == pytest.approx(math.log(2.0))


@pytest.mark.parametrize(
    ("options", "fields"),
    [(Mixed, {"weight": 1.1}), (Jsd, {"beta": 0.0}), (Jsd, {"beta": 1.0}), (Mixed, {"weight": math.nan})],
)
def test_senseless_options_are_refused(options: type[Mixed | Jsd], fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(ValueError, match=f"{name}: got .*, expected float >=? 0 and <=? 1"):
        options(**fields)


@pytest.mark.parametrize("mass", [1e-3, 0.4, 0.6, 1 - 1e-6])
def test_tail_is_log1p_of_minus_the_sum(mass: float) -> None:
    logprobs_1K = torch.tensor([[mass * 0.75, mass * 0.25]], dtype=torch.float64).log()
    assert float(log_tail(logprobs_1K)) == pytest.approx(math.log1p(-mass), rel=1e-9)


# ------------------------------------------------------------------------------------------------- the tail


AT = np.array([2, 3, 7], np.int64)


def test_a_token_has_the_same_numbers_in_a_part_of_its_rollout_as_in_the_whole() -> None:
    whole = uniforms(0, 5, "a", "math", AT, 4)
    assert whole.shape == (3, 4) and 0.0 <= whole.min() < whole.max() < 1.0
    np.testing.assert_array_equal(uniforms(0, 5, "a", "math", AT[:2], 4), whole[:2])
    np.testing.assert_array_equal(uniforms(0, 5, "a", "math", AT[2:], 4), whole[2:])


def test_seed_step_rollout_and_teacher_each_make_a_difference() -> None:
    of = [(0, 5, "a", "math"), (1, 5, "a", "math"), (0, 6, "a", "math"), (0, 5, "b", "math"), (0, 5, "a", "style")]
    drawn = [uniforms(*key, AT, 4) for key in of]
    assert len({value for one in drawn for value in one.flat}) == len(of) * 12
