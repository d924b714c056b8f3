"""Configuration of an actor and of the environments its rollouts run in."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from stillhouse.engines.config import EngineConfig, WorkerSettings
from stillhouse.engines.registry import EngineOptions, check_engine
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.protocol.settings import PositiveFloat, PositiveInt, Settings

replace = msgspec.structs.replace


class EnvConfig(Settings, frozen=True, kw_only=True):
    """One environment that tasks can name. It is built once per rollout."""

    name: str = ""
    """A built-in environment, one that an installed package names in its entry points, `module:Class`, or
    `module:function` for an agent (docs/agents/coroutine.md). Empty: the name that tasks use, NAME of
    actor.environments.NAME."""
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Keyword arguments of the environment's class, e.g. `answer_pattern` of single_turn. Unknown ones are refused.
    Rows of the prompts file can set others for themselves, in `env_options`."""
    max_turns: PositiveInt = 8
    """Turns the student may take. After the last one the environment gives its reward and the episode ends. For an
    agent: calls of `generate`, all lines of conversation together."""
    step_timeout_s: PositiveFloat = 30.0
    """Longest time that one reset, step or close may take, or an agent between two responses, in seconds. A rollout
    whose environment takes longer fails (env_timeout), and its ticket is issued again."""


class ActorConfig(WorkerSettings, frozen=True, kw_only=True):
    """One actor: its engine, its rollouts and how they are streamed."""

    engines: Annotated[dict[str, Settings], EngineOptions("actor")] = msgspec.field(default_factory=dict[str, Settings])
    """Options of engines from other packages, set as actor.NAME.KEY."""
    torch: EngineConfig = msgspec.field(default_factory=EngineConfig)
    """Settings of the embedded engine."""
    sglang: SGLangConfig = msgspec.field(default_factory=SGLangConfig)
    """The actor's connection to its SGLang server."""
    segment_tokens: PositiveInt = 256
    """Tokens per segment sent to the buffer (the first one holds the whole prompt as well). Smaller: teachers start
    earlier; larger: fewer messages, and a teacher without a prefix cache reads fewer prefixes again."""
    max_concurrent_rollouts: PositiveInt = 64
    """Rollouts that run at once in this actor, including those waiting for their environment."""
    max_failures_in_a_row: PositiveInt = 64
    """Consecutive rollouts that may fail (environment or engine errors) before the actor ends with an error. Until
    then, new rollouts are started more and more slowly."""
    environments: dict[str, EnvConfig] = msgspec.field(default_factory=dict[str, EnvConfig])
    """Environments by the name that rows of the prompts file (column `env`) and `learner.tasks.env` use. The latter
    need not be listed: it may be a registered environment with its default options. Any other name is refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_engine("actor", self.engine, self.urls)

    def environments_of(self, task_env: str) -> dict[str, EnvConfig]:
        """All environments that a task may name, where the configured tasks name `task_env`."""
        named = {task_env: EnvConfig()} | self.environments
        return {key: replace(config, name=config.name or key) for key, config in named.items()}
