from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from stillhouse.engines.torch.sampling import NextToken, RowSampling, check_sampling, draw_uniforms
from stillhouse.protocol.messages import Sampling
from tests.engines.torch.generation import logprobs_of, truncated

V = 7
LOGITS = torch.tensor([1.5, -0.5, 0.7, 0.6, -2.0, 2.2, 0.1])
CHI_SQUARE_LIMIT = 27.9
"""0.9999 quantile at 6 degrees of freedom; fewer degrees have a lower one."""


def rows(n: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> RowSampling:
    truncated = top_k > 0 or top_p < 1 or min_p > 0
    return RowSampling(
        torch.full((n,), 1 / temperature) if temperature not in (0, 1) else None,
        torch.full((n,), top_k or 10**6) if truncated else None,
        torch.full((n,), top_p if top_p < 1 else 2.0, dtype=torch.float64) if truncated else None,
        torch.ones(n, dtype=torch.bool) if temperature == 0 else None,
        torch.full((n,), min_p) if min_p else None,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 5, "top_p": 0.9},
    ],
)
def test_tokens_come_as_often_as_their_reported_probabilities_say(settings: dict[str, Any]) -> None:
    n = 20_000
    ids, logprobs = NextToken(LOGITS.expand(n, V), rows(n, **settings)).sample(torch.from_numpy(draw_uniforms(3, 0, n)))
    expected = logprobs_of(LOGITS.expand(V, V), torch.arange(V), Sampling(**settings)).exp()
    counts = torch.bincount(ids, minlength=V)
    assert not counts[expected == 0].any()
    allowed = expected > 0
    chi_square = ((counts - n * expected)[allowed] ** 2 / (n * expected[allowed])).sum()
    assert chi_square < CHI_SQUARE_LIMIT
    torch.testing.assert_close(logprobs, expected.log()[ids])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 40},
        {"top_p": 0.3},
        {"temperature": 0.5, "top_k": 9, "top_p": 0.95},
        {"temperature": 1.5, "top_k": 90, "top_p": 0.95, "min_p": 0.1},
    ],
)
def test_truncation_is_that_of_transformers_on_a_wide_vocabulary(settings: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(64, 4000) * 3
    following = NextToken(logits, rows(64, **settings))
    ids, logprobs = following.sample(torch.from_numpy(draw_uniforms(seed, 0, 64)))
    torch.testing.assert_close(logprobs, logprobs_of(logits, ids, Sampling(**settings)), atol=1e-5, rtol=0)
    allowed_BV = truncated(logits, Sampling(**settings)) > -torch.inf
    for row, kept in enumerate(following.kept()):
        assert kept.tolist() == allowed_BV[row].nonzero()[:, 0].tolist()


def test_greedy_takes_the_likeliest_with_its_probability_at_temperature_1() -> None:
    ids, logprobs = NextToken(LOGITS[None], rows(1, temperature=0)).sample(torch.tensor([0.999], dtype=torch.float64))
    assert ids.tolist() == [5]
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(-1)[5:6])


def test_the_last_random_number_does_not_fall_on_an_impossible_token() -> None:
    logits = torch.full((1, 1000), -200.0)
    logits[0, 17] = 0.0
    largest = torch.from_numpy(np.minimum(np.ones(1), draw_uniforms(0, 0, 1) * 0 + 1.0 - 2.0**-50))
    ids, logprobs = NextToken(logits, rows(1)).sample(largest)
    assert ids.tolist() == [17] and logprobs.tolist() == [0.0]


def kept_by_transformers(logits_BV: torch.Tensor, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Probabilities [B, V] in float64, 0 where the token is cut off."""
    unused: Any = None
    scores: Any = logits_BV
    if top_k:
        scores = TopKLogitsWarper(top_k)(unused, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(unused, scores)
    return scores.double().softmax(dim=-1)


@pytest.mark.parametrize("likely", [0, 40_003, 99_999])
def test_rare_tokens_of_a_large_vocabulary_keep_their_share(likely: int) -> None:
    """In a float32 running sum 10^5 tokens of probability 10^-8 each, beside a likely one, blur into a few steps.
    Uniform numbers that are one share apart must find one token after the other."""
    n_ids, n = 100_000, 100
    logits = torch.zeros(1, n_ids)
    logits[0, likely] = np.log(1e8)
    share = 1 / (1e8 + n_ids - 1)
    for first in (501, 50_003, 99_005):
        wanted = torch.arange(first, first + n)
        uniforms = share * (wanted.double() + 0.5) + (wanted > likely) * share * (1e8 - 1)
        ids, _ = NextToken(logits.expand(n, -1), rows(n)).sample(uniforms)
        assert int((ids - wanted).abs().max()) <= 12  # of 10^5: where a likely token's own rounding moves all others
        assert int((ids.diff() - 1).abs().max()) <= 1
        assert len(ids.unique()) >= n - 2


def test_nan_logits_give_a_nan_logprob_for_their_row_only() -> None:
    logits = LOGITS.repeat(2, 1)
    logits[0, 3] = float("nan")
    ids, logprobs = NextToken(logits, rows(2)).sample(torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert logprobs.isnan().tolist() == [True, False] and int(ids.max()) < V


@pytest.mark.parametrize(
    "settings",
    [
        *({"temperature": value} for value in (-0.1, float("nan"), float("inf"))),
        *({"top_p": value} for value in (0.0, 1.1, float("nan"))),
        {"top_k": -1},
    ],
)
def test_settings_that_define_no_distribution_are_refused(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        check_sampling(Sampling(**settings))
