"""The student's likeliest tokens as the engine reports them, and a teacher's log-probs of given tokens, against
transformers' own logits in float64, position by position."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from stillhouse.engines.base import GenerationRequest, Int32s, ScoreOptions, ScoreRequest
from stillhouse.engines.config import ScorerSettings
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.protocol.messages import Sampling, TopIdsWanted, WeightVersion
from tests.engines.torch.generation import VOCAB, logprobs_of, make_engine, make_model, make_requests
from tests.engines.torch.test_scorer import SHAPE
from tests.engines.torch.test_scorer import VOCAB as TEACHER_VOCAB

torch.set_num_threads(1)


class Collected:
    """All deltas of one request."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.sets: list[list[int]] = []
        self.versions: list[WeightVersion] = []
        self.none = 0


def asking(requests: list[GenerationRequest], wanted: TopIdsWanted | None) -> list[GenerationRequest]:
    return [replace(r, sampling=_with(r.sampling, wanted)) for r in requests]


def _with(sampling: Sampling, wanted: TopIdsWanted | None) -> Sampling:
    return Sampling(sampling.temperature, max_new_tokens=sampling.max_new_tokens, seed=sampling.seed, top_ids=wanted)


def collect(
    engine: TorchEngine, requests: list[GenerationRequest], swap: PreTrainedModel | None = None
) -> dict[str, Collected]:
    found = {request.request_id: Collected() for request in requests}
    for request in requests:
        engine.submit(request)
    polls = 0
    while engine.stats.running or engine.stats.queued:
        polls += 1
        if polls == 6 and swap is not None:
            engine.stage_weights(WeightVersion(0, 1), swap.named_parameters())
        for delta in engine.poll(0.0):
            one = found[delta.request_id]
            one.ids += delta.token_ids.tolist()
            one.none += delta.top_ids is None
            one.sets += [ids.tolist() for ids in delta.top_ids or ()]
            one.versions += [span.version for span in delta.spans for _ in range(span.end - span.start)]
    return found


@torch.no_grad()
def slow_sets(model: PreTrainedModel, request: GenerationRequest, ids: list[int]) -> list[list[int]]:
    """Sort the whole distribution that was sampled from, then take tokens until their mass is reached."""
    wanted = request.sampling.top_ids
    assert wanted is not None
    full = torch.tensor([request.prompt_ids.tolist() + ids])
    z_nV = model(input_ids=full).logits[0, len(request.prompt_ids) - 1 : -1].double() / request.sampling.temperature
    sets: list[list[int]] = []
    for p_V in z_nV.softmax(-1).tolist():
        chosen, mass = list[int](), 0.0
        for token in sorted(range(len(p_V)), key=lambda v: -p_V[v]):
            if len(chosen) == wanted.k or mass >= wanted.mass:
                break
            chosen.append(token)
            mass += p_V[token]
        sets.append(chosen)
    return sets


@pytest.mark.parametrize(
    ("wanted", "temperature"),
    [(TopIdsWanted(5, 1.0), 1.0), (TopIdsWanted(40, 0.9), 0.6), (TopIdsWanted(1000, 0.999), 1.0)],
)
def test_sets_are_the_likeliest_tokens_of_the_distribution_sampled_from(
    wanted: TopIdsWanted, temperature: float
) -> None:
    """More requests than slots, so that rows move; some ask for other sets, and some for none, in the same steps."""
    requests = make_requests(8, temperature=temperature)
    mixed = [
        *asking(requests[:4], wanted),
        *asking(requests[4:6], TopIdsWanted(2, 0.5)),
        *asking(requests[6:], None),
    ]
    found = collect(make_engine(), mixed)
    model = make_model("qwen3")
    sizes: set[int] = set()
    for request in mixed:
        got = found[request.request_id]
        if request.sampling.top_ids is None:
            assert got.none and not got.sets
            continue
        assert not got.none
        assert got.sets == slow_sets(model, request, got.ids)
        sizes |= {len(one) for one in got.sets}
    assert max(sizes) <= min(VOCAB, max(wanted.k, 2))
    assert wanted.mass == 1.0 or len(sizes) > 2, "sets differ in size by position"


def test_a_token_has_the_sets_of_the_weights_that_sampled_it() -> None:
    """New weights arrive in the middle of requests. The cache is computed anew, so a full forward is the oracle."""
    new = make_model("qwen3", seed=1)
    requests = asking(make_requests(3, new_tokens=20), TopIdsWanted(4, 1.0))
    found = collect(make_engine(update_mode="retract"), requests, swap=new)
    by_version = {WeightVersion(0, 0): make_model("qwen3"), WeightVersion(0, 1): new}
    seen, differing = set[WeightVersion](), 0
    for request in requests:
        got = found[request.request_id]
        seen |= set(got.versions)
        slow = {version: slow_sets(model, request, got.ids) for version, model in by_version.items()}
        assert got.sets == [slow[version][t] for t, version in enumerate(got.versions)]
        differing += sum(a != b for a, b in zip(*slow.values(), strict=True))
    assert seen == set(by_version) and differing > 20


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_ids=TopIdsWanted(0, 1.0)),
        Sampling(top_ids=TopIdsWanted(4, 0.0)),
        Sampling(top_ids=TopIdsWanted(4, 1.0), top_p=0.9),
        Sampling(top_ids=TopIdsWanted(4, 1.0), top_k=9),
        Sampling(top_ids=TopIdsWanted(4, 1.0), min_p=0.1),
        Sampling(top_k=9, kept=True, temperature=0.0),
        Sampling(top_p=0.9, kept=True),
    ],
)
def test_sets_that_cannot_be_reported_are_refused(sampling: Sampling) -> None:
    with pytest.raises(ValueError, match="top_ids"):
        make_engine().submit(replace(make_requests(1)[0], sampling=sampling))


