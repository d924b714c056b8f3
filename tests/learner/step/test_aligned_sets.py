"""Top-k sets of a teacher with another tokenizer: the gradient of a step against a plain model, span by span in NumPy,
its expectation by enumeration, and bit for bit with the tokenizer of the student."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem, UnreadableScores
from stillhouse.learner.objectives.distributions import TopKTeacher, reverse_kl
from stillhouse.learner.objectives.losses import TokenInputs, make_objective, token_loss
from stillhouse.learner.objectives.options import Distributions
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol.errors import MalformedMessage
from stillhouse.protocol.messages import TopKPiece
from stillhouse.protocol.payloads.aligned import (
    ALONE,
    EDGE,
    END,
    INSIDE,
    NOT_SCORED,
    SET,
    SPECIAL,
    AlignedSets,
    SetsEncoder,
    encode_aligned,
    plain,
)
from stillhouse.protocol.payloads.kind import PayloadPart, ScoreOptions, ScoreResult
from stillhouse.protocol.payloads.top_k import no_sets
from stillhouse.protocol.topk_codec import decode_top_k, encode_given
from tests.learner.settings import learner_config, objective_config
from tests.learner.step.gradients import step_gradients
from tests.learner.step.test_top_k_step import VOCAB, teacher_logprobs, with_sets

Make = Callable[..., TrainItem]
Student = Callable[..., PreTrainedModel]
PLAIN: dict[str, Any] = {"max_grad_norm": 0.0, "warmup_steps": 0, "schedule": "constant", "divergence": "reverse_kl"}
IN, E = int(INSIDE), int(END)
SI, SE, ONE = IN + int(SET), E + int(SET), E + int(SET) + int(ALONE)


def with_spans(train_item: TrainItem, codes: Sequence[int], k: int) -> TrainItem:
    """As the buffer hands it on: `codes` of the tokens from the first trained one to the last, and where they say so a
    set of the `k` likeliest tokens of `teacher_logprobs`."""
    trained = np.flatnonzero(train_item.train_mask_L)
    start, end = int(trained[0]), int(trained[-1]) + 1
    code_T = np.array(codes, np.uint8)
    places = start + np.flatnonzero(code_T & SET)
    logprobs_SV = teacher_logprobs(train_item, "default")[places]
    ids_SK = np.argsort(-logprobs_SV, axis=1)[:, :k].astype(np.int32)
    logprobs_SK = np.take_along_axis(logprobs_SV, ids_SK, 1)
    counts_S = np.full(len(places), k)
    sets = encode_given(ids_SK, logprobs_SK, counts_S, vocab_size=VOCAB, logprob_bits=16)
    body = encode_aligned(code_T, sets)
    teacher_ML = train_item.teacher_ML.copy()
    teacher_ML[:, start:end][:, plain(code_T) > END] = NOT_SCORED
    item = msgspec.structs.replace(train_item.item, top_k=(TopKPiece(0, start, end, len(body)),))
    return replace(train_item, item=item, teacher_ML=teacher_ML, payloads=np.frombuffer(body, np.uint8))


def items_of(make_item: Make, k: int) -> tuple[list[TrainItem], list[list[tuple[list[int], int]]]]:
    """Items, and of each its spans: the trained tokens, and the code of the first one."""
    items = [
        with_spans(make_item("a", [0, 0, 1, 1, 1], vocab=VOCAB), [SI, IN, E], k),
        with_spans(make_item("b", [0] + [1] * 7, vocab=VOCAB), [ONE, SI, E, int(SPECIAL), int(EDGE), SE, E], k),
        # the environment wrote the second token of the first span
        with_spans(make_item("c", [0, 1, 0, 1, 1, 0, 1], vocab=VOCAB), [SI, E, IN, E, SI, E], k),
        with_spans(make_item("d", [0, 1, 1], vocab=VOCAB), [E, E], k),
    ]
    spans = [
        [([2, 3, 4], SI)],
        [([1], ONE), ([2, 3], SI), ([6], SE), ([7], E)],
        [([3, 4], IN)],
        [([1], E), ([2], E)],
    ]
    return items, spans


def slow_loss(model: PreTrainedModel, train_item: TrainItem, spans: list[tuple[list[int], int]], k: int) -> Tensor:
    """The definition: at the first token of a span, the reverse KL over the k sent tokens and all others; and
    w (S - Q - first) S for a span of which the set does not say all."""
    ids_L = torch.from_numpy(train_item.tokens_L).long()
    logprobs_LV = torch.log_softmax(model(input_ids=ids_L[None]).logits[0, :, :VOCAB], dim=-1)  # rows without padding
    whole_LV = torch.log_softmax(model(input_ids=ids_L[None]).logits[0], dim=-1)
    q_LV = teacher_logprobs(train_item, "default")
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, code in spans:
        t, first = tokens[0], 0.0
        if code & SET:
            sent = np.argsort(-q_LV[t])[:k]
            q_B = np.append(np.exp(q_LV[t][sent]), 1.0 - np.exp(q_LV[t][sent]).sum())
            p_V = logprobs_LV[t - 1].exp()
            p_B = torch.cat([p_V[sent], (1.0 - p_V[sent].sum())[None]])
            ratio_B = p_B.log() - torch.from_numpy(np.log(q_B))
            loss = loss + (p_B * ratio_B).sum()
            (where,) = np.nonzero(sent == int(ids_L[t]))
            first = float(ratio_B[int(where[0]) if len(where) else -1].detach())
        if not code & ALONE:
            s = sum((whole_LV[i - 1, ids_L[i]] for i in tokens), torch.zeros((), dtype=torch.float64))
            q, mu = (sum(float(x) for x in row[tokens]) for row in (train_item.teacher_ML[0], train_item.behaviour_L))
            weight = min(float(np.exp(s.item() - mu)), 2.0)
            loss = loss + weight * (s.item() - q - first) * s
    return loss


@pytest.mark.parametrize(("pack_tokens", "k"), [(7, 3), (64, 3), (64, 12)])
def test_gradient_equals_a_slow_reference(tiny_student: Student, make_item: Make, pack_tokens: int, k: int) -> None:
    items, spans = items_of(make_item, k)
    config = learner_config(**PLAIN, pack_tokens=pack_tokens, logprob_chunk_tokens=2)
    trainer = Trainer(tiny_student(dtype=torch.float64), config, total_steps=10, vocab_tokens=VOCAB)
    got = step_gradients(trainer, items)
    model = tiny_student("eager", torch.float64)
    n_trained = sum(one.n_trained for one in items)
    loss = sum((slow_loss(model, *one, k) for one in zip(items, spans, strict=True)), torch.zeros(()))
    (loss / n_trained).backward()  # pyright: ignore
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(got[name], parameter.grad, atol=2e-5, rtol=1e-3, msg=name)


def test_with_the_students_tokenizer_the_gradient_is_that_of_its_sets(tiny_student: Student, make_item: Make) -> None:
    """Bit for bit: each span is one token, and its set says all."""
    made = [make_item("a", [0, 0, 1, 1, 1], vocab=VOCAB), make_item("b", [0, 1, 1, 0, 0, 1], vocab=VOCAB)]
    theirs = [with_spans(one, [ONE] * int(np.ptp(np.flatnonzero(one.train_mask_L)) + 1), 5) for one in made]
    config = learner_config(**PLAIN, logprob_chunk_tokens=2)

    def gradients(items: list[TrainItem]) -> dict[str, Tensor]:
        return step_gradients(Trainer(tiny_student(), config, total_steps=10, vocab_tokens=VOCAB), items)

    one, other = gradients([with_sets(item, k=5) for item in made]), gradients(theirs)
    assert all(torch.equal(one[name], other[name]) for name in one)
    k1 = step_gradients(
        Trainer(tiny_student(), learner_config(**{**PLAIN, "divergence": "k1"}), total_steps=10), theirs
    )
    plain_k1 = step_gradients(
        Trainer(tiny_student(), learner_config(**{**PLAIN, "divergence": "k1"}), total_steps=10), made
    )
    assert all(torch.equal(k1[name], plain_k1[name]) for name in k1)


def enumerated(sent: list[str], aa: float | None = None) -> tuple[list[tuple[Tensor, Tensor, Tensor, Tensor]], Tensor]:
    """A student with the tokens a, b and aa, a teacher with pairs, as in test_aligned_step. The teacher's pairs count
    for a or b, and nothing for aa, which is in the tail; where aa is sent, its pair counts for that. Returns what `of`
    does for every answer, and the exact gradient, after checking that the mean is that. `aa`: another logit for it."""
    torch.manual_seed(1)
    logits = torch.randn(3, 3, dtype=torch.float64)  # at the start, behind a, behind b
    if aa is not None:
        logits[0, 2] = aa
    logits.requires_grad_()
    pairs = ["aa", "ab", "ba", "bb"]
    teacher = torch.log_softmax(torch.randn(4, dtype=torch.float64), 0)
    shares = {"a": teacher[:2].logsumexp(0), "b": teacher[2:].logsumexp(0), "aa": teacher[0]}
    if "aa" in sent:
        shares["a"] = teacher[1]
    names = ["a", "b", "aa"]
    set_K = torch.stack([shares[one] for one in sent])
    tail = torch.log1p(-set_K.exp().sum().clamp(max=1 - 1e-7))[None]
    rows = TopKTeacher(torch.tensor([[names.index(one) for one in sent]]), set_K[None], tail, torch.tensor([len(sent)]))
    answers = [(2,), *itertools.product((0, 1), repeat=2)]
    objective = make_objective(objective_config(divergence="reverse_kl"), max_new_tokens=4)

    def d_and_its_gradient() -> Tensor:
        _, grad_1V = rows.compare(
            logits.detach()[:1].clone(), slice(0, 1), lambda p, q: reverse_kl(p, q, Distributions())
        )
        return torch.cat([grad_1V, torch.zeros(2, 3, dtype=torch.float64)])

    def of(answer: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(p, KL, gradient of one sample with sets, and with the sampled span alone)."""
        at, width = [0, 1 + answer[0]][: len(answer)], [3, 2]
        s = torch.stack([torch.log_softmax(logits[row, : width[k]], 0)[answer[k]] for k, row in enumerate(at)])
        q, n = teacher[pairs.index("aa" if answer == (2,) else "".join("ab"[i] for i in answer))], len(answer)
        first = rows.log_ratio(logits.detach()[:1].clone(), slice(0, 1), torch.tensor([answer[0]]))
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
            rest_MN=torch.ones((1, n), dtype=torch.bool),
            first_MN=torch.cat([first, first.new_zeros(n - 1)])[None],
        )
        rest = token_loss(s, inputs, objective, 1)
        by_sets = torch.autograd.grad(rest.loss, logits, retain_graph=True)[0] + d_and_its_gradient()
        by_span = torch.autograd.grad((s.sum() - q).detach() * s.sum(), logits, retain_graph=True)[0]
        p = s.sum().exp()
        return p, p * (s.sum() - q), by_sets, by_span

    found = [of(answer) for answer in answers]
    exact = torch.autograd.grad(torch.stack([kl for _, kl, _, _ in found]).sum(), logits)[0]
    mean = torch.stack([p.detach() * by_sets for p, _, by_sets, _ in found]).sum(0)
    torch.testing.assert_close(mean, exact, atol=1e-6, rtol=0)
    return found, exact


