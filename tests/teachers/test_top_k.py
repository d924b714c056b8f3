"""Top-k sets of a teacher: what is asked of its engine, and what is sent."""

from __future__ import annotations

import numpy as np
import pytest

from builtin import STUDENT_DIR
from engines.base import ScoreRequest
from engines.torch.scorer import TorchScorer
from protocol import messages as m
from protocol.errors import EncodeError
from protocol.topk_codec import REST_BITS, decode_top_k
from teachers.config import TeacherConfig
from teachers.top_k import TopKSets
from tests.teachers.test_worker import TEACHER, end, teacher
from tests.wire import ScriptedBuffer

VOCAB = 312
"""Tokens of the built-in tokenizer; its models have 320 rows."""


@pytest.mark.parametrize(
    ("fields", "vocab", "expected"),
    [
        ({"top_k": 16}, 50_000, (24, 16, 0)),
        ({"top_k": 16}, 384, (400, 16, REST_BITS)),
        ({"top_k": 16, "tail": "pooled"}, 384, (24, 16, 0)),
        ({"top_k": 16, "tail": "each"}, 4_000, (4_016, 16, REST_BITS)),
        ({"top_k": 4_096, "tail": "pooled"}, 300, (316, 4_096, 0)),
    ],
)
def test_what_is_asked_of_the_engine(fields: dict[str, object], vocab: int, expected: tuple[int, int, int]) -> None:
    sets = TopKSets.of(TeacherConfig(**fields), vocab, vocab + 16)  # pyright: ignore[reportArgumentType]
    assert (sets.asked, sets.max_k, sets.rest_bits) == expected


def test_padding_of_the_embedding_is_never_sent() -> None:
    """Ids 9 and 10 are no tokens; the others keep their order, and all rows as many columns."""
    sets = TopKSets.of(TeacherConfig(top_k=2, tail="pooled", top_mass=1.0), 9, 11)
    ids = np.array([[9, 3, 10, 4], [1, 2, 3, 10]], np.int32)
    logprobs = np.log(np.array([[0.3, 0.25, 0.2, 0.1], [0.4, 0.3, 0.1, 0.05]], np.float32))
    top = decode_top_k(sets.payload(ids, logprobs))
    assert top.padded()[0].tolist() == [[3, 4], [1, 2]]
    with pytest.raises(EncodeError, match="past the vocabulary of 9 tokens"):
        sets.payload(ids[:1, :1], logprobs[:1, :1])


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
    exact = scorer.score([ScoreRequest(ids[0], 1)], top_k=320)[0]
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
        assert decoded_ids[t, 0] == exact.top_ids[3 + t, 0]
        likely = [i for i in range(n) if by_id[int(decoded_ids[t, i])] > -4]
        for i in likely:
            assert decoded[t, i] == pytest.approx(by_id[int(decoded_ids[t, i])], abs=0.15)


def test_numbers_that_cannot_be_sent_fail_their_item_with_a_reason() -> None:
    class Unsorted(TorchScorer):
        def score(self, requests, *, top_k=0):  # type: ignore[no-untyped-def]  # pyright: ignore
            results = super().score(requests, top_k=top_k)
            for result in results:
                if result.top_logprobs is not None:
                    result.top_logprobs[:] = result.top_logprobs[:, ::-1]
            return results

    scorer = Unsorted.load(STUDENT_DIR, TeacherConfig(device="cpu"))
    with (
        ScriptedBuffer() as peer,
        teacher(peer.address, scorer, TeacherConfig(device="cpu", top_k=5), vocab_tokens=VOCAB) as (ended, _),
    ):
        peer.send(m.ScoreWork((m.ScoreItem(1, "train-0-0-0", 0, 4, 1, 4),)), [np.ones(4, np.int32)], to=TEACHER)
        (failed,) = peer.expect(m.ScoreFailed)
        end(peer, ended)
    assert failed.message.reason.startswith("top_k: the likeliest tokens are not in order")
