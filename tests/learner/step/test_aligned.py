"""Scores and top-k sets of a teacher with another tokenizer: the gradient of a step against a plain model, span by span
in float64, its expectation by enumeration, and bit for bit with the tokenizer of the student."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem, UnreadableScores
from stillhouse.learner.objectives.distributions import TopKTeacher, reverse_kl
from stillhouse.learner.objectives.losses import make_objective, token_loss
from stillhouse.learner.objectives.options import Distributions
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol.errors import MalformedMessage
from stillhouse.protocol.payloads.aligned import (
    ALONE,
    EDGE,
    END,
    INSIDE,
    NOT_SCORED,
    SET,
    SPECIAL,
    AlignedEncoder,
    AlignedScores,
    AlignedSets,
    SetsEncoder,
    decode_aligned,
    encode_aligned,
    plain,
)
from stillhouse.protocol.payloads.kind import PayloadPart, ScoreOptions, ScoreResult
from stillhouse.protocol.payloads.top_k import no_sets
from stillhouse.protocol.topk_codec import decode_top_k, encode_given
from tests.learner.conftest import make_item, remade, tiny_student
from tests.learner.objectives.test_losses import token_inputs
from tests.learner.settings import learner_config, objective_config
from tests.learner.step.gradients import PLAIN, assert_close, of_loss, step_gradients, stepped
from tests.learner.step.payload_batches import VOCAB, teacher_logprobs, with_sets

IN, E = int(INSIDE), int(END)
SI, SE, ONE = IN + int(SET), E + int(SET), E + int(SET) + int(ALONE)


def trainer_of(model: PreTrainedModel, k: int, **fields: Any) -> Trainer:
    """With `k` tokens in a set; 0: scores of spans alone."""
    config = learner_config(**PLAIN, **{"divergence": "reverse_kl" if k else "k1", "logprob_chunk_tokens": 2, **fields})
    return Trainer(model, config, total_steps=10, vocab_tokens=VOCAB)


def with_spans(one: TrainItem, codes: Sequence[int], k: int) -> TrainItem:
    """As the buffer hands it on: `codes` of the tokens from the first trained one to the last, and where they say so a
    set of the `k` likeliest tokens of `teacher_logprobs`."""
    trained = np.flatnonzero(one.train_mask_L)
    start, end = int(trained[0]), int(trained[-1]) + 1
    code_T = np.array(codes, np.uint8) if k else plain(np.array(codes, np.uint8))
    sets = None
    if k:
        places = start + np.flatnonzero(code_T & SET)
        logprobs_SV = teacher_logprobs(one, "default")[places]
        ids_SK = np.argsort(-logprobs_SV, axis=1)[:, :k].astype(np.int32)
        logprobs_SK = np.take_along_axis(logprobs_SV, ids_SK, 1)
        sets = encode_given(ids_SK, logprobs_SK, np.full(len(places), k), vocab_size=VOCAB, logprob_bits=16)
    teacher_ML = one.teacher_ML.copy()
    teacher_ML[:, start:end][:, plain(code_T) > END] = NOT_SCORED
    body = encode_aligned(code_T) if sets is None else encode_aligned(code_T, sets)
    return remade(one, [(0, start, end, body)], teacher_ML=teacher_ML)


def items_of(k: int) -> tuple[list[TrainItem], list[list[tuple[list[int], int]]]]:
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


def slow_loss(model: PreTrainedModel, one: TrainItem, spans: list[tuple[list[int], int]], k: int) -> Tensor:
    """The definition: at the first token of a span, the reverse KL over the k sent tokens and all others; and
    w (S - Q - first) S for a span of which the set does not say all."""
    ids_L = torch.from_numpy(one.tokens_L).long()
    logits_LV = model(input_ids=ids_L[None]).logits[0]
    logprobs_LV, whole_LV = torch.log_softmax(logits_LV[:, :VOCAB], dim=-1), torch.log_softmax(logits_LV, dim=-1)
    q_LV = teacher_logprobs(one, "default")
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, code in spans:
        t, first = tokens[0], 0.0
        if k and code & SET:
            sent = np.argsort(-q_LV[t])[:k]
            q_B = np.append(np.exp(q_LV[t][sent]), 1.0 - np.exp(q_LV[t][sent]).sum())
            p_V = logprobs_LV[t - 1].exp()
            p_B = torch.cat([p_V[sent], (1.0 - p_V[sent].sum())[None]])
            ratio_B = p_B.log() - torch.from_numpy(np.log(q_B))
            loss = loss + (p_B * ratio_B).sum()
            (where,) = np.nonzero(sent == int(ids_L[t]))
            first = float(ratio_B[int(where[0]) if len(where) else -1].detach())
        if not (k and code & ALONE):
            s = sum((whole_LV[i - 1, ids_L[i]] for i in tokens), torch.zeros((), dtype=torch.float64))
            q, mu = (sum(float(x) for x in row[tokens]) for row in (one.teacher_ML[0], one.behaviour_L))
            weight = min(float(np.exp(s.item() - mu)), 2.0)
            loss = loss + weight * (s.item() - q - first) * s
    return loss


@pytest.mark.parametrize(("pack_tokens", "k"), [(7, 3), (64, 12), (7, 0), (64, 0)])
def test_gradient_equals_a_slow_reference(pack_tokens: int, k: int) -> None:
    items, spans = items_of(k)
    got, metrics = stepped(trainer_of(tiny_student(dtype=torch.float64), k, pack_tokens=pack_tokens), items)
    model = tiny_student("eager", torch.float64)
    loss = sum((slow_loss(model, *one, k) for one in zip(items, spans, strict=True)), torch.zeros(()))
    expected = of_loss(model, loss / sum(one.n_trained for one in items))
    assert_close(got, expected, atol=2e-5 if k else 1e-6, rtol=1e-3 if k else 1e-5)
    if not k:
        scored = sum(len(span) for of_item in spans for span, _ in of_item)
        assert metrics.tokens_unscored == metrics.tokens - scored
        assert metrics.reverse_kl == pytest.approx(metrics.divergence, rel=1e-5)


def test_with_the_students_tokenizer_the_gradient_is_that_of_its_scores_and_sets() -> None:
    """Bit for bit: each span is one token, and its set says all."""
    made = [make_item("a", [0, 0, 1, 1, 1], vocab=VOCAB), make_item("b", [0, 1, 1, 0, 0, 1], vocab=VOCAB)]
    theirs = [with_spans(one, [ONE] * int(np.ptp(np.flatnonzero(one.train_mask_L)) + 1), 5) for one in made]
    scores = [with_spans(one, [E] * int(np.ptp(np.flatnonzero(one.train_mask_L)) + 1), 0) for one in made]
    for k, ours, others in ((5, [with_sets(one, k=5) for one in made], theirs), (0, made, theirs), (0, made, scores)):
        one, other = (step_gradients(trainer_of(tiny_student(), k), items) for items in (ours, others))
        assert all(torch.equal(one[name], other[name]) for name in one)


def enumerated(sent: list[str], aa: float | None = None) -> tuple[list[tuple[Tensor, Tensor, Tensor, Tensor]], Tensor]:
    """A student with the tokens a, b and aa; a teacher with pairs. The next span is one of four texts; aa is written as
    one token or as two. The teacher's pairs count for a or b, and nothing for aa, which is in the tail; where aa is
    sent, its pair counts for that; where nothing is sent, spans have their scores alone. Returns what `of` does for
    every answer, and the exact gradient of

        KL = sum over answers y of p(y) (log p(y) - log Q(text of y)),

    after checking that the mean is that. `aa`: another logit for it."""
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
    names, rows = ["a", "b", "aa"], None
    if sent:
        set_K = torch.stack([shares[one] for one in sent])
        tail = torch.log1p(-set_K.exp().sum().clamp(max=1 - 1e-7))[None]
        ids = torch.tensor([[names.index(one) for one in sent]])
        rows = TopKTeacher(ids, set_K[None], tail, torch.tensor([len(sent)]))
    answers = [(2,), *itertools.product((0, 1), repeat=2)]
    objective = make_objective(objective_config(divergence="reverse_kl" if sent else "k1"), max_new_tokens=4)

    def of(answer: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(p, KL, gradient of one sample with sets, and with the sampled span alone)."""
        at, width = [0, 1 + answer[0]][: len(answer)], [3, 2]
        s = torch.stack([torch.log_softmax(logits[row, : width[k]], 0)[answer[k]] for k, row in enumerate(at)])
        q, n = teacher[pairs.index("aa" if answer == (2,) else "".join("ab"[i] for i in answer))], len(answer)
        more: dict[str, Any] = {"span_N": torch.zeros(n, dtype=torch.int64)}
        of_sets = torch.zeros(3, 3, dtype=torch.float64)
        if rows is not None:
            z_1V = logits.detach()[:1]
            first = rows.log_ratio(z_1V.clone(), slice(0, 1), torch.tensor([answer[0]]))
            more["rest_MN"] = torch.ones((1, n), dtype=torch.bool)
            more["first_MN"] = torch.cat([first, first.new_zeros(n - 1)])[None]
            of_sets[:1] = rows.compare(z_1V.clone(), slice(0, 1), lambda p, q: reverse_kl(p, q, Distributions()))[1]
        inputs = token_inputs(s.detach(), (q / n).expand(1, n), torch.ones((1, n), dtype=torch.bool), **more)
        rest = token_loss(s, inputs, objective, 1)
        by_sets = torch.autograd.grad(rest.loss, logits, retain_graph=True)[0] + of_sets
        by_span = torch.autograd.grad((s.sum() - q).detach() * s.sum(), logits, retain_graph=True)[0]
        p = s.sum().exp()
        return p, p * (s.sum() - q), by_sets, by_span

    found = [of(answer) for answer in answers]
    exact = torch.autograd.grad(torch.stack([kl for _, kl, _, _ in found]).sum(), logits)[0]
    mean = torch.stack([p.detach() * by_sets for p, _, by_sets, _ in found]).sum(0)
    torch.testing.assert_close(mean, exact, atol=1e-6 if sent else 1e-12, rtol=0)
    return found, exact