# ------------------------------------------------------------------------------------------------------ the teacher


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("teacher")
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(path)
    return path


def sets_of(random: np.random.Generator, n: int, k: int) -> Int32s:
    return np.array([random.permutation(TEACHER_VOCAB)[:k] for _ in range(n)], np.int32).reshape(n, k)


@pytest.mark.parametrize("prefix_cache_mb", [0, 8])
def test_given_tokens_get_the_log_probs_of_the_whole_distribution(folder: Path, prefix_cache_mb: int) -> None:
    """Segments of growing rollouts, packed together, with sets of different sizes, and one without a token to score."""
    config = ScorerSettings(device="cpu", max_batch_tokens=50, prefix_cache_mb=prefix_cache_mb)
    scorer = TorchScorer.load(folder, config)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    random = np.random.default_rng(0)
    texts = [random.integers(0, TEACHER_VOCAB, 30).astype(np.int32) for _ in range(3)]
    for start, end, k in ((1, 9, 3), (9, 20, 7), (20, 30, 5)):
        requests = [
            ScoreRequest(ids[:end], start, f"train-{i}-0-0", end == 30, sets_of(random, end - start, k + i))
            for i, ids in enumerate(texts)
        ]
        requests.append(ScoreRequest(texts[0][:5], 5, top_ids=sets_of(random, 0, 4)))
        for request, result in zip(requests, scorer.score(requests), strict=True):
            with torch.no_grad():
                ids = torch.from_numpy(request.token_ids).long()
                logprobs_LV = plain(input_ids=ids[None]).logits[0].log_softmax(-1)
            assert request.top_ids is not None and result.top_ids is not None and result.top_logprobs is not None
            assert result.top_ids.tolist() == request.top_ids.tolist()
            assert result.top_logprobs.shape == request.top_ids.shape
            for row, t in enumerate(range(request.start, len(ids))):
                expected = [float(logprobs_LV[t - 1, token]) for token in request.top_ids[row].tolist()]
                np.testing.assert_allclose(result.top_logprobs[row], expected, rtol=1e-4, atol=1e-4)
                assert result.logprobs[row] == pytest.approx(float(logprobs_LV[t - 1, ids[t]]), abs=1e-4)


def test_a_call_has_given_tokens_for_all_requests_or_none(folder: Path) -> None:
    scorer = TorchScorer.load(folder, ScorerSettings(device="cpu"))
    ids = np.arange(6, dtype=np.int32)
    given = ScoreRequest(ids, 3, top_ids=np.zeros((3, 2), np.int32))
    for requests, top_k in (([given, ScoreRequest(ids, 3)], 0), ([given], 2)):
        with pytest.raises(ValueError, match="expected all, and 0"):
            scorer.score(requests, ScoreOptions(top_k))
    with pytest.raises(ValueError, match="one row each"):
        scorer.score([replace(given, top_ids=np.zeros((2, 2), np.int32))])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        scorer.score([replace(given, top_ids=np.full((3, 2), TEACHER_VOCAB, np.int32))])


@torch.no_grad()
def test_what_each_token_was_sampled_from_is_reported() -> None:
    """Against transformers' warpers, position by position; other requests of the same steps ask for nothing."""
    settings: dict[str, Any] = {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "min_p": 0.02}
    requests = [*make_requests(6, **settings, kept=True), *make_requests(8, seed=1)[6:]]
    found, model, sizes = collect(make_engine(), requests), make_model("qwen3"), set[int]()
    for request in requests[:6]:
        one = found[request.request_id]
        full = torch.tensor([request.prompt_ids.tolist() + one.ids])
        z_nV = model(input_ids=full).logits[0, len(request.prompt_ids) - 1 : -1]
        assert len(one.sets) == len(one.ids) > 0
        for z_V, token, kept in zip(z_nV, one.ids, one.sets, strict=True):
            of_all_V = logprobs_of(z_V.expand(VOCAB, -1), torch.arange(VOCAB), Sampling(**settings))
            assert kept == torch.arange(VOCAB)[of_all_V > -torch.inf].tolist() and token in kept
            sizes.add(len(kept))
    assert len(sizes) > 2 and not any(found[request.request_id].sets for request in requests[6:])
