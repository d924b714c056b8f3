"""Reverse KL over the student's likeliest tokens and a tail, from the behaviour policy's logits to the gradient.
Against dense distributions in float64 and central differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from stillhouse.engines.base import likeliest
from stillhouse.learner.objectives.distributions import Bucketed, TopKTeacher, reverse_kl
from stillhouse.learner.objectives.options import Distributions
from stillhouse.protocol.messages import TopIdsWanted
from stillhouse.protocol.payloads.student_sets import decode_top_ids, encode_top_ids
from stillhouse.protocol.payloads.top_k import TopRows
from stillhouse.protocol.topk_codec import decode_top_k, encode_given

V, N = 300, 6
OPTIONS = Distributions(name="reverse_kl")


def logits(seed: int, spread: float) -> Tensor:
    return torch.randn((N, V), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def exact_teacher(sets: list[list[int]], teacher_NV: Tensor) -> TopKTeacher:
    """The teacher's log-probs of these tokens, unrounded."""
    counts = torch.tensor([len(one) for one in sets])
    ids_NK = torch.zeros((N, int(counts.max())), dtype=torch.int64)
    for t, one in enumerate(sets):
        ids_NK[t, : len(one)] = torch.tensor(one)
    tail = [math.log(sum(p for v, p in enumerate(teacher_NV[t].exp().tolist()) if v not in sets[t])) for t in range(N)]
    return TopKTeacher(ids_NK, teacher_NV.gather(1, ids_NK), torch.tensor(tail, dtype=torch.float64), counts)


def slow(z_V: list[float], q_V: list[float], chosen: list[int]) -> float:
    """KL between the two distributions over len(chosen) + 1 buckets, by loops over the whole vocabulary."""
    largest = max(z_V)
    total = sum(math.exp(z - largest) for z in z_V)
    p_V = [math.exp(z - largest) / total for z in z_V]
    others = [v for v in range(V) if v not in chosen]
    pairs = [(p_V[v], q_V[v]) for v in chosen] + [(sum(p_V[v] for v in others), sum(q_V[v] for v in others))]
    return sum(p * (math.log(p) - math.log(q)) for p, q in pairs)


def between(student_CB: Tensor, teacher_CB: Tensor) -> Bucketed:
    return reverse_kl(student_CB, teacher_CB, OPTIONS)


def students_sets(behaviour_NV: Tensor, k: int, mass: float) -> list[list[int]]:
    """As an actor's engine chooses them, over the wire."""
    p_NK, ids_NK = behaviour_NV.softmax(1).topk(k, dim=1)
    sets = likeliest(ids_NK.int().numpy(), p_NK.numpy(), TopIdsWanted(k, mass))
    ids, counts = decode_top_ids(encode_top_ids(sets))
    return [row[:n].tolist() for row, n in zip(ids, counts, strict=True)]


@pytest.mark.parametrize(("k", "mass"), [(1, 1.0), (12, 1.0), (12, 0.8), (299, 1.0)])
def test_value_and_gradient_equal_dense_distributions(k: int, mass: float) -> None:
    """The student has moved since it sampled; the teacher thinks little of its tokens."""
    behaviour_NV, teacher_NV = logits(0, 2.0), logits(1, 2.0).log_softmax(1)
    current_NV = behaviour_NV + logits(2, 0.3)
    sets = students_sets(behaviour_NV, k, mass)
    assert all(set(one) == set(behaviour_NV[t].topk(len(one)).indices.tolist()) for t, one in enumerate(sets))
    teacher = exact_teacher(sets, teacher_NV)
    value_N, gradient_NV = teacher.compare(current_NV.clone(), slice(None), between)
    for t in range(N):
        z, q = current_NV[t].tolist(), teacher_NV[t].exp().tolist()
        assert float(value_N[t]) == pytest.approx(slow(z, q, sets[t]), rel=1e-9)
        for v in {*sets[t][:3], *range(0, V, 37)}:
            up, down = ([*z[:v], z[v] + sign * 1e-5, *z[v + 1 :]] for sign in (1, -1))
            expected = (slow(up, q, sets[t]) - slow(down, q, sets[t])) / 2e-5
            assert float(gradient_NV[t, v]) == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_what_the_payload_rounds_hardly_changes_the_gradient() -> None:
    """The teacher's log-probs by way of its payload, 12 bits each."""
    behaviour_NV, teacher_NV = logits(0, 2.0), logits(1, 2.0).log_softmax(1)
    sets = students_sets(behaviour_NV, 40, 0.95)
    exact = exact_teacher(sets, teacher_NV)
    payload = encode_given(
        exact.ids_TK.numpy(), exact.logprobs_TK.float().numpy(), exact.counts_T.numpy(), vocab_size=V
    )
    sent = TopKTeacher.of(TopRows.of(decode_top_k(payload), np.arange(N)), V, torch.device("cpu"))
    results = [one.compare(behaviour_NV.clone(), slice(None), between) for one in (exact, sent)]
    for (value, gradient), (other, rounded) in [results]:
        torch.testing.assert_close(value, other, rtol=0.01, atol=0.01)
        assert float(torch.cosine_similarity(gradient.flatten(), rounded.flatten(), dim=0)) > 0.9999
