"""The parts of a run's configuration that the learner reads. Its processes get the whole of it (protocol.context)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stillhouse.engines.config import WorkerSettings
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.config import ObjectiveConfig
from stillhouse.protocol.messages import TopIdsWanted
from stillhouse.protocol.payloads.registry import needs_head
from stillhouse.weights.config import WeightsConfig


class Models(Protocol):
    @property
    def student(self) -> str: ...
    @property
    def teacher(self) -> str: ...


class TeacherSettings(Protocol):
    @property
    def pool(self) -> str: ...
    @property
    def payload(self) -> str: ...
    @property
    def tokenizer(self) -> str: ...


class PoolSettings(Protocol):
    @property
    def model(self) -> str: ...
    @property
    def payload(self) -> str | None: ...
    @property
    def tokenizer(self) -> str | None: ...


class BufferSettings(Protocol):
    @property
    def max_staleness(self) -> int: ...
    @property
    def dynamic_sampling(self) -> int: ...
    @property
    def reward_limit(self) -> float: ...


class LearnerRunConfig(Protocol):
    """The parts of the run's configuration that the learner reads."""

    @property
    def steps(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def actors(self) -> int: ...
    @property
    def models(self) -> Models: ...
    @property
    def learner(self) -> LearnerConfig: ...
    @property
    def buffer(self) -> BufferSettings: ...
    @property
    def weights(self) -> WeightsConfig: ...
    @property
    def actor(self) -> WorkerSettings: ...
    @property
    def top_ids(self) -> TopIdsWanted | None: ...
    @property
    def teacher(self) -> TeacherSettings: ...
    @property
    def pools(self) -> Mapping[str, PoolSettings]: ...
    @property
    def environments(self) -> Mapping[str, object]: ...


def pools_with_heads(config: LearnerRunConfig, objective: ObjectiveConfig) -> list[str]:
    """Teacher pools of whose models the learner needs the output heads, because an objective reads their payloads."""
    payloads = {name: pool.payload or config.teacher.payload for name, pool in config.pools.items()}
    payloads = payloads or {config.teacher.pool: config.teacher.payload}
    return [name for name, sent in payloads.items() if needs_head(sent) and objective.needs_top_k_for(name)]


def models_of_other_tokenizers(config: LearnerRunConfig) -> dict[str, str]:
    """Teacher pool -> its model, of those whose tokenizer is not the student's."""
    own = {
        name: (pool.tokenizer or config.teacher.tokenizer, pool.model or config.models.teacher)
        for name, pool in config.pools.items()
    }
    own = own or {config.teacher.pool: (config.teacher.tokenizer, config.models.teacher)}
    return {name: model for name, (tokenizer, model) in own.items() if tokenizer == "other"}
