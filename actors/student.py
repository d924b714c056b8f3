"""An actor's student: tokenizer, engine, and where its weights come from; embedded, or on an SGLang server.

Torch is imported inside `embedded` only: an actor whose student is on a server never loads it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from actors.config import ActorConfig
from actors.envs.base import TextTokenizer
from engines.base import GenerationEngine
from protocol.context import RoleContext
from weights.sink import WeightSink

if TYPE_CHECKING:
    from models.tokenizer_file import FileTokenizer

log = logging.getLogger(__name__)


class StudentModels(Protocol):
    @property
    def student(self) -> str: ...


class TaskSettings(Protocol):
    @property
    def env(self) -> str: ...


class LearnerSettings(Protocol):
    @property
    def tasks(self) -> TaskSettings: ...


class ActorRunConfig(Protocol):
    """The parts of the run's configuration that an actor reads."""

    @property
    def actor(self) -> ActorConfig: ...
    @property
    def models(self) -> StudentModels: ...
    @property
    def learner(self) -> LearnerSettings: ...


@dataclass(frozen=True, slots=True)
class Student:
    """Ready to write."""

    engine: GenerationEngine
    weights: WeightSink
    max_context: int
    """Tokens of prompt and answers."""


@dataclass(frozen=True, slots=True)
class StudentSource:
    """What is known before the engine is there, and how to get it."""

    tokenizer: TextTokenizer
    fingerprint: str
    stop_token_ids: tuple[int, ...]
    start: Callable[[Callable[[], None]], Student]
    """Given what wakes the actor's main thread, from any other."""


def embedded(ctx: RoleContext[ActorRunConfig]) -> StudentSource:
    """The model in this process."""
    from engines.torch.engine import TorchEngine
    from engines.torch.weights import EmbeddedWeights
    from models.loading import load_causal_lm, resolve_device
    from models.tokenizer import load_tokenizer, stop_token_ids, token_map_fingerprint

    config, path = ctx.config.actor.torch, ctx.config.models.student
    tokenizer = load_tokenizer(path)

    def start(wake: Callable[[], None]) -> Student:
        engine = TorchEngine(load_causal_lm(path, device="cpu", dtype=config.dtype, attention="sdpa"), config)
        weights = EmbeddedWeights(engine, device=resolve_device(config.device))
        return Student(engine, weights, config.max_context)

    return StudentSource(
        TextTokenizer(tokenizer), token_map_fingerprint(tokenizer), stop_token_ids(path, tokenizer), start
    )


def on_server(ctx: RoleContext[ActorRunConfig]) -> StudentSource:
    """The model on the SGLang server at `ctx.server_url`. `start` raises ServerLost when it is not there, and
    ServerMismatch when it is not as configured."""
    from engines.sglang.config import vocabulary_size
    from engines.sglang.engine import SGLangEngine
    from engines.sglang.features import ServerMismatch, check_layout, write_features
    from engines.sglang.http import API_KEY_VARIABLE, ServerLost, ServerUnavailable
    from engines.sglang.weights import ServerWeights
    from models.tokenizer_file import FileTokenizer

    config, path = ctx.config.actor, ctx.config.models.student
    tokenizer: FileTokenizer = FileTokenizer(path)
    started_by_us = not config.urls

    def start(wake: Callable[[], None]) -> Student:
        try:
            engine = SGLangEngine(
                ctx.server_url,
                config.sglang,
                vocab_size=vocabulary_size(path),
                run_id=ctx.run_id,
                api_key=os.environ.get(API_KEY_VARIABLE, "") if started_by_us else "",
                on_output=wake,
            )
            if started_by_us:
                engine.abort_leftovers(config.sglang.control_timeout_s)
        except ServerUnavailable as error:
            raise ServerLost(str(error)) from error
        try:
            check_layout(engine.features, config.server)
        except ServerMismatch:
            engine.close()
            raise
        write_features(Path(ctx.run_dir), ctx.name, ctx.server_url, engine.features)
        return Student(engine, ServerWeights(engine, student=path), engine.max_context)

    return StudentSource(TextTokenizer(tokenizer), tokenizer.fingerprint, tokenizer.stop_token_ids, start)
