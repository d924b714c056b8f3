"""Scores of a teacher with another tokenizer: the gradient of a step against a plain model, span by span in float64,
and the expectation of the gradient by enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem, UnreadableScores
from stillhouse.learner.objectives.losses import TokenInputs, make_objective, token_loss
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol.errors import MalformedMessage
from stillhouse.protocol.messages import TopKPiece
from stillhouse.protocol.payloads.aligned import (
    EDGE,
    END,
    INSIDE,
    NOT_SCORED,
    SPECIAL,
    AlignedEncoder,
    AlignedScores,
    decode_aligned,
    encode_aligned,
)
from stillhouse.protocol.payloads.kind import ScoreResult
from tests.learner.settings import learner_config, objective_config
from tests.learner.step.gradients import step_gradients

Make = Callable[..., TrainItem]
Student = Callable[..., PreTrainedModel]
PLAIN: Final[dict[str, Any]] = {"max_grad_norm": 0.0, "warmup_steps": 0, "schedule": "constant"}


def aligned(train_item: TrainItem, codes: Sequence[int]) -> TrainItem:
    """As the buffer hands it on: `codes` of the tokens from the first trained one to the last."""
    trained = np.flatnonzero(train_item.train_mask_L)
    start, end = int(trained[0]), int(trained[-1]) + 1
    body = encode_aligned(np.array(codes, np.uint8))
    teacher_ML = train_item.teacher_ML.copy()
    teacher_ML[:, start:end][:, np.array(codes) > END] = NOT_SCORED
    item = msgspec.structs.replace(train_item.item, top_k=(TopKPiece(0, start, end, len(body)),))
    return replace(train_item, item=item, teacher_ML=teacher_ML, payloads=np.frombuffer(body, np.uint8))


def items_of(make_item: Make) -> tuple[list[TrainItem], list[list[list[int]]]]:
    """Items, and the trained tokens of each span that is scored, by item."""
    spans = [
        aligned(make_item("a", [0, 0, 1, 1, 1]), [INSIDE, INSIDE, END]),
        aligned(make_item("b", [0, 1, 1, 1, 1, 1, 1]), [END, INSIDE, END, SPECIAL, EDGE, END]),
        # the environment wrote the second token of the first span, and the third is not trained any more
        aligned(make_item("c", [0, 1, 0, 1, 1, 0, 1]), [INSIDE, END, INSIDE, END, INSIDE, END]),
        make_item("d", [0, 1, 1, 1]),
    ]
    return spans, [[[2, 3, 4]], [[1], [2, 3], [6]], [[3, 4]], [[1], [2], [3]]]


@pytest.mark.parametrize("pack_tokens", [7, 64])
def test_gradient_equals_a_slow_reference(tiny_student: Student, make_item: Make, pack_tokens: int) -> None:
    items, spans = items_of(make_item)
    config = learner_config(**PLAIN, pack_tokens=pack_tokens, logprob_chunk_tokens=2)
    trainer = Trainer(tiny_student(dtype=torch.float64), config, total_steps=10)
    got = step_gradients(trainer, items)
    model = tiny_student("eager", torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    n_trained = sum(one.n_trained for one in items)
    for one, of_item in zip(items, spans, strict=True):
        ids_L = torch.from_numpy(one.tokens_L).long()
        logprobs_LV = torch.log_softmax(model(input_ids=ids_L[None]).logits[0], dim=-1)
        for span in of_item:
            s = sum((logprobs_LV[t - 1, ids_L[t]] for t in span), torch.zeros((), dtype=torch.float64))
            q, mu = (sum(float(x) for x in row[span]) for row in (one.teacher_ML[0], one.behaviour_L))
            weight = min(math.exp(s.item() - mu), 2.0)
            loss = loss + weight * (s.item() - q) * s / n_trained
    loss.backward()  # pyright: ignore[reportUnknownMemberType]
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(got[name], parameter.grad, atol=1e-6, rtol=1e-5, msg=name)


def test_spans_of_one_token_give_the_gradient_of_the_students_tokenizer(tiny_student: Student, make_item: Make) -> None:
    """Bit for bit."""
    plain = [make_item("a", [0, 0, 1, 1, 1]), make_item("b", [0, 1, 1, 0, 0, 1])]
    same = [aligned(one, [END] * int(np.ptp(np.flatnonzero(one.train_mask_L)) + 1)) for one in plain]
    config = learner_config(**PLAIN, logprob_chunk_tokens=2)
    one, other = (step_gradients(Trainer(tiny_student(), config, total_steps=10), items) for items in (plain, same))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_figures_count_a_span_once_and_tokens_without_a_score(tiny_student: Student, make_item: Make) -> None:
    items, spans = items_of(make_item)
    metrics = Trainer(tiny_student(), learner_config(**PLAIN), total_steps=10).step(items)
    scored = sum(len(span) for of_item in spans for span in of_item)
    assert metrics.tokens_unscored == metrics.tokens - scored
    assert metrics.reverse_kl == pytest.approx(metrics.divergence, rel=1e-5)


def test_the_sum_of_a_span_gives_the_gradient_of_the_reverse_kl_of_spans_and_a_share_does_not() -> None:
    """A student with the tokens a, b and aa; a teacher with pairs. The next span is one of four texts; aa is written as
    one token or as two. Every answer is enumerated, and the mean gradient compared with that of

        KL = sum over answers y of p(y) (log p(y) - log Q(text of y))"""
    torch.manual_seed(1)
    logits = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)  # at the start, behind a, behind b
    teacher = torch.log_softmax(torch.randn(4, dtype=torch.float64), 0)
    pairs = ["aa", "ab", "ba", "bb"]

    def tokens(answer: tuple[int, ...]) -> list[Tensor]:
        rows = [0, 1 + answer[0]] if len(answer) == 2 else [0]
        width = [3, 2]  # behind the first letter only letters
        return [
            torch.log_softmax(logits[row, : width[k]], 0)[one]
            for k, (row, one) in enumerate(zip(rows, answer, strict=True))
        ]

    answers = [(2,), *itertools.product((0, 1), repeat=2)]
    kl = torch.zeros((), dtype=torch.float64)
    parts = dict.fromkeys(("sum", "share"), torch.zeros((), dtype=torch.float64))
    objective = make_objective(objective_config(), max_new_tokens=4)
    for answer in answers:
        s = torch.stack(tokens(answer))
        q = teacher[pairs.index("aa" if answer == (2,) else "".join("ab"[i] for i in answer))]
        p, n = s.sum().exp(), len(answer)
        kl = kl + p * (s.sum() - q)
        inputs = TokenInputs(
            behaviour_N=s.detach(),
            teacher_MN=(q / n).expand(1, n),
            routed_MN=torch.ones((1, n), dtype=torch.bool),
            teachers=("default",),
            coef_M=torch.ones(1, dtype=torch.float64),
            reward_advantage_N=torch.zeros(n, dtype=torch.float64),
            share_N=torch.ones(n, dtype=torch.float64),
            sequence_N=torch.zeros(n, dtype=torch.int64),
            n_sequences=1,
            span_N=torch.zeros(n, dtype=torch.int64),
        )
        parts["sum"] = parts["sum"] + p.detach() * token_loss(s, inputs, objective, 1).loss
        parts["share"] = parts["share"] + p.detach() * ((s.sum() - q).detach() / n * s.sum())
    exact, of_sum, of_share = (torch.autograd.grad(one, logits, retain_graph=True)[0] for one in (kl, *parts.values()))
    torch.testing.assert_close(of_sum, exact, atol=1e-12, rtol=0)
    cosine = torch.cosine_similarity(of_share.flatten(), exact.flatten(), dim=0)
    assert float(cosine) < 0.999


def test_payloads_that_cannot_be_read(tiny_student: Student, make_item: Make) -> None:
    with pytest.raises(MalformedMessage, match="a span without an end"):
        decode_aligned(encode_aligned(np.array([INSIDE, SPECIAL], np.uint8)))
    with pytest.raises(MalformedMessage, match="code 99"):
        decode_aligned(encode_aligned(np.array([99], np.uint8)))
    with pytest.raises(MalformedMessage, match="a byte per token"):
        AlignedScores.n_tokens(encode_aligned(np.zeros(3, np.uint8))[:-1])
    wrong = aligned(make_item("a", [0, 1, 1]), [INSIDE, INSIDE])
    with pytest.raises(UnreadableScores, match=r"rollout 'a': teacher 'default'.*without an end"):
        Trainer(tiny_student(), learner_config(**PLAIN), total_steps=10).step([wrong])


def test_a_span_that_the_trained_range_cuts_is_not_sent() -> None:
    codes = np.array([INSIDE, INSIDE, END, END, INSIDE, END], np.uint8)
    result = ScoreResult(np.zeros(6, np.float32), codes=codes)
    encoder = AlignedEncoder()
    assert decode_aligned(encoder.encode(result, slice(1, 5), None)).tolist() == [EDGE, EDGE, END, EDGE]
    assert decode_aligned(encoder.encode(result, slice(0, 6), None)).tolist() == codes.tolist()
