"""Scores with kept prefixes equal those of transformers, which computes every request anew; memory keeps its bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from stillhouse.engines.base import Int32s, ScoreOptions, ScoreRequest
from stillhouse.engines.config import ScorerSettings
from stillhouse.engines.torch.prefix_cache import PrefixCache
from stillhouse.engines.torch.scorer import TorchScorer, fold, make_prefix_cache
from stillhouse.models.loading import load_causal_lm
from stillhouse.models.past import Cells
from stillhouse.protocol.messages import WeightsRef, WeightVersion
from stillhouse.weights.snapshot import write_snapshot

VOCAB, CONTEXT = 67, 64
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
BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4
"""2 layers, keys and values, 2 heads of 8 numbers in float32."""


@dataclass(frozen=True)
class Teachers:
    """One architecture with several weights: in transformers' own form, and as snapshots."""

    folder: Path
    plain: Sequence[PreTrainedModel]
    snapshots: Sequence[WeightsRef]

    def scorer(self, max_tokens: int, *, max_batch_tokens: int = 30) -> tuple[TorchScorer, PrefixCache]:
        cache = PrefixCache(max_tokens * BYTES_PER_TOKEN, BYTES_PER_TOKEN)
        model = load_causal_lm(self.folder, device="cpu", dtype="float32", attention="packed")
        return TorchScorer(model, max_batch_tokens=max_batch_tokens, prefix_cache=cache), cache


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Teachers:
    folder = tmp_path_factory.mktemp("teacher")
    plain: list[PreTrainedModel] = []
    snapshots: list[WeightsRef] = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
        model.save_pretrained(folder / str(seed))
        plain.append(AutoModelForCausalLM.from_pretrained(folder / str(seed), dtype=torch.float32))
        snapshots.append(write_snapshot(folder, WeightVersion(0, seed), model.named_parameters(), keep=9))
    return Teachers(folder / "0", plain, snapshots)


def anew(plain: PreTrainedModel, request: ScoreRequest) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of the asked tokens and of the whole vocabulary at their positions, from the whole prefix."""
    ids = torch.from_numpy(request.token_ids).long()
    with torch.no_grad():
        logprobs_LV = torch.log_softmax(plain(input_ids=ids[None]).logits[0].double(), dim=-1).numpy()
    rows = logprobs_LV[request.start - 1 : len(ids) - 1]
    return rows[np.arange(len(rows)), request.token_ids[request.start :]], rows


def check(scorer: TorchScorer, plain: PreTrainedModel, requests: Sequence[ScoreRequest], top_k: int = 0) -> None:
    results = scorer.score(requests, ScoreOptions(top_k))
    assert len(results) == len(requests)
    for request, result in zip(requests, results, strict=True):
        given_n, rows_nV = anew(plain, request)
        np.testing.assert_allclose(result.logprobs, given_n, atol=1e-4)
        if top_k:
            assert result.top_ids is not None and result.top_logprobs is not None
            np.testing.assert_allclose(result.top_logprobs, -np.sort(-rows_nV, axis=1)[:, :top_k], atol=1e-4)
            np.testing.assert_allclose(
                np.take_along_axis(rows_nV, result.top_ids.astype(np.int64), axis=1), result.top_logprobs, atol=1e-4
            )


def tokens(n: int, seed: int = 0) -> Int32s:
    return np.random.default_rng(seed).integers(0, VOCAB, n).astype(np.int32)


def segments(ids: Int32s, size: int, rollout_id: str = "a", first: int = 1) -> list[ScoreRequest]:
    """The requests of a rollout that grows by `size` tokens."""
    ends = [*range(first + size, len(ids), size), len(ids)]
    starts = [first, *ends[:-1]]
    return [ScoreRequest(ids[:end], start, rollout_id) for start, end in zip(starts, ends, strict=True)]


class Story:
    """Rollouts that grow, branch, come again and end, as drawn by hypothesis. Only three tokens are used, so that
    branches begin alike; some requests are scored together."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw = data.draw
        self._paths: dict[str, list[Int32s]] = {}
        self._seen: list[ScoreRequest] = []

    def batch(self) -> list[ScoreRequest]:
        return [self._request() for _ in range(self._draw(st.integers(1, 5)))]

    def _request(self) -> ScoreRequest:
        if self._seen and self._draw(st.integers(0, 5)) == 0:
            return self._draw(st.sampled_from(self._seen))  # a lease of another teacher that failed, or a hedge
        rollout_id = self._draw(st.sampled_from(["", "a", "b"]))
        paths = self._paths.setdefault(rollout_id, [np.zeros(0, np.int32)])
        path = paths[self._draw(st.integers(max(0, len(paths) - 3), len(paths) - 1))]
        cut = len(path) if self._draw(st.booleans()) else self._draw(st.integers(0, len(path)))
        room = CONTEXT + 1 - cut
        new = self._draw(st.lists(st.integers(0, 2), min_size=min(2, room), max_size=min(12, room)))
        ids = np.concatenate([path[:cut], np.array(new, np.int32)])
        start = self._draw(st.integers(max(1, cut), len(ids))) if len(ids) else 1
        paths.append(ids)
        last = self._draw(st.integers(0, 7)) == 0
        request = ScoreRequest(ids, start, rollout_id, last)
        self._seen.append(request)
        return request