@pytest.mark.parametrize("sent", [[], ["a", "b"], ["a"], ["a", "b", "aa"]], ids=str)
def test_in_expectation_it_is_the_reverse_kl_of_spans_whatever_is_sent(sent: list[str]) -> None:
    enumerated(sent)


def test_where_sets_have_what_the_student_writes_the_variance_is_smaller() -> None:
    found, exact = enumerated(["a", "b"], aa=-8.0)
    by_sets, by_span = (
        sum(float(one[0].detach() * (one[which] - exact).square().sum()) for one in found) for which in (2, 3)
    )
    assert by_sets < 0.9 * by_span


def test_payloads_that_cannot_be_read() -> None:
    item = make_item("a", [0, 0, 1, 1, 1], vocab=VOCAB)
    for one, k, why in (
        (with_spans(item, [SI, SI, E], 3), 3, "first token of a span"),
        (with_spans(item, [SI, IN, ONE], 3), 3, "first token of a span"),
        (item, 3, "sent no top-k set"),
        (with_spans(item, [IN, IN, IN], 0), 0, r"rollout 'a': teacher 'default'.*without an end"),
    ):
        with pytest.raises(UnreadableScores, match=why):
            trainer_of(tiny_student(), k).step([one])
    with pytest.raises(MalformedMessage, match="0 sets for 1 tokens"):
        AlignedSets.n_tokens(encode_aligned(np.array([SE], np.uint8), no_sets(VOCAB)))
    with pytest.raises(MalformedMessage, match="a span without an end"):
        decode_aligned(encode_aligned(np.array([INSIDE, SPECIAL], np.uint8)))
    with pytest.raises(MalformedMessage, match="code 99"):
        decode_aligned(encode_aligned(np.array([99], np.uint8)))
    with pytest.raises(MalformedMessage, match="a byte per token"):
        AlignedScores.n_tokens(encode_aligned(np.zeros(3, np.uint8))[:-1])


def test_a_span_that_the_trained_range_cuts_is_not_sent() -> None:
    codes = np.array([INSIDE, INSIDE, END, END, INSIDE, END], np.uint8)
    result = ScoreResult(np.zeros(6, np.float32), codes=codes)
    encoder = AlignedEncoder()
    assert decode_aligned(encoder.encode(result, slice(1, 5), None))[0].tolist() == [EDGE, EDGE, END, EDGE]
    assert decode_aligned(encoder.encode(result, slice(0, 6), None))[0].tolist() == codes.tolist()


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
    kept = zip(rows.sets.ids_RK.tolist(), rows.sets.counts_R, strict=True)
    assert [sorted(row[:n]) for row, n in kept] == [[2, 4], [5], [1, 6]]
    sent = decode_top_k(body[8 + 6 :])
    np.testing.assert_allclose(np.exp(sent.tail_T), [0.1, 0.001, 0.25], rtol=2e-3)
