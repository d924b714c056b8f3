"""Reverse KL from several tokens drawn per position: its mean against the exact gradient by enumeration, its variance,
and what a token counts that the teacher did not send."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from stillhouse.learner.objectives.distributions import Bucketed, TopKTeacher, log_tail, multi_sample
from stillhouse.learner.objectives.options import MultiSample

V = 7
SETS = {"whole": V, "three tokens and a tail": 3}


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5


def _uniform(*shape: int, seed: int = 5) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _teacher(k: int, n: int) -> TopKTeacher:
    """One row, n times."""
    top_1K, ids_1K = _random(1, V, seed=1).log_softmax(1).topk(k, dim=1)
    tail_1 = torch.full((1,), -math.inf, dtype=torch.float64) if k == V else log_tail(top_1K)
    return TopKTeacher(ids_1K.expand(n, k), top_1K.expand(n, k), tail_1.expand(n), torch.full((n,), k))


def _drawn(k: int, uniform_CS: Tensor) -> tuple[Tensor, Tensor]:
    """(values, gradients by the logits) of C independent estimates at one and the same context."""
    n = len(uniform_CS)
    student_CV = _random(1, V, seed=0).repeat(n, 1)
    return _teacher(k, n).compare(student_CV, slice(0, n), _drawing(uniform_CS))


def _drawing(uniform_CS: Tensor) -> Callable[[Tensor, Tensor], Bucketed]:
    return partial(multi_sample, options=MultiSample(samples=uniform_CS.shape[1]), uniform_CS=uniform_CS)


def _exact(k: int) -> tuple[float, Tensor]:
    """KL of the buckets and its gradient, by hand: d/dz_v = p_v (log p_b/q_b - KL) with b the bucket of v."""
    p = _random(1, V, seed=0)[0].softmax(0).tolist()
    q = _random(1, V, seed=1)[0].softmax(0).tolist()
    sent = [v for _, v in sorted(zip(q, range(V), strict=True), reverse=True)][:k]
    rest = [v for v in range(V) if v not in sent]
    cost = {v: math.log(p[v] / q[v]) for v in sent}
    for v in rest:
        cost[v] = math.log(sum(p[w] for w in rest) / sum(q[w] for w in rest))
    kl = sum(p[v] * cost[v] for v in range(V))
    return kl, torch.tensor([p[v] * (cost[v] - kl) for v in range(V)], dtype=torch.float64)


@pytest.mark.parametrize("k", SETS.values(), ids=SETS)
@pytest.mark.parametrize("samples", [1, 4])
def test_mean_of_the_gradient_is_the_exact_one(k: int, samples: int) -> None:
    n = 100_000
    values_C, gradients_CV = _drawn(k, _uniform(n, samples))
    kl, gradient_V = _exact(k)
    assert float(gradient_V.abs().max()) > 0.05
    for got, exact in [(values_C[:, None], torch.tensor([kl], dtype=torch.float64)), (gradients_CV, gradient_V)]:
        standard_error = got.std(dim=0) / math.sqrt(n)
        assert bool(((got.mean(dim=0) - exact).abs() < 5 * standard_error).all())


@pytest.mark.parametrize("k", SETS.values(), ids=SETS)
def test_variance_falls_as_one_over_the_samples(k: int) -> None:
    variances = {s: float(_drawn(k, _uniform(50_000, s, seed=s))[1].var(dim=0).sum()) for s in (1, 4, 16)}
    for samples in (4, 16):
        assert variances[1] / variances[samples] == pytest.approx(samples, rel=0.1)


def test_each_draw_is_one_bucket_in_proportion_to_the_students_mass() -> None:
    """Numbers just above and below the edges between buckets."""
    teacher, student_V = _teacher(3, 1), _random(1, V, seed=0)[0].log_softmax(0)
    sent = teacher.ids_TK[0].tolist()
    outside = [v for v in range(V) if v not in sent]
    student = [*(float(student_V[v]) for v in sent), float(student_V[outside].logsumexp(0))]
    costs = [s - float(q) for s, q in zip(student, [*teacher.logprobs_TK[0], teacher.tail_T[0]], strict=True)]
    edge = 0.0
    for bucket, logprob in enumerate(student):
        for at in (edge + 1e-9, edge + math.exp(logprob) - 1e-9):
            (value,), (gradient_V,) = _drawn(3, torch.tensor([[at]], dtype=torch.float64))
            assert float(value) == pytest.approx(costs[bucket])
            chosen_V = torch.zeros(V, dtype=torch.float64)
            members = [sent[bucket]] if bucket < 3 else outside
            chosen_V[members] = (student_V[members] - logprob).exp()
            torch.testing.assert_close(gradient_V, costs[bucket] * (chosen_V - student_V.exp()))
        edge += math.exp(logprob)
    assert edge == pytest.approx(1.0)


def test_padding_is_never_drawn() -> None:
    """Rows of different length: what stands behind a row's own tokens has no mass, and costs nothing."""
    whole = _teacher(3, 2)
    teacher = TopKTeacher(whole.ids_TK, whole.logprobs_TK, whole.tail_T, torch.tensor([3, 1]))
    teacher.tail_T[1:] = log_tail(whole.logprobs_TK[1:, :1])
    drawing = _drawing(torch.tensor([[0.0, 1.0 - 2**-53]] * 2, dtype=torch.float64))
    values_C, _ = teacher.compare(_random(1, V, seed=0).repeat(2, 1), slice(0, 2), drawing)
    student_V = _random(1, V, seed=0)[0].log_softmax(0)
    for value, row, kept in zip(values_C, (0, 1), (3, 1), strict=True):
        sent = whole.ids_TK[row, :kept].tolist()
        rest = student_V[[v for v in range(V) if v not in sent]].logsumexp(0)
        first = student_V[sent[0]] - whole.logprobs_TK[row, 0]
        assert float(value) == pytest.approx(float(first + rest - teacher.tail_T[row]) / 2)


def test_without_numbers_to_draw_by_it_is_refused() -> None:
    student_CB = _random(2, V, seed=0).log_softmax(1)
    for n_given in (0, 3):
        with pytest.raises(ValueError, match=f"{n_given} numbers per position to draw by, expected 4"):
            multi_sample(student_CB, student_CB, MultiSample(), uniform_CS=torch.zeros(2, n_given))
