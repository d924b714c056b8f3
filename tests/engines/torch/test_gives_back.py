"""Embedded engines that give their device back have freed its memory, and go on as if nothing had been."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from stillhouse.builtin import STUDENT_DIR, TEACHER_DIR
from stillhouse.engines.base import GenerationRequest, ScoreRequest
from stillhouse.engines.config import EngineConfig, ScorerSettings
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.messages import Sampling, WeightVersion
from stillhouse.weights.parked import Parked


def student() -> PreTrainedModel:
    """In memory of its own, as on a GPU: what is mapped from a file cannot be emptied."""
    return copy.deepcopy(load_causal_lm(STUDENT_DIR, device="cpu", dtype="float32", attention="sdpa"))


def engine() -> TorchEngine:
    return TorchEngine(student(), EngineConfig(max_concurrent=4, max_context=64))


def write(one: TorchEngine, name: str) -> list[int]:
    one.submit(GenerationRequest(name, np.arange(5, 12, dtype=np.int32), Sampling(max_new_tokens=20, seed=3), 20, ()))
    ids: list[int] = []
    while True:
        for delta in one.poll(0.0):
            ids += delta.token_ids.tolist()
            if delta.finish_reason is not None:
                return ids


def test_an_engine_writes_on_with_the_newest_weights() -> None:
    plain, shared = engine(), engine()
    assert write(plain, "a") == write(shared, "a")
    new = [(name, p.detach() * 1.5) for name, p in student().named_parameters()]
    for one in (plain, shared):
        one.stage_weights(WeightVersion(0, 1), new)
    shared.give_back()
    shared.give_back()  # changes nothing
    parameters = [*shared._stage._parameters.values()]  # pyright: ignore[reportPrivateUsage]
    assert sum(p.untyped_storage().nbytes() for p in parameters) == 0 == shared.stats.extra["kv_cache_bytes"]
    assert shared.version == WeightVersion(0, 1), "one set of weights is kept, the newest"
    shared.take_again()
    assert write(plain, "b") == write(shared, "b")
    for one in (plain, shared):
        one.close()


def test_an_engine_with_running_requests_does_not_give_its_cache_away() -> None:
    one = engine()
    one.submit(GenerationRequest("a", np.arange(5, 12, dtype=np.int32), Sampling(max_new_tokens=20), 20, ()))
    one.poll(0.0)
    with pytest.raises(RuntimeError, match="1 requests are running"):
        one.give_back()
    one.close()


def test_a_teacher_scores_as_before() -> None:
    teacher = TorchScorer.load(TEACHER_DIR, ScorerSettings(device="cpu"))
    request = ScoreRequest(np.arange(5, 40, dtype=np.int32), 3, "a")
    before = teacher.score([request])[0].logprobs
    teacher.give_back()
    assert teacher.figures["prefix_tokens"] == 0
    teacher.take_again()
    assert np.array_equal(teacher.score([request])[0].logprobs, before)
    teacher.close()


def test_tied_and_joined_tensors_come_back_as_they_were() -> None:
    whole = torch.arange(12.0)
    model = {"a": whole[:4].view(2, 2), "b": whole[4:], "tied": whole[:4], "alone": torch.ones(3)}
    expected = {name: tensor.clone() for name, tensor in model.items()}
    parked = Parked(model.values)
    parked.leave()
    assert parked.n_bytes == 15 * 4 and not whole.untyped_storage().nbytes()
    parked.come_back()
    assert all(torch.equal(model[name], tensor) for name, tensor in expected.items())
    model["b"][0] = -1.0
    assert whole[4] == -1.0, "views are still views of the same memory"
