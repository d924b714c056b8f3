"""What servers say about their weights, compared."""

from __future__ import annotations

import math

import pytest

from stillhouse.weights.checks import Canary, CanaryWatch, Precision, differences, parse_checksums


def test_a_reply_gives_the_checksums_of_each_rank() -> None:
    reply = b'{"success":true,"ranks":[{"checksums":{"a":"1"},"per_gpu_checksum":"x"},{"checksums":{"a":"2"}}]}'
    assert parse_checksums(reply) == [{"a": "1"}, {"a": "2"}]


def test_a_reply_without_checksums_is_none() -> None:
    assert parse_checksums(b'{"success":true,"message":"Success."}') is None
    assert parse_checksums(b"not json") is None


def test_differences_are_found_rank_by_rank() -> None:
    assert differences([{"a": "1"}, {"b": "1"}], [{"a": "1"}, {"b": "2", "c": "3"}]) == ["b", "c"]
    assert differences([{"a": "1"}], [{"a": "1"}]) == []
    assert differences([{"a": "1"}], []) == ["1 ranks, then 0"]


OURS = (-1.0, -2.0, -3.0, -4.0)


def canary(*logprobs: float, exact: bool = True) -> Canary:
    return Canary(token_ids=(1, 2, 3, 4, 5), logprobs=logprobs, exact=exact)


@pytest.mark.parametrize(
    ("exact", "precision", "apart", "right"),
    [
        (True, "float32", 1e-4, True),
        (True, "float32", 5e-3, False),
        (False, "float32", 5e-3, True),  # rounded where the learner computes
        (False, "float32", 0.5, False),
        (True, "bfloat16", 0.1, True),
        (True, "bfloat16", 0.5, False),
        (False, "bfloat16", 0.5, False),
        (True, "float16", 0.03, True),
        (True, "float16", 0.1, False),
        (False, "float16", 0.1, True),  # the learner's own products may be in bfloat16
        (False, "quantized", 0.5, True),
        (False, "quantized", 1.0, False),
        (True, "float32", math.nan, False),
    ],
)
def test_a_canary_sings_as_like_as_the_precision_allows(
    exact: bool, precision: Precision, apart: float, right: bool
) -> None:
    said = [logprob - apart for logprob in OURS]
    wrong = CanaryWatch().why_wrong(canary(*OURS, exact=exact), said, precision)
    assert (wrong is None) is right


def test_a_server_that_stands_still_while_the_learner_moves_is_found_before_they_are_far_apart() -> None:
    watch, right = CanaryWatch(), CanaryWatch()
    n_passed = 0
    for n_passed in range(20):
        ours = [logprob - 0.01 * n_passed for logprob in OURS]
        still = [logprob + 0.02 for logprob in OURS]
        assert right.why_wrong(canary(*ours), [logprob + 0.02 for logprob in ours], "bfloat16") is None
        if wrong := watch.why_wrong(canary(*ours), still, "bfloat16"):
            assert "does not use the weights that are sent" in wrong
            break
    assert n_passed == 3, "0.03 nats are more than a tenth of what rounding may explain"


def test_one_that_stands_still_as_the_learner_does_is_right() -> None:
    watch = CanaryWatch()
    assert not any(watch.why_wrong(canary(*OURS), OURS, "float32") for _ in range(9))