@pytest.mark.parametrize("sent", [["a", "b"], ["a"], ["a", "b", "aa"]], ids=str)
def test_in_expectation_it_is_the_reverse_kl_of_spans_whatever_is_sent(sent: list[str]) -> None:
    enumerated(sent)


def test_where_sets_have_what_the_student_writes_the_variance_is_smaller() -> None:
    found, exact = enumerated(["a", "b"], aa=-8.0)
    by_sets, by_span = (
        sum(float(one[0].detach() * (one[which] - exact).square().sum()) for one in found) for which in (2, 3)
    )
    assert by_sets < 0.9 * by_span


def test_a_set_at_the_wrong_token_is_refused(tiny_student: Student, make_item: Make) -> None:
    item = make_item("a", [0, 0, 1, 1, 1], vocab=VOCAB)
    for codes, why in (([SI, SI, E], "first token of a span"), ([SI, IN, ONE], "first token of a span")):
        with pytest.raises(UnreadableScores, match=why):
            Trainer(tiny_student(), learner_config(**PLAIN), total_steps=10, vocab_tokens=VOCAB).step(
                [with_spans(item, codes, 3)]
            )
    with pytest.raises(MalformedMessage, match="0 sets for 1 tokens"):
        AlignedSets.n_tokens(encode_aligned(np.array([SE], np.uint8), no_sets(VOCAB)))
    with pytest.raises(UnreadableScores, match="sent no top-k set"):
        Trainer(tiny_student(), learner_config(**PLAIN), total_steps=10, vocab_tokens=VOCAB).step([item])


