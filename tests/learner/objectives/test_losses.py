"""The default objective against a loop over tokens, and its gradient against exact enumeration of a tiny vocabulary."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from stillhouse.learner.objectives.config import ObjectiveConfig
from stillhouse.learner.objectives.losses import TokenInputs, make_objective, token_loss
from stillhouse.learner.objectives.options import Capped, RatioBounds, SampledDivergence
from tests.learner.settings import objective_config

V = 4
"""Vocabulary of the enumerated policy: sequences of two tokens, one table of logits per context (start, or the first
token), so V + 1 rows."""


def token_inputs(
    behaviour_N: Tensor, teacher_MN: Tensor, routed_MN: Tensor, coef: float = 1.0, **more: Any
) -> TokenInputs:
    """One rollout without a reward, token mean. `more`: other fields."""
    fields: dict[str, Any] = {
        "teachers": tuple(f"pool {m}" for m in range(len(teacher_MN))),
        "coef_M": torch.full((len(teacher_MN),), coef, dtype=torch.float64),
        "reward_advantage_N": torch.zeros_like(behaviour_N),
        "share_N": torch.ones_like(behaviour_N),
        "sequence_N": torch.zeros(len(behaviour_N), dtype=torch.int64),
        "n_sequences": 1,
    }
    return TokenInputs(behaviour_N, teacher_MN, routed_MN, **(fields | more))


def _random_inputs(n: int = 9, *, m: int = 2, coef: float = 1.0) -> tuple[Tensor, TokenInputs]:
    source = torch.Generator().manual_seed(3)
    student_N = -torch.rand(n, generator=source, dtype=torch.float64) * 3
    behaviour_N = -torch.rand(n, generator=source, dtype=torch.float64) * 3
    teacher_MN = -torch.rand((m, n), generator=source, dtype=torch.float64) * 3
    routed_MN = torch.rand((m, n), generator=source) < 0.6
    routed_MN[:, 0] = False
    return student_N.requires_grad_(), token_inputs(behaviour_N, teacher_MN, routed_MN, coef)


def _slow(student: Any, inputs: TokenInputs, config: ObjectiveConfig, n_global: int) -> tuple[float, list[float]]:
    """Loss and its derivative by each student log-prob, in Python floats."""
    loss, gradient = 0.0, []
    for t in range(len(student)):
        s, mu = float(student[t]), float(inputs.behaviour_N[t])
        advantage = 0.0
        for m in range(inputs.teacher_MN.shape[0]):
            if inputs.routed_MN[m, t]:
                compared = s if cast(SampledDivergence, config.divergence).kl_student == "current" else mu
                advantage -= config.coef * (compared - float(inputs.teacher_MN[m, t]))
        r = math.exp(s - mu)
        match config.importance:
            case Capped(cap=cap):
                w = min(r, cap)
            case RatioBounds(low=low, high=high):
                w = max(low, min(r, high))
            case _:
                w = 1.0
        loss -= w * advantage * s / n_global
        gradient.append(-w * advantage / n_global)
    return loss, gradient


@pytest.mark.parametrize(
    "importance", ["none", ("truncated", {"cap": 1.4}), ("cispo", {"low": 0.5, "high": 2.0})], ids=str
)
@pytest.mark.parametrize("kl_student", ["current", "behaviour"])
@pytest.mark.parametrize("coef", [1.0, 0.3])
def test_loss_and_gradient_equal_the_loop(importance: Any, kl_student: Any, coef: float) -> None:
    config = objective_config(divergence=("k1", {"kl_student": kl_student}), importance=importance, coef=coef)
    student_N, inputs = _random_inputs(coef=coef)
    terms = token_loss(student_N, inputs, make_objective(config, max_new_tokens=9), 17)
    terms.loss.backward()
    loss, gradient = _slow(student_N.detach(), inputs, config, 17)
    assert terms.loss.item() == pytest.approx(loss, rel=1e-12)
    assert student_N.grad is not None
    np.testing.assert_allclose(student_N.grad.numpy(), gradient, rtol=1e-12)


@pytest.mark.parametrize("kl_student", ["current", "behaviour"])
@pytest.mark.parametrize("m", [0, 2])
def test_the_null_teacher_counts_once_with_any_number_of_teachers(m: int, kl_student: str) -> None:
    options = {"threshold": 1.5, "cost": 0.4, "kl_student": kl_student}
    config = objective_config(divergence=("null", options), importance=("truncated", {"cap": 1.4}), coef=0.5)
    student_N, inputs = _random_inputs(m=m)
    terms = token_loss(student_N, inputs, make_objective(config, max_new_tokens=9), 17)
    terms.loss.backward()
    gradient: list[float] = []
    for s, mu in zip(student_N.tolist(), inputs.behaviour_N.tolist(), strict=True):
        judged = s if kl_student == "current" else mu
        gradient.append(min(math.exp(s - mu), 1.4) * 0.5 * (0.4 if judged < -1.5 else 0.0) / 17)
    assert student_N.grad is not None and 0 < sum(g > 0 for g in gradient) < len(gradient)
    np.testing.assert_allclose(student_N.grad.numpy(), gradient, rtol=1e-12)
    told = [sum(s - float(inputs.teacher_MN[i, t]) for i in range(m) if inputs.routed_MN[i, t])
            for t, s in enumerate(student_N.tolist())]  # fmt: skip
    np.testing.assert_allclose(terms.reverse_kl_N.numpy(), told, rtol=1e-12)  # of the teachers that there are


# ------------------------------------------------------------------------------------------ exact enumeration


def _table(seed: int) -> Tensor:
    return torch.randn((V + 1, V), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _sequences() -> Tensor:
    """All V * V sequences of two tokens, [V * V, 2]."""
    return torch.cartesian_prod(torch.arange(V), torch.arange(V))


def _logprobs(table_CV: Tensor, sequences_S2: Tensor, temperature: float = 1.0) -> Tensor:
    """[S, 2]: row 0 of the table is the start, row 1 + a the context "a"."""
    logprobs_CV = torch.log_softmax(table_CV / temperature, dim=1)
    first, second = sequences_S2.T
    return torch.stack([logprobs_CV[0, first], logprobs_CV[1 + first, second]], dim=1)


def _analytic_gradient(student_CV: Tensor, teacher_CV: Tensor, first_token_V: Tensor) -> Tensor:
    """d/d student of sum over the two positions of KL(student || teacher) at that position, where the contexts come
    from `first_token_V` and are not differentiated (discount 0: a token answers only for itself)."""
    student_CV = student_CV.clone().requires_grad_()
    p_CV, q_CV = torch.log_softmax(student_CV, 1), torch.log_softmax(teacher_CV, 1)
    divergence_C = (p_CV.exp() * (p_CV - q_CV)).sum(1)
    (divergence_C[0] + (first_token_V * divergence_C[1:]).sum()).backward()
    assert student_CV.grad is not None
    return student_CV.grad


def _expected_gradient(
    student_CV: Tensor, teacher_CV: Tensor, sampler_CV: Tensor, config: ObjectiveConfig, temperature: float = 1.0
) -> Tensor:
    """Sum over all sequences of P(sequence under the sampler) x gradient of the loss of that one sequence."""
    total = torch.zeros_like(student_CV)
    objective = make_objective(config, max_new_tokens=9)
    for sequence in _sequences():
        table_CV = student_CV.clone().requires_grad_()
        student_N = _logprobs(table_CV, sequence[None])[0]
        behaviour_N = _logprobs(sampler_CV, sequence[None], temperature)[0]
        inputs = token_inputs(behaviour_N, _logprobs(teacher_CV, sequence[None])[:1], torch.ones((1, 2)).bool())
        token_loss(student_N, inputs, objective, 1).loss.backward()
        assert table_CV.grad is not None
        total += behaviour_N.sum().exp() * table_CV.grad
    return total


UNCAPPED = ObjectiveConfig(importance=Capped(cap=1e9))


def test_on_policy_gradient_is_that_of_the_reverse_kl() -> None:
    student_CV, teacher_CV = _table(0), _table(1)
    got = _expected_gradient(student_CV, teacher_CV, student_CV, ObjectiveConfig())
    torch.testing.assert_close(got, _analytic_gradient(student_CV, teacher_CV, torch.softmax(student_CV[0], 0)))


def test_off_policy_gradient_is_that_of_the_reverse_kl_at_the_states_visited() -> None:
    """Token-level ratios correct the token, not the distribution of the contexts before it."""
    student_CV, teacher_CV, sampler_CV = _table(0), _table(1), _table(2)
    got = _expected_gradient(student_CV, teacher_CV, sampler_CV, UNCAPPED)
    torch.testing.assert_close(got, _analytic_gradient(student_CV, teacher_CV, torch.softmax(sampler_CV[0], 0)))
    biased = _expected_gradient(student_CV, teacher_CV, sampler_CV, objective_config(importance="none"))
    assert float((biased - got).norm() / got.norm()) > 0.1


def test_sampling_at_another_temperature_still_trains_toward_the_teacher_at_temperature_one() -> None:
    student_CV, teacher_CV = _table(0), _table(1)
    got = _expected_gradient(student_CV, teacher_CV, student_CV, UNCAPPED, temperature=0.7)
    visited_V = torch.softmax(student_CV[0] / 0.7, 0)
    torch.testing.assert_close(got, _analytic_gradient(student_CV, teacher_CV, visited_V))


def test_undiscounted_costs_of_all_that_follows_have_the_gradient_of_the_divergence_of_whole_texts() -> None:
    """Exact: all 27 texts of three tokens. The expected gradient, with each text's own loss, is that of
    KL(student || teacher) between distributions of texts; with costs of single tokens it is not."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        [torch.randn([3] * n, generator=generator, dtype=torch.float64) for n in (1, 2, 3)] for _ in range(2)
    )  # logits of the next token, by the tokens before
    for one in student:
        one.requires_grad_()

    def logprobs(logits: list[Tensor], text: tuple[int, ...]) -> Tensor:
        return torch.stack([logits[t][text[:t]].log_softmax(-1)[text[t]] for t in range(3)])

    texts = list(itertools.product(range(3), repeat=3))
    exact = torch.zeros((), dtype=torch.float64)
    for text in texts:
        s, q = logprobs(student, text).sum(), logprobs(teacher, text).sum()
        exact = exact + s.exp() * (s - q)
    expected = torch.autograd.grad(exact, student)

    def estimated(discount: float) -> tuple[Tensor, ...]:
        objective = make_objective(objective_config(cost_discount=discount, importance="none"), max_new_tokens=3)
        loss = torch.zeros((), dtype=torch.float64)
        for text in texts:
            s, q = logprobs(student, text), logprobs(teacher, text)
            inputs = token_inputs(s.detach(), q[None], torch.ones(1, 3, dtype=torch.bool))
            inputs = replace(inputs, before_N=torch.tensor([-1, 0, 1]))
            loss = loss + s.detach().sum().exp() * token_loss(s, inputs, objective, 1).loss
        return torch.autograd.grad(loss, student)

    for got, wanted in zip(estimated(1.0), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    first, wanted = estimated(0.0)[0], expected[0]
    assert not torch.allclose(first, wanted, atol=1e-3)
