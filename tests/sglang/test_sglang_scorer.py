"""Grading on a real SGLang server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from stillhouse.engines.base import ScoreOptions, ScoreRequest
from stillhouse.engines.http.link import ServerLost
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.scorer import SGLangScorer
from stillhouse.sglang_server.servers import Servers, SGLangServer
from tests.sglang.conftest import READY_S, TEACHER, TOLERANCE, VOCAB, Reference
from tests.teachers.test_other_tokenizer import expect_what_the_embedded_one_sends
from tests.teachers.tiny_tokenizers import far_model


@pytest.fixture
def scorer(teacher: SGLangServer) -> Iterator[SGLangScorer]:
    scorer = SGLangScorer(teacher.url, SGLangConfig(), vocab_size=VOCAB)
    yield scorer
    scorer.close()


def random_ids(n: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 256, n).astype(np.int32)


def test_grades_are_those_of_transformers_in_the_order_asked(
    scorer: SGLangScorer, teacher_reference: Reference
) -> None:
    requests = [ScoreRequest(random_ids(2 + 5 * i, i), 1 + 2 * i) for i in range(30)]
    results = scorer.score(requests)

    for asked, result in zip(requests, results, strict=True):
        expected = teacher_reference.of_tokens(asked.token_ids.tolist(), asked.start)
        assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert result.top_ids is None


def test_the_likeliest_tokens_are_those_of_transformers(scorer: SGLangScorer, teacher_reference: Reference) -> None:
    ids = random_ids(40)
    (result,) = scorer.score([ScoreRequest(ids, 9)], ScoreOptions(top_k=5))
    expected = teacher_reference.logprobs(ids.tolist(), 9).topk(5)

    assert result.top_ids is not None and result.top_logprobs is not None
    assert result.top_logprobs == pytest.approx(expected.values.numpy(), abs=TOLERANCE)
    assert (result.top_ids == expected.indices.numpy()).mean() > 0.98  # equals may change places


def test_given_tokens_are_graded_at_their_own_places(scorer: SGLangScorer, teacher_reference: Reference) -> None:
    rng = np.random.default_rng(4)
    asked = [
        ScoreRequest(ids, start, top_ids=rng.integers(0, VOCAB, (len(ids) - start, 7)).astype(np.int32))
        for ids, start in ((random_ids(200, 1), 3), (random_ids(70, 2), 6), (random_ids(12, 3), 11))
    ]
    asked.append(ScoreRequest(random_ids(9), 9, top_ids=np.zeros((0, 7), np.int32)))
    for request, result in zip(asked, scorer.score(asked), strict=True):
        rows = teacher_reference.logprobs(request.token_ids.tolist(), request.start)
        assert request.top_ids is not None and result.top_logprobs is not None
        expected = rows.gather(1, torch.from_numpy(request.top_ids).long()).numpy()
        np.testing.assert_array_equal(result.top_ids, request.top_ids)
        np.testing.assert_allclose(result.top_logprobs, expected, atol=TOLERANCE)
        tokens = teacher_reference.of_tokens(request.token_ids.tolist(), request.start)
        np.testing.assert_allclose(result.logprobs, tokens, atol=TOLERANCE)


def test_a_student_with_another_tokenizer_gets_what_the_embedded_teacher_sends(
    scorer: SGLangScorer, tmp_path: Path
) -> None:
    expect_what_the_embedded_one_sends(scorer, far_model(tmp_path), TEACHER, top_k=6)


def test_a_growing_rollout_is_graded_from_where_it_grew(scorer: SGLangScorer, teacher_reference: Reference) -> None:
    ids = random_ids(400, seed=11)
    before = scorer.stats
    for end in range(100, 401, 50):
        (result,) = scorer.score([ScoreRequest(ids[:end], end - 50)])
        expected = teacher_reference.of_tokens(ids[:end].tolist(), end - 50)
        assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)
    after = scorer.stats

    cached = after["prompt_tokens_cached_total"] - before["prompt_tokens_cached_total"]
    assert cached >= sum(end - 52 for end in range(150, 401, 50))  # all but the first piece found its prefix


def test_the_last_token_of_the_vocabulary_is_graded_like_any_other(
    scorer: SGLangScorer, teacher_reference: Reference
) -> None:
    ids = [65, VOCAB - 1, 66, VOCAB - 1, 67]
    (result,) = scorer.score([ScoreRequest(np.array(ids, np.int32), 1)])

    np.testing.assert_allclose(result.logprobs, teacher_reference.of_tokens(ids, 1), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("ids", "start", "said"),
    [
        ([1, VOCAB, 2], 1, "outside the vocabulary"),
        ([1, 2], 0, "1 <= start"),
        ([1] * 1020, 1, "takes up to"),
    ],
)
def test_what_would_hurt_the_server_is_refused_before_it_is_sent(
    scorer: SGLangScorer, ids: list[int], start: int, said: str
) -> None:
    good = ScoreRequest(random_ids(8), 4)
    with pytest.raises(ValueError, match=said):
        scorer.score([good, ScoreRequest(np.array(ids, np.int32), start)])
    assert len(scorer.score([good])[0].logprobs) == 4


def test_a_killed_server_is_an_error_in_time(servers: Servers) -> None:
    server = servers.start("doomed-teacher", TEACHER)
    servers.wait_ready([server], READY_S)
    scorer = SGLangScorer(server.url, SGLangConfig(start_timeout_s=1.0, health_every_s=0.1), vocab_size=VOCAB)
    request = ScoreRequest(random_ids(30), 10)
    assert len(scorer.score([request] * 4)) == 4
    os.killpg(server.pid, signal.SIGKILL)

    with pytest.raises(ServerLost):
        scorer.score([request] * 4)
    scorer.close()
