"""Configuration of an actor and of the environments its rollouts run in."""

from __future__ import annotations

from typing import Any

import msgspec

from engines.config import EngineConfig
from engines.registry import check_engine
from engines.sglang.config import ServerConfig, SGLangConfig, check_urls


class EnvConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One environment that tasks can name. It is built once per rollout."""

    name: str = "single_turn"
    """A built-in environment, one that an installed package names in its entry points, or `module:Class`."""
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Keyword arguments of the environment's class, e.g. `answer_pattern` of single_turn. Unknown ones are refused."""
    max_turns: int = 8
    """Turns the student may take. After the last one the environment is asked for the reward and the episode ends."""
    step_timeout_s: float = 30.0
    """Longest that one reset, step or close may take. A rollout whose environment takes longer fails (env_timeout), and
    its ticket is issued again."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("environment name is empty: expected a registered name or module:Class")
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {self.max_turns}")
        if not self.step_timeout_s > 0:
            raise ValueError(f"step_timeout_s must be above 0, got {self.step_timeout_s}")


class ActorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One actor: its engine, its rollouts and how they are streamed."""

    engine: str = "auto"
    """Generation engine. `torch` is the embedded one; `sglang`: each actor has an SGLang server; `auto`: sglang where
    there are GPUs and actor.server.python has SGLang (or with urls), else torch. Others: one that an installed package
    names in its entry points, or `module:attribute` (docs/engines.md)."""
    torch: EngineConfig = msgspec.field(default_factory=EngineConfig)
    """Settings of the embedded engine."""
    sglang: SGLangConfig = msgspec.field(default_factory=SGLangConfig)
    """How an actor talks to its SGLang server."""
    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    """How the launcher starts those servers."""
    urls: tuple[str, ...] = ()
    """Running SGLang servers to use instead of starting some, one per actor, e.g. http://10.0.0.7:30000."""
    segment_tokens: int = 256
    """Tokens per segment sent to the buffer (the first one holds the whole prompt besides). Smaller: teachers start
    earlier; larger: fewer messages, and fewer prefixes read again by a teacher that keeps no prefix cache."""
    max_concurrent_rollouts: int = 64
    """Rollouts that run at once in this actor, those waiting for their environment included."""
    max_failures_in_a_row: int = 64
    """Rollouts that may fail one after the other (environment or engine errors) with none that ends well in between;
    then the actor ends with an error. Before that, new rollouts are started more and more slowly."""
    environments: dict[str, EnvConfig] = msgspec.field(default_factory=dict[str, EnvConfig])
    """Environments by the name that tasks use. `learner.tasks.env` need not be listed: it may be a registered
    environment with its default options. A task that names any other is refused."""

    def __post_init__(self) -> None:
        if self.segment_tokens < 1:
            raise ValueError(f"segment_tokens must be at least 1, got {self.segment_tokens}")
        if self.max_failures_in_a_row < 1:
            raise ValueError(f"max_failures_in_a_row must be at least 1, got {self.max_failures_in_a_row}")
        if self.max_concurrent_rollouts < 1:
            raise ValueError(f"max_concurrent_rollouts must be at least 1, got {self.max_concurrent_rollouts}")

        check_urls(self.urls)
        check_engine("actor", self.engine, self.urls)

    def environments_of(self, task_env: str) -> dict[str, EnvConfig]:
        """All that a task may name, where the configured tasks name `task_env`."""
        return {task_env: EnvConfig(name=task_env)} | self.environments
