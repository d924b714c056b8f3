"""Top-k sets of a teacher: what is asked of its engine, and what is sent."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stillhouse.builtin import STUDENT_DIR
from stillhouse.engines.base import LOGPROBS_ONLY, ScoreOptions, ScoreRequest, ScoreResult
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.protocol import messages as m
from stillhouse.protocol.errors import EncodeError
from stillhouse.protocol.payloads.student_sets import encode_top_ids
from stillhouse.protocol.payloads.top_k import TopKEncoder
from stillhouse.protocol.topk_codec import decode_top_k
from stillhouse.teachers.config import TeacherConfig
from tests.teachers.test_worker import TEACHER, end, teacher
from tests.wire import ScriptedBuffer

VOCAB = 312
"""Tokens of the built-in tokenizer; its models have 320 rows."""


def sets_encoder(config: TeacherConfig, vocab: int, rows: int) -> TopKEncoder:
    encoder = config.sends.encoder(SimpleNamespace(vocab_size=rows), vocab)
    assert isinstance(encoder, TopKEncoder)
    return encoder


@pytest.mark.parametrize(
    ("fields", "vocab", "expected"),
    [
        ({"top_k": 16}, 50_000, (24, 16, False)),
        ({"top_k": 16}, 384, (400, 16, True)),
        ({"top_k": 16, "tail": "pooled"}, 384, (24, 16, False)),
        ({"top_k": 16, "tail": "each"}, 4_000, (4_016, 16, True)),
        ({"top_k": 4_096, "tail": "pooled"}, 300, (316, 4_096, False)),
    ],
)
def test_what_is_asked_of_the_engine(fields: dict[str, object], vocab: int, expected: tuple[int, int, bool]) -> None:
    encoder = sets_encoder(TeacherConfig(**fields), vocab, vocab + 16)  # pyright: ignore[reportArgumentType]
    assert (encoder.options.top_k, encoder.max_k, encoder.each) == expected


def test_padding_of_the_embedding_is_never_sent() -> None:
    """Ids 9 and 10 are no tokens; the others keep their order, and all rows as many columns."""
    encoder = sets_encoder(TeacherConfig(top_k=2, tail="pooled", top_mass=1.0), 9, 11)
    ids = np.array([[9, 3, 10, 4], [1, 2, 3, 10]], np.int32)
    logprobs = np.log(np.array([[0.3, 0.25, 0.2, 0.1], [0.4, 0.3, 0.1, 0.05]], np.float32))
    top = decode_top_k(encoder.encode(ScoreResult(np.zeros(2, np.float32), ids, logprobs), slice(None), None))
    assert top.padded()[0].tolist() == [[3, 4], [1, 2]]
    with pytest.raises(EncodeError, match="past the vocabulary of 9 tokens"):
        encoder.encode(ScoreResult(np.zeros(1, np.float32), ids[:1, :1], logprobs[:1, :1]), slice(None), None)


@pytest.mark.parametrize("fields", [{"top_k": 20}, {"top_k": 8, "tail": "pooled"}])
def test_a_teacher_sends_the_likeliest_tokens_of_the_range_beside_the_log_probs(fields: dict[str, object]) -> None:
    """One item that may be trained in part, and one not at all: an empty payload, and log-probs as ever."""
    scorer = TorchScorer.load(STUDENT_DIR, TeacherConfig(device="cpu"))
    random = np.random.default_rng(0)
    config = TeacherConfig(device="cpu", **fields)  # pyright: ignore[reportArgumentType]
    items = (m.ScoreItem(1, "train-0-0-0", 0, 12, 4, 9), m.ScoreItem(2, "eval-0-0-0", 3, 8, 3, 3))
    ids = [random.integers(0, 300, item.end).astype(np.int32) for item in items]
    with ScriptedBuffer() as peer, teacher(peer.address, scorer, config, vocab_tokens=VOCAB) as (ended, _):
        peer.send(m.ScoreWork(items), ids, to=TEACHER)
        (got,) = peer.expect(m.Scores)
        end(peer, ended)
    message, (logprobs, payload, other_logprobs, nothing) = got
    assert message == m.Scores((1, 2), True)
    exact = scorer.score([ScoreRequest(ids[0], 1)], ScoreOptions(top_k=320))[0]
    assert exact.top_ids is not None and exact.top_logprobs is not None
    np.testing.assert_allclose(logprobs[1:], exact.logprobs, atol=1e-4)
    assert len(other_logprobs) == 5 and len(decode_top_k(nothing.tobytes()).counts_T) == 0
    top = decode_top_k(payload.tobytes())
    assert len(top.counts_T) == 5
    decoded_ids, decoded = top.padded()
    for t in range(5):
        by_id = dict(zip(exact.top_ids[3 + t].tolist(), exact.top_logprobs[3 + t].tolist(), strict=True))
        n = int(top.counts_T[t])
        assert n == VOCAB if fields["top_k"] == 20 else n <= 8
        assert decoded_ids[t, decoded[t].argmax()] == exact.top_ids[3 + t, 0]
        likely = [i for i in range(n) if by_id[int(decoded_ids[t, i])] > -4]
        for i in likely:
            assert decoded[t, i] == pytest.approx(by_id[int(decoded_ids[t, i])], abs=0.15)


def test_numbers_that_cannot_be_sent_fail_their_item_with_a_reason() -> None:
    class Unsorted(TorchScorer):
        def score(self, requests, options=LOGPROBS_ONLY):  # type: ignore[no-untyped-def]  # pyright: ignore
            results = super().score(requests, options)
            for result in results:
                if result.top_logprobs is not None:
                    result.top_logprobs[:] = result.top_logprobs[:, ::-1]
            return results

    scorer = Unsorted.load(STUDENT_DIR, TeacherConfig(device="cpu"))
    with (
        ScriptedBuffer() as peer,
        teacher(peer.address, scorer, TeacherConfig(device="cpu", top_k=5, tail="pooled"), vocab_tokens=VOCAB) as (
            ended,
            _,
        ),
    ):
        peer.send(m.ScoreWork((m.ScoreItem(1, "train-0-0-0", 0, 4, 1, 4),)), [np.ones(4, np.int32)], to=TEACHER)
        (failed,) = peer.expect(m.ScoreFailed)
        end(peer, ended)
    assert failed.message.reason.startswith("top_k: the likeliest tokens are not in order")


# -------------------------------------------------------------------------------------------- the student's tokens


def test_the_students_tokens_are_scored_whatever_the_teacher_thinks_of_them() -> None:
    """Against transformers in float64: random sets, most of them of little mass, one with an id that is no token. One
    item without trainable tokens beside it, and a prompt of the teacher's own."""
    config = TeacherConfig(device="cpu", top_k=9, top_k_of="student")
    scorer = TorchScorer.load(STUDENT_DIR, config)
    random = np.random.default_rng(1)
    sets = [random.permutation(VOCAB)[: 1 + i % 4].astype(np.int32) for i in range(5)]
    sent = [np.append(sets[0], np.int32(VOCAB + 3)), *sets[1:]]
    items = (
        m.ScoreItem(1, "train-0-0-0", 0, 12, 6, 11, prompt_tokens=4, teacher_prompt_tokens=7, top_ids=True),
        m.ScoreItem(2, "eval-0-0-0", 3, 8, 3, 3),
    )
    ids = [random.integers(0, 300, item.context_tokens).astype(np.int32) for item in items]
    frames = [ids[0], np.frombuffer(encode_top_ids(sent), np.uint8), ids[1]]
    with ScriptedBuffer() as peer, teacher(peer.address, scorer, config, vocab_tokens=VOCAB) as (ended, _):
        peer.send(m.ScoreWork(items), frames, to=TEACHER)
        (got,) = peer.expect(m.Scores)
        end(peer, ended)
    message, (logprobs, payload, other_logprobs, nothing) = got
    assert message == m.Scores((1, 2), True)
    assert len(logprobs) == 12 and len(other_logprobs) == 5 and len(decode_top_k(nothing.tobytes()).counts_T) == 0
    top = decode_top_k(payload.tobytes())
    assert top.counts_T.tolist() == [len(one) for one in sets]
    told_ids, told = top.padded()
    plain = AutoModelForCausalLM.from_pretrained(STUDENT_DIR, dtype=torch.float64)
    with torch.no_grad():
        logprobs_LV = plain(input_ids=torch.from_numpy(ids[0]).long()[None]).logits[0].log_softmax(-1)
    for t, one in enumerate(sets):
        exact = {int(token): float(logprobs_LV[6 + t + 3 - 1, int(token)]) for token in one}  # the frame is 3 longer
        by_id = dict(zip(told_ids[t].tolist(), told[t].tolist(), strict=True))
        for token, logprob in exact.items():
            assert by_id[token] == pytest.approx(max(logprob, -40.0), abs=0.02)
        outside = 1.0 - sum(map(math.exp, exact.values()))
        assert math.exp(top.tail_T[t]) == pytest.approx(outside, abs=0.004)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (None, "0 bytes"),
        ([[1]], "got 1, expected 2"),
        ([[1], [VOCAB]], "past the vocabulary of 312"),
        ([[1], [4, 4]], "twice"),
    ],
)
def test_an_item_whose_sets_are_missing_or_wrong_fails_with_a_reason(sets: list[list[int]] | None, says: str) -> None:
    config = TeacherConfig(device="cpu", top_k=5, top_k_of="student")
    scorer = TorchScorer.load(STUDENT_DIR, config)
    frames = [np.ones(4, np.int32)]
    if sets is not None:
        frames.append(np.frombuffer(encode_top_ids([np.array(one, np.int32) for one in sets]), np.uint8))  # pyright: ignore
    with ScriptedBuffer() as peer, teacher(peer.address, scorer, config, vocab_tokens=VOCAB) as (ended, _):
        item = m.ScoreItem(1, "train-0-0-0", 0, 4, 2, 4, top_ids=sets is not None)
        peer.send(m.ScoreWork((item,)), frames, to=TEACHER)
        (failed,) = peer.expect(m.ScoreFailed)
        end(peer, ended)
    assert says in failed.message.reason


@pytest.mark.parametrize(("fields", "says"), [({"top_k": 0}, "top_k = 0"), ({"tail": "each"}, "tail is each")])
def test_settings_under_which_the_students_sets_do_nothing_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TeacherConfig(**({"top_k": 8, "top_k_of": "student"} | fields))  # pyright: ignore[reportArgumentType]