def test_the_encoder_sends_the_sets_of_the_spans_that_are_whole() -> None:
    """Of the positions [1, 6) the first and the last cut a span."""
    codes = np.array([SI, E, SE, ONE, SI, E, SI, E], np.uint8)
    ids = np.array([[3, 1, 0], [4, 2, 0], [5, 0, 0], [6, 1, 2], [7, 8, 9]], np.int32)
    probabilities = np.array([[0.5, 0.25, 0], [0.6, 0.3, 0], [0.999, 0, 0], [0.5, 0.25, 0.125], [0.4, 0.3, 0.2]])
    with np.errstate(divide="ignore"):
        logprobs = np.log(probabilities).astype(np.float32)
    encoder = SetsEncoder(VOCAB, ScoreOptions(top_k=3), 2, 0.9)
    body = encoder.encode(ScoreResult(np.zeros(8, np.float32), ids, logprobs, codes=codes), slice(1, 7), None)
    rows = AlignedSets.read("default", [PayloadPart(memoryview(body), 6, np.arange(6))], VOCAB)
    assert rows.code_R.tolist() == [EDGE, SE, ONE, SI, E, EDGE] and rows.sets is not None
    assert rows.sets.counts_R.tolist() == [2, 1, 2]
    assert [sorted(row[:n]) for row, n in zip(rows.sets.ids_RK.tolist(), rows.sets.counts_R, strict=True)] == [
        *([2, 4], [5], [1, 6])
    ]
    sent = decode_top_k(body[8 + 6 :])
    np.testing.assert_allclose(np.exp(sent.tail_T), [0.1, 0.001, 0.25], rtol=2e-3)
