"""Scores equal those of transformers for every way of asking; what cannot be graded is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stillhouse.engines.base import ScoreOptions, ScoreRequest, ScoringEngine
from stillhouse.engines.config import ScorerSettings
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.models.loading import ModelError
from stillhouse.protocol.messages import WeightsRef, WeightVersion
from stillhouse.weights.errors import SnapshotRefused
from stillhouse.weights.snapshot import write_snapshot

VOCAB, CONTEXT = 67, 48
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("teacher")
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def scorer(folder: Path) -> TorchScorer:
    return TorchScorer.load(folder, ScorerSettings(device="cpu", max_batch_tokens=40))


def _request(length: int, start: int, seed: int = 0) -> ScoreRequest:
    ids = np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)
    return ScoreRequest(ids, start)


def _expected(plain: PreTrainedModel, request: ScoreRequest) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of the asked tokens, and of the whole vocabulary at their positions, one by one."""
    ids = torch.from_numpy(request.token_ids).long()
    with torch.no_grad():
        logprobs_LV = torch.log_softmax(plain(input_ids=ids[None]).logits[0].double(), dim=-1).numpy()
    rows = [logprobs_LV[t - 1] for t in range(request.start, len(ids))]
    given = [row[int(ids[t])] for row, t in zip(rows, range(request.start, len(ids)), strict=True)]
    return np.array(given), np.array(rows)


def test_scores_equal_transformers_for_every_start_and_mixture(scorer: TorchScorer, plain: PreTrainedModel) -> None:
    engine: ScoringEngine = scorer
    requests = [_request(n, start, seed=n * 50 + start) for n in (2, 9, 30, 48) for start in (1, n // 2 + 1, n - 1)]
    results = engine.score(requests)
    assert len(results) == len(requests)
    for request, result in zip(requests, results, strict=True):
        given, _ = _expected(plain, request)
        assert result.logprobs.dtype == np.float32
        np.testing.assert_allclose(result.logprobs, given, atol=1e-4)


def test_growing_rollouts_under_longrope_are_each_scored_as_alone(tmp_path: Path) -> None:
    """Segments of one rollout, before and behind the length from which there are other frequencies (8), in one pack."""
    rope: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0, 9.0, 10.0, 11.0]}
    shape: dict[str, Any] = {**SHAPE, "original_max_position_embeddings": 8, "pad_token_id": None}
    Phi3ForCausalLM(
        Phi3Config(**shape, rope_parameters={**rope, "original_max_position_embeddings": 8})
    ).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = _request(30, 1).token_ids
    requests = [ScoreRequest(ids[:end], start, rollout_id="a") for start, end in ((3, 7), (7, 8), (8, 20), (20, 30))]
    requests += [_request(n, 1, seed=n) for n in (5, 8, 10, 40)]
    for request, result in zip(requests, TorchScorer.load(tmp_path, ScorerSettings()).score(requests), strict=True):
        np.testing.assert_allclose(result.logprobs, _expected(plain, request)[0], atol=1e-4)


def test_top_k_ids_and_logprobs_come_likeliest_first(scorer: TorchScorer, plain: PreTrainedModel) -> None:
    requests = [_request(12, 5, seed=1), _request(7, 1, seed=2)]
    for request, result in zip(requests, scorer.score(requests, ScoreOptions(top_k=6)), strict=True):
        _, rows = _expected(plain, request)
        assert result.top_ids is not None and result.top_logprobs is not None
        assert result.top_ids.dtype == np.int32 and result.top_ids.shape == (len(rows), 6)
        np.testing.assert_array_equal(result.top_ids, np.argsort(-rows, axis=1)[:, :6])
        np.testing.assert_allclose(result.top_logprobs, -np.sort(-rows, axis=1)[:, :6], atol=1e-4)


def test_first_graded_token_is_given_what_stands_before_it_and_not_itself(scorer: TorchScorer) -> None:
    """Off by one: the log-prob of token t must not change with token t + 1, and must with token t."""
    request = _request(10, 4)
    changed = ScoreRequest(request.token_ids.copy(), 4)
    changed.token_ids[7] = (changed.token_ids[7] + 1) % VOCAB
    one, other = scorer.score([request])[0].logprobs, scorer.score([changed])[0].logprobs
    np.testing.assert_allclose(one[:3], other[:3], atol=1e-6)
    assert abs(one[3] - other[3]) > 1e-3


def test_empty_response_is_graded_as_nothing_and_not_as_everything(scorer: TorchScorer) -> None:
    results = scorer.score([_request(9, 9), _request(9, 3)], ScoreOptions(top_k=2))
    assert [len(result.logprobs) for result in results] == [0, 6]
    assert results[0].top_ids is not None and results[0].top_ids.shape == (0, 2)
    assert scorer.score([]) == []


def test_scores_do_not_depend_on_what_else_is_in_the_batch(scorer: TorchScorer) -> None:
    request = _request(20, 5)
    alone = scorer.score([request])[0].logprobs
    among = scorer.score([_request(33, 2, seed=8), request, _request(18, 7, seed=9)])[1].logprobs
    np.testing.assert_allclose(among, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ScoreRequest(np.array([1, 2, 3], np.int32), 0), "start 0 .*no context"),
        (ScoreRequest(np.array([1, 2, 3], np.int32), 4), "start 4"),
        (ScoreRequest(np.array([1, VOCAB, 3], np.int32), 1), f"token id {VOCAB} is outside the vocabulary"),
        (ScoreRequest(np.array([1, -1, 3], np.int32), 1), "token id -1 is outside"),
        (_request(CONTEXT + 2, 1), f"{CONTEXT + 2} tokens; this teacher takes up to {CONTEXT + 1}"),
    ],
)
def test_what_cannot_be_graded_is_refused(scorer: TorchScorer, request_: ScoreRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scorer.score([_request(5, 2), request_])


def test_sizes_are_those_of_the_model_and_a_closed_scorer_says_so(scorer: TorchScorer) -> None:
    assert (scorer.vocab_size, scorer.max_context) == (VOCAB, CONTEXT)
    scorer.close()
    scorer.close()
    with pytest.raises(RuntimeError, match="closed"):
        scorer.score([_request(5, 2)])


def test_bad_path_and_senseless_settings_fail_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        TorchScorer.load(tmp_path / "none", ScorerSettings())
    with pytest.raises(ValueError, match="max_batch_tokens: got 0"):
        ScorerSettings(max_batch_tokens=0)


def test_a_snapshot_replaces_the_weights_as_a_whole_or_not_at_all(
    scorer: TorchScorer, folder: Path, tmp_path: Path
) -> None:
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    request = _request(9, 1)
    before = scorer.score([request])[0].logprobs
    damaged = write_snapshot(tmp_path / "damaged", WeightVersion(0, 1), [("model.norm.weight", torch.ones(32))], keep=1)
    with pytest.raises(SnapshotRefused, match="do not fit this teacher"):
        scorer.load_snapshot(damaged)
    with pytest.raises(SnapshotRefused, match="no/such/file"):
        scorer.load_snapshot(WeightsRef(WeightVersion(0, 1), "/no/such/file", "ab"))
    np.testing.assert_array_equal(scorer.score([request])[0].logprobs, before)
    scorer.load_snapshot(write_snapshot(tmp_path, WeightVersion(0, 2), other.named_parameters(), keep=1))
    after = scorer.score([request])[0].logprobs
    np.testing.assert_allclose(after, _expected(other, request)[0], atol=1e-4)
    assert np.abs(after - before).max() > 0.1
