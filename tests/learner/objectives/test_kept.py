"""Tokens sampled by top-k, top-p and min-p: the expected gradient, by summing over all tokens that may be sampled, is
that of the divergence between the renormalised distributions, written out and differentiated by autograd."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

from stillhouse.learner.batch import TrainItem, UnreadableScores, pack
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.batch_terms import batch_terms
from stillhouse.learner.step.forward import BatchPart
from stillhouse.learner.step.step_loss import make_step_loss
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.logprobs import LmHead
from stillhouse.protocol.messages import KEPT_IDS
from stillhouse.protocol.payloads.student_sets import encode_top_ids
from tests.learner.conftest import make_item, remade, tiny_student
from tests.learner.settings import learner_config
from tests.learner.step.gradients import assert_close, of_loss, step_gradients

V: Final = 9
TEMPERATURE: Final = 0.7
CPU: Final = torch.device("cpu")


def with_kept(one: TrainItem, sets: Sequence[Sequence[int]], **changes: Any) -> TrainItem:
    """As the buffer hands it on, with what its trained tokens were sampled from. `changes`: of its arrays."""
    trained = np.flatnonzero(one.train_mask_L)
    first, last = int(trained[0]), int(trained[-1]) + 1
    told = encode_top_ids([np.array(of_token, np.int32) for of_token in sets])
    return remade(one, [(KEPT_IDS, first, last, told)], **changes)


def random_logprobs(seed: int) -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log_softmax(0)


def expected_gradient(
    student_V: Tensor, kept: list[int], cut: bool, sampled_S: Tensor | None = None, **objective: Any
) -> Tensor:
    """E over the tokens that an older, truncated and tempered student samples, or that are sampled with these
    log-probs, of our gradient by the logits."""
    old_S = (random_logprobs(1)[kept] / TEMPERATURE).log_softmax(0) if sampled_S is None else sampled_S
    total_V = torch.zeros(V, dtype=torch.float64)
    for place, token in enumerate(kept):
        one = with_kept(
            make_item("a", [0, 1], vocab=V),
            [kept],
            tokens_L=np.array([0, token], np.int32),
            behaviour_L=np.array([0.0, float(old_S[place])], np.float32),
            teacher_ML=np.array([[0.0, float(random_logprobs(2)[token])]], np.float32),
        )
        config = learner_config(**objective).objective
        loss_of = make_step_loss(config, max_new_tokens=9, chunk_tokens=2, vocab_tokens=V, rows=V, seed=0)
        items = loss_of.read([one], 0) if cut else [one]
        part = BatchPart(items, pack(items, 99), batch_terms(items, loss_of.objective, values=no_values), loss_of)
        (microbatch,) = part.batch.microbatches
        leaf_1V = student_V.detach().clone()[None].requires_grad_()
        head, targets = LmHead(torch.eye(V, dtype=torch.float64)), torch.from_numpy(microbatch.target_N)
        loss = loss_of(head, leaf_1V, targets, part.inputs(microbatch, CPU), microbatch, 1).loss
        total_V += old_S[place].exp() * torch.autograd.grad(loss, leaf_1V)[0][0]
    return total_V


def no_values() -> Tensor:
    raise AssertionError("no value function here")


@pytest.mark.parametrize("kept", [[1, 4], [0, 2, 3, 7], list(range(V))])
@pytest.mark.parametrize("importance", ["truncated", "sequence"], ids=["by token", "in a pass ahead"])
@pytest.mark.parametrize("divergence", ["k1", "k3"])
def test_the_expected_gradient_is_that_of_the_renormalised_divergence(
    kept: list[int], importance: str, divergence: str
) -> None:
    """k1 with the teacher's own log-probs, not renormalised: they differ by a constant, which has no gradient."""
    student_V = random_logprobs(0).requires_grad_()
    p_S, q_S = student_V[kept].log_softmax(0), random_logprobs(2)[kept]
    mass = q_S.exp().sum()
    if divergence == "k1":
        exact = (p_S.exp() * (p_S - (q_S - mass.log()))).sum()
    else:
        exact = mass * ((q_S.exp() / mass) * (q_S - mass.log() - p_S)).sum()
    (wanted_V,) = torch.autograd.grad(exact, student_V)
    fields: dict[str, Any] = {"divergence": divergence, "importance": (importance, {"cap": 1e9})}
    got_V = expected_gradient(student_V, kept, True, **fields)
    torch.testing.assert_close(got_V, wanted_V, atol=1e-6, rtol=1e-5)
    if len(kept) < V:  # as if nothing had been cut: another gradient
        assert float((expected_gradient(student_V, kept, False, **fields) - wanted_V).norm()) > 0.01


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_tokens_of_a_mixture_with_the_teacher_give_the_gradient_of_the_students_divergence(share: float) -> None:
    """MiniLLM's teacher-mixed sampling, with weights p / m: the default cap of 2 cuts nothing."""
    student_V, teacher_V = random_logprobs(0).requires_grad_(), random_logprobs(2)
    sampled_V = torch.logaddexp(math.log1p(-share) + student_V.detach(), math.log(share) + teacher_V)
    exact = (student_V.log_softmax(0).exp() * (student_V.log_softmax(0) - teacher_V)).sum()
    (wanted_V,) = torch.autograd.grad(exact, student_V)
    got_V = expected_gradient(student_V, list(range(V)), False, sampled_V, divergence="k1")
    torch.testing.assert_close(got_V, wanted_V, atol=1e-6, rtol=1e-5)
    as_students = expected_gradient(student_V, list(range(V)), False, sampled_V, divergence="k1", importance="none")
    assert float((as_students - wanted_V).norm()) > 0.01, "the weights do nothing"


