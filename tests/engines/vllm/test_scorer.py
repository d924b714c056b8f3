"""Replies of vLLM's /inference/v1/generate about prompts, and wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from stillhouse.engines.base import ScoreRequest
from stillhouse.engines.http.stream import StreamError
from stillhouse.engines.vllm.scorer import read_scores

REQUEST = ScoreRequest(np.array([7, 3, 5, 9], np.int32), 2)


def sets() -> list[Any]:
    """As the server writes them: the token itself and the two likeliest ones, in no order."""
    third = {"5": {"logprob": -4.0, "rank": 9, "decoded_token": None}, "2": {"logprob": -0.7}, "3": {"logprob": -0.9}}
    return [None, {"3": {"logprob": -1.0}}, third, {"9": {"logprob": -0.2}, "1": {"logprob": -2.5}}]


def reply(prompt_logprobs: list[Any] | None) -> bytes:
    choice = {"index": 0, "logprobs": None, "finish_reason": "length", "token_ids": [4]}
    return msgspec.json.encode(
        {"request_id": "generate-tokens-1", "choices": [choice], "prompt_logprobs": prompt_logprobs}
    )


def test_scores_and_sets_are_read_from_the_start_on() -> None:
    result = read_scores(reply(sets()), REQUEST, 2, 10)
    assert result.logprobs.tolist() == pytest.approx([-4.0, -0.2])
    assert result.top_ids is not None and result.top_logprobs is not None
    assert result.top_ids.tolist() == [[2, 3], [9, 1]]
    assert result.top_logprobs[0].tolist() == pytest.approx([-0.7, -0.9])
    assert read_scores(reply(sets()), REQUEST, 0, 10).top_ids is None


def put(at: int, entries: dict[str, Any] | None) -> Callable[[list[Any]], object]:
    return lambda sets: sets.__setitem__(at, entries)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (list[Any].pop, "log-probs of 3 tokens, expected 4"),
        (put(3, {"8": {"logprob": -0.2}, "1": {"logprob": -2.5}}), "no log-prob of a token that was sent"),
        (put(3, None), "no log-prob of a token|no score"),
        (put(3, {"9": {"logprob": 0.5}, "1": {"logprob": -2.5}}), "impossible|positive"),
        (put(3, {"9": {"logprob": -9999.0}, "1": {"logprob": -2.5}}), "not_finite"),
        (put(3, {"9": {"logprob": -0.2}}), "fewer than 2"),
        (put(3, {"9": {"logprob": -0.2}, "11": {"logprob": -0.5}}), "impossible"),
    ],
)
def test_wrong_replies_are_no_scores(change: Callable[[list[Any]], object], said: str) -> None:
    wrong = sets()
    change(wrong)
    with pytest.raises(StreamError, match=said):
        read_scores(reply(wrong), REQUEST, 2, 10)


@pytest.mark.parametrize("text", [b"{", reply(None), b'{"error": {"message": "no"}}'])
def test_what_has_no_log_probs_is_no_score(text: bytes) -> None:
    with pytest.raises(StreamError, match="the server said"):
        read_scores(text, REQUEST, 0, 10)