@settings(max_examples=6, deadline=None)
@given(data=st.data(), max_tokens=st.sampled_from([0, 7, 40, 10_000]))
def test_whatever_is_kept_scores_are_those_of_the_whole_prefix(
    teachers: Teachers, data: st.DataObject, max_tokens: int
) -> None:
    scorer, cache = teachers.scorer(max_tokens)
    story, weights = Story(data), 0
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.integers(0, 4)) == 0:
            weights = 1 - weights
            scorer.load_snapshot(teachers.snapshots[weights])
        check(scorer, teachers.plain[weights], story.batch(), top_k=data.draw(st.sampled_from([0, 3])))
        assert cache.kept_bytes <= cache.max_bytes


def test_a_growing_rollout_computes_each_token_once(teachers: Teachers) -> None:
    scorer, _ = teachers.scorer(1000)
    requests = segments(tokens(50), 8, first=5)
    for request in requests:
        check(scorer, teachers.plain[0], [request])
    assert len(requests) == 6
    assert scorer.figures["computed_tokens_total"] == 49  # the last token is never an input
    assert scorer.figures["prefix_hits_total"] == 5


def test_segments_that_come_together_share_one_run(teachers: Teachers) -> None:
    """A teacher that is behind gets several segments of one rollout in one batch."""
    scorer, _ = teachers.scorer(0)
    requests = segments(tokens(50), 8)
    check(scorer, teachers.plain[0], [requests[3], requests[1], requests[2], requests[0]])
    assert scorer.figures["computed_tokens_total"] == len(requests[3].token_ids) - 1
    runs = fold([ScoreRequest(tokens(9), 3, "a"), ScoreRequest(tokens(9), 3, "b"), ScoreRequest(tokens(9, 1), 3, "a")])
    assert len(runs) == 3, "other rollouts and other tokens have runs of their own"


def test_a_branch_computes_what_follows_its_token_and_the_first_one_is_still_known(teachers: Teachers) -> None:
    scorer, _ = teachers.scorer(1000)
    trunk, other = tokens(30), tokens(10, seed=1)
    branch = np.concatenate([trunk[:17], other])
    check(scorer, teachers.plain[0], [ScoreRequest(trunk, 1, "a")])
    check(scorer, teachers.plain[0], [ScoreRequest(branch, 17, "a")])
    assert scorer.figures["computed_tokens_total"] == 29 + 10  # inputs 16 to 25: the 17th gives token 17 its log-prob
    check(scorer, teachers.plain[0], [ScoreRequest(np.concatenate([trunk, other]), 30, "a")])
    assert scorer.figures["computed_tokens_total"] == 29 + 10 + 10
    check(scorer, teachers.plain[0], [ScoreRequest(np.concatenate([branch, other]), 27, "a")])
    assert scorer.figures["computed_tokens_total"] == 29 + 10 + 10 + 10


def test_new_weights_leave_nothing_of_the_old(teachers: Teachers) -> None:
    scorer, cache = teachers.scorer(1000)
    first, second, third = segments(tokens(30), 10)
    check(scorer, teachers.plain[0], [first])
    scorer.load_snapshot(teachers.snapshots[1])
    assert cache.kept_bytes == 0
    check(scorer, teachers.plain[1], [second])
    check(scorer, teachers.plain[1], [third])


