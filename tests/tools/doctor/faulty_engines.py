"""Engines with a planted fault each, selected as `tests.tools.doctor.faulty_engines:NAME` like anybody's own engine.

Each is the embedded engine with one thing wrong.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from stillhouse.engines.base import LOGPROBS_ONLY, Float32s, GenerationDelta, ScoreOptions, ScoreRequest, ScoreResult
from stillhouse.engines.provider import EngineRole, ScorerSource, Student, StudentSource
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.engines.torch.provider import TorchProvider
from stillhouse.engines.torch.weights import EmbeddedWeights
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.messages import WeightVersion

Alter = Callable[["FaultyScorer", ScoreRequest, Float32s], Float32s]
T: Final = 0.7


class FaultyScorer:
    """Alters what the embedded scorer says."""

    def __init__(self, scorer: Any, alter: Alter, index: int, model: str) -> None:
        self._scorer, self._alter, self.index = scorer, alter, index
        self.model = load_causal_lm(model, device="cpu", dtype="float32", attention="sdpa")
        self.rng = np.random.default_rng(index)
        self.vocab_size, self.max_context = scorer.vocab_size, scorer.max_context

    def score(self, requests: Sequence[ScoreRequest], options: ScoreOptions = LOGPROBS_ONLY) -> list[ScoreResult]:
        results = self._scorer.score(requests, options)
        return [
            replace(result, logprobs=self._alter(self, request, result.logprobs))
            for request, result in zip(requests, results, strict=True)
        ]

    def close(self) -> None:
        self._scorer.close()


class FaultyTeacher(TorchProvider):
    """Fills the role of a teacher."""

    title = "faulty"
    roles: tuple[EngineRole, ...] = ("teacher",)

    def __init__(self, alter: Alter) -> None:
        self._alter = alter

    def scorer(self, ctx: Any) -> ScorerSource:
        source = super().scorer(ctx)

        def start() -> Any:
            return FaultyScorer(source.start(), self._alter, ctx.index, ctx.config.models.teacher)

        return replace(source, start=start)


def _late(scorer: FaultyScorer, request: ScoreRequest, logprobs: Float32s) -> Float32s:
    """Each token gets the log-prob of the token before it."""
    return np.concatenate([logprobs[:1] * 0, logprobs[:-1]]) if len(logprobs) else logprobs


def _all_of_nothing(scorer: FaultyScorer, request: ScoreRequest, logprobs: Float32s) -> Float32s:
    """`x[-0:]` is all of x."""
    if len(logprobs):
        return logprobs
    return np.zeros(len(request.token_ids), np.float32)


def _divided(scorer: FaultyScorer, request: ScoreRequest, logprobs: Float32s) -> Float32s:
    return (logprobs / T).astype(np.float32)


def _at_temperature(scorer: FaultyScorer, request: ScoreRequest, logprobs: Float32s) -> Float32s:
    """Those of softmax(z / T)."""
    if not len(logprobs):
        return logprobs
    ids = torch.from_numpy(request.token_ids.astype(np.int64))
    with torch.inference_mode():
        rows = torch.log_softmax(scorer.model(ids[None]).logits[0, request.start - 1 : -1] / T, dim=-1)
    return rows.gather(1, ids[request.start :, None])[:, 0].numpy().astype(np.float32)


def _noisy_replica(scorer: FaultyScorer, request: ScoreRequest, logprobs: Float32s) -> Float32s:
    """The first teacher is exact, the others are not."""
    noise = scorer.rng.normal(0.0, 2.0, len(logprobs)) if scorer.index else 0.0
    return (logprobs + noise).astype(np.float32)


def _not_a_number(scorer: FaultyScorer, request: ScoreRequest, logprobs: Float32s) -> Float32s:
    return logprobs * np.float32("nan")


def _hangs(scorer: FaultyScorer, request: ScoreRequest, logprobs: Float32s) -> Float32s:
    while True:
        time.sleep(1.0)


def _crashes(scorer: FaultyScorer, request: ScoreRequest, logprobs: Float32s) -> Float32s:
    os.kill(os.getpid(), signal.SIGKILL)
    return logprobs


class FaultyActor(TorchProvider):
    """Fills the role of an actor, with another engine."""

    title = "faulty"
    roles: tuple[EngineRole, ...] = ("actor",)

    def __init__(self, engine: type[TorchEngine]) -> None:
        self._engine = engine

    def student(self, ctx: Any) -> StudentSource:
        source, config = super().student(ctx), ctx.config.actor.torch

        def start(wake: Callable[[], None]) -> Student:
            model = load_causal_lm(ctx.config.models.student, device="cpu", dtype="float32", attention="sdpa")
            engine = self._engine(model, config)
            return Student(engine, EmbeddedWeights(engine), config.max_context)

        return replace(source, start=start)


class Deaf(TorchEngine):
    """Takes the version, and goes on with the weights that it has."""

    def __init__(self, model: Any, *arguments: Any) -> None:
        self._former = [(name, tensor.detach().clone()) for name, tensor in model.named_parameters()]
        super().__init__(model, *arguments)

    def stage_weights(self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert sum(1 for _ in tensors)
        super().stage_weights(version, self._former)


class LogprobsLate(TorchEngine):
    """The log-prob of each sampled token is that of the one before."""

    def poll(self, timeout_s: float) -> list[GenerationDelta]:
        return [replace(delta, logprobs=np.roll(delta.logprobs, 1)) for delta in super().poll(timeout_s)]


class AtTemperatureOne(TorchEngine):
    """Samples at the temperature of the request, and reports log-probs as if it were 1."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reference = load_causal_lm(arguments[0].name_or_path, device="cpu", dtype="float32", attention="sdpa")
        self._ids: dict[str, list[int]] = {}

    def submit(self, request: Any) -> None:
        self._ids[request.request_id] = request.prompt_ids.tolist()
        super().submit(request)

    def poll(self, timeout_s: float) -> list[GenerationDelta]:
        return [replace(delta, logprobs=self._scored(delta)) for delta in super().poll(timeout_s)]

    def _scored(self, delta: GenerationDelta) -> Float32s:
        before = self._ids[delta.request_id]
        ids = torch.tensor([*before, *delta.token_ids.tolist()])
        self._ids[delta.request_id] = ids.tolist()
        with torch.inference_mode():
            rows = torch.log_softmax(self._reference(ids[None]).logits[0, len(before) - 1 : -1], dim=-1)
        return rows.gather(1, ids[len(before) :, None])[:, 0].numpy()


class OnlyTemperatureOne(TorchEngine):
    """Refuses other temperatures, as the engine for SGLang does where the server reports log-probs at 1."""

    def submit(self, request: Any) -> None:
        if request.sampling.temperature not in (0.0, 1.0):
            raise ValueError(f"temperature = {request.sampling.temperature}")
        super().submit(request)


LATE: Final = FaultyTeacher(_late)
ALL_OF_NOTHING: Final = FaultyTeacher(_all_of_nothing)
DIVIDED: Final = FaultyTeacher(_divided)
AT_TEMPERATURE: Final = FaultyTeacher(_at_temperature)
NOISY_REPLICA: Final = FaultyTeacher(_noisy_replica)
NOT_A_NUMBER: Final = FaultyTeacher(_not_a_number)
HANGS: Final = FaultyTeacher(_hangs)
CRASHES: Final = FaultyTeacher(_crashes)
DEAF: Final = FaultyActor(Deaf)
LOGPROBS_LATE: Final = FaultyActor(LogprobsLate)
ONLY_TEMPERATURE_ONE: Final = FaultyActor(OnlyTemperatureOne)
AT_TEMPERATURE_ONE: Final = FaultyActor(AtTemperatureOne)