def test_the_entropy_bonus_stays_that_of_the_whole_distribution() -> None:
    student_V, kept = random_logprobs(0).requires_grad_(), [0, 2, 3]
    p_S = student_V[kept].log_softmax(0)
    p_V = student_V.log_softmax(0)
    exact = (p_S.exp() * (p_S - random_logprobs(2)[kept])).sum() + 0.3 * (p_V.exp() * p_V).sum()
    (wanted_V,) = torch.autograd.grad(exact, student_V)
    got_V = expected_gradient(student_V, kept, True, entropy_coef=0.3, importance=("truncated", {"cap": 1e9}))
    torch.testing.assert_close(got_V, wanted_V, atol=1e-6, rtol=1e-5)


def sets_for(train_item: TrainItem, vocab: int) -> list[list[int]]:
    """By token from the first trained one to the last: itself and some others, as many as its place says."""
    trained = np.flatnonzero(train_item.train_mask_L)
    tokens = train_item.tokens_L[trained[0] : trained[-1] + 1].tolist()
    return [sorted({token, *((token + 3 * i) % vocab for i in range(1 + t % 4))}) for t, token in enumerate(tokens)]


@pytest.mark.parametrize("pack_tokens", [1, 9, 4096])
def test_a_step_is_that_of_a_plain_model_whatever_the_packs(pack_tokens: int) -> None:
    """Some items have kept ids and others none, with an environment's tokens between."""
    plain = [make_item("a", [0, 0, 1, 1, 1]), make_item("b", [0, 1, 1, 0, 0, 1, 0, 0]), make_item("c", [0, 1, 1])]
    items = [with_kept(one, sets_for(one, 23)) for one in plain[:2]] + plain[2:]
    config: LearnerConfig = learner_config(
        max_grad_norm=0.0, pack_tokens=pack_tokens, logprob_chunk_tokens=3, importance=("truncated", {"cap": 1.5})
    )
    got = step_gradients(Trainer(tiny_student(dtype=torch.float64), config, total_steps=9), items)

    model, n_tokens = tiny_student("eager", torch.float64), sum(one.n_trained for one in items)
    loss = torch.zeros((), dtype=torch.float64)
    for one, has in zip(items, (True, True, False), strict=True):
        ids_L = torch.from_numpy(one.tokens_L).long()
        logits_LV = model(input_ids=ids_L[None]).logits[0]
        trained = np.flatnonzero(one.train_mask_L).tolist()
        sets = dict(zip(itertools.count(trained[0]), sets_for(one, 23), strict=False)) if has else {}
        for t in trained:
            kept = sets.get(t, list(range(23)))
            s = logits_LV[t - 1, ids_L[t]] - logits_LV[t - 1, kept].logsumexp(0)
            cost = s.item() - float(one.teacher_ML[0, t])
            loss = loss + min((s - float(one.behaviour_L[t])).exp().item(), 1.5) * cost * s / n_tokens
    assert_close(got, of_loss(model, loss))


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ([[1, 2], [21, 22]], "do not have the token that was sampled"),
        ([[5], [5], [5]], "kept ids of 3 tokens, expected"),
        ([[3, 2], [5]], "in ascending order"),
        ([[5], [5, 99]], "ids below 23"),
    ],
)
def test_kept_ids_that_cannot_be_are_refused(sets: list[list[int]], said: str) -> None:
    one = with_kept(make_item("a", [0, 1, 1]), sets, tokens_L=np.array([0, 5, 5], np.int32))
    trainer = Trainer(tiny_student(), learner_config(), total_steps=9)
    with pytest.raises(UnreadableScores, match=said):
        trainer.step([one])