def test_the_end_of_a_rollout_frees_its_memory_and_a_single_segment_takes_none(teachers: Teachers) -> None:
    scorer, cache = teachers.scorer(1000)
    first, second, third = segments(tokens(30), 10)
    scorer.score([first, second, ScoreRequest(tokens(9), 2, "whole", last=True), ScoreRequest(tokens(9), 2)])
    assert cache.kept_bytes == (len(second.token_ids) - 1) * BYTES_PER_TOKEN
    scorer.score([ScoreRequest(third.token_ids, third.start, "a", last=True)])
    assert cache.kept_bytes == 0 and cache.find("a", third.token_ids, 99) is None


def test_least_recently_used_ends_go_first(teachers: Teachers) -> None:
    scorer, cache = teachers.scorer(60)
    rollouts = {name: segments(tokens(31, seed), 10, name) for seed, name in enumerate("abc")}
    for name in "ab":
        for request in rollouts[name]:
            scorer.score([request])  # 30 tokens each: full
    scorer.score([rollouts["a"][0]])
    scorer.score([rollouts["c"][0]])  # takes 10 from the rollout that was not used for the longest time
    left = {name: cache.find(name, rollouts[name][-1].token_ids, 99) for name in "abc"}
    assert {name: past.n_tokens if past else 0 for name, past in left.items()} == {"a": 20, "b": 30, "c": 10}
    assert scorer.figures["prefix_evicted_tokens_total"] == 10
    check(scorer, teachers.plain[0], [request for its in rollouts.values() for request in its])


def test_a_rollout_does_not_evict_itself(teachers: Teachers) -> None:
    scorer, cache = teachers.scorer(25)
    for request in segments(tokens(31), 10):
        check(scorer, teachers.plain[0], [request])
    past = cache.find("a", tokens(31), 99)
    assert past is not None and past.n_tokens == 20, "the last ten tokens had no room"
    cache.release("a")
    assert cache.kept_bytes == 0


def test_kept_bytes_are_those_of_the_tensors(teachers: Teachers) -> None:
    scorer, cache = teachers.scorer(1000)
    requests = segments(tokens(50), 8) + segments(tokens(20, seed=1), 20, "b")
    for request in requests:
        scorer.score([request])
    pasts = [cache.find(request.rollout_id, request.token_ids, 99) for request in requests]
    cells = {id(piece.cells): piece.cells for past in pasts if past for piece in past.pieces}
    assert sum(one.nbytes for one in cells.values()) == cache.kept_bytes == (49 + 19) * BYTES_PER_TOKEN


def test_a_forward_that_fails_leaves_no_cells_without_values(
    teachers: Teachers, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer, cache = teachers.scorer(1000)
    first, second, _ = segments(tokens(30), 10)

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Cells, "fill", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            scorer.score([first])
    assert cache.kept_bytes == 0
    check(scorer, teachers.plain[0], [first])
    check(scorer, teachers.plain[0], [second])


def test_the_bound_is_a_setting_and_its_default_a_share_of_what_is_free(teachers: Teachers) -> None:
    model = load_causal_lm(teachers.folder, device="cpu", dtype="float32", attention="packed")
    assert make_prefix_cache(model, 0) is None
    given = make_prefix_cache(model, 3)
    assert given is not None and given.max_bytes == 3 * 2**20
    by_default = make_prefix_cache(model, None)
    assert by_default is not None and by_default.max_bytes > 2**20
    off = TorchScorer.load(teachers.folder, ScorerSettings(device="cpu", prefix_cache_mb=0))
    on = TorchScorer.load(teachers.folder, ScorerSettings(device="cpu", prefix_cache_mb=1))
    for scorer, computed in ((off, 9 + 18 + 19), (on, 19)):
        for request in segments(tokens(20), 9):
            check(scorer, teachers.plain[0], [request])
        assert scorer.figures["computed_tokens_total"] == computed


def test_a_model_that_cannot_continue_a_past_is_scored_without_a_cache(
    teachers: Teachers, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_causal_lm(teachers.folder, device="cpu", dtype="float32", attention="packed")
    config: Any = model.config
    config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic"}
    assert make_prefix_cache(model, 3) is None
    assert "rotary frequencies that change" in caplog.text
