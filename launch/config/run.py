"""The configuration tree of a run: one Struct per component, each beside its component, composed here. No torch.

A field is a key on the command line (`--learner.lr 1e-3`) and in a file. What a key means stands under it.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from actors.config import ActorConfig
from buffer.config import BufferConfig
from learner.config import LearnerConfig
from teachers.config import PoolConfig, TeacherConfig
from weights.config import WeightsConfig

BUILTIN: Final = "builtin"
"""As a model or as prompts: those that ship with the project."""


class ModelsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The student and the teacher: each a Hugging Face folder, a name on the model hub, or `builtin`."""

    student: str = BUILTIN
    """Model to train."""
    teacher: str = BUILTIN
    """Model that scores what the student writes. Its tokenizer must map the same tokens to the same ids."""


class LaunchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How processes are started, watched and stopped."""

    start_method: Literal["auto", "fork", "spawn"] = "auto"
    """fork: from one warmed parent (Linux); spawn: a fresh interpreter each; auto: fork where that is safe."""
    threads_per_worker: int = 1
    """Native threads of each worker process (OMP_NUM_THREADS)."""
    ready_timeout_s: float = 600.0
    """All workers must have been welcomed by the buffer this long after the start."""
    max_restarts: int = 3
    """A worker that dies more often than this within `restart_window_s` stops the run."""
    restart_window_s: float = 300.0
    """Restarts longer ago than this are forgotten."""
    restart_backoff_s: float = 0.5
    """Wait before the first restart; doubles with each one in the window."""
    restart_backoff_max_s: float = 15.0
    """The longest wait before a restart."""
    silent_kill_s: float = 60.0
    """A worker whose process runs, but which the buffer counts as lost and has not heard of for this long, is killed
    (and started again like any dead one)."""
    shutdown_grace_s: float = 20.0
    """How long workers may take to leave by themselves, at each stage of stopping, before SIGKILL. A teacher has
    the time of its drain_s in any case."""
    status: Literal["auto", "rich", "plain", "off"] = "auto"
    """Live status: rich = a table on the terminal, plain = one line now and then; auto = rich on a terminal."""
    status_every_s: float = 5.0
    """Seconds between plain status lines."""
    memory_every_s: float = 5.0
    """Seconds between samples of the memory of all processes; more where there are many of them."""

    def __post_init__(self) -> None:
        if self.threads_per_worker < 1:
            raise ValueError(f"threads_per_worker must be at least 1, got {self.threads_per_worker}")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be 0 (never) or more, got {self.max_restarts}")
        for name in (
            "ready_timeout_s",
            "restart_window_s",
            "silent_kill_s",
            "shutdown_grace_s",
            "status_every_s",
            "memory_every_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.restart_backoff_s <= self.restart_backoff_max_s:
            raise ValueError(
                f"restart_backoff_s must be between 0 and restart_backoff_max_s ({self.restart_backoff_max_s}), "
                f"got {self.restart_backoff_s}"
            )


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run."""

    steps: int = 200
    """Optimizer steps; the run ends after them."""
    seed: int = 0
    """Random seed for task order and sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where learner, actors, teachers and servers run, unless their own `device` says otherwise. auto: on GPUs if there
    are any."""
    actors: int = 2
    """Number of actors: student processes that write rollouts. With actor.urls: one per url. More can join during the
    run (launch/cluster.py join). 0: the run waits for actors to join."""
    teachers: int = 1
    """Number of teachers: processes that score rollouts. With teacher.urls: one per url; with pools: the sum of their
    counts. More can join. 0: the run waits for teachers to join, unless
    learner.objective.coef = 0, which needs none."""
    models: ModelsConfig = msgspec.field(default_factory=ModelsConfig)
    learner: LearnerConfig = msgspec.field(default_factory=LearnerConfig)
    buffer: BufferConfig = msgspec.field(default_factory=BufferConfig)
    weights: WeightsConfig = msgspec.field(default_factory=WeightsConfig)
    actor: ActorConfig = msgspec.field(default_factory=ActorConfig)
    teacher: TeacherConfig = msgspec.field(default_factory=TeacherConfig)
    pools: dict[str, PoolConfig] = msgspec.field(default_factory=dict[str, PoolConfig])
    """Several teacher models: one section `[pools.NAME]` each, with a model, a count, and settings that differ from
    `teacher`. learner.tasks.routes says which tags a pool scores. Empty: one pool of `teachers` with models.teacher."""
    launch: LaunchConfig = msgspec.field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("actors", 0), ("teachers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, got {self.seed}")
        self._check_pools()
        self._refuse_publishing_too_rarely()

    def _check_pools(self) -> None:
        for name, pool in self.pools.items():
            if not name:
                raise ValueError("pools: got an empty name, expected one that learner.tasks.routes has, e.g. math")
            try:
                pool.settings(self.teacher, name)
            except ValueError as error:
                raise ValueError(f"pools.{name}: {error}") from error
        if not self.pools:
            return
        if self.teacher.urls or self.teacher.pool != "default":
            raise ValueError(
                "teacher.urls and teacher.pool are of a run with one pool, got them beside pools; expected "
                "pools.NAME.urls, and the name in the key"
            )
        counted = sum(pool.count for pool in self.pools.values())
        if self.teachers != counted:
            told = ", ".join(f"{name}: {pool.count}" for name, pool in self.pools.items())
            raise ValueError(
                f"teachers is {self.teachers}, expected {counted}, the sum of the pools ({told}); leave it out, and "
                "say how many by pools.NAME.count"
            )

    def _refuse_publishing_too_rarely(self) -> None:
        """Tickets wait for weights; those that are never published must not be waited for."""
        every, staleness = self.learner.publish_every, self.buffer.max_staleness
        if every > staleness + 1:
            raise ValueError(
                f"learner.publish_every is {every}, expected at most buffer.max_staleness + 1 = {staleness + 1}: all "
                "that the actors could sample would be too stale, and the run would stand still"
            )
        if self.learner.eval_every % every:
            raise ValueError(
                f"learner.eval_every is {self.learner.eval_every}, expected a multiple of learner.publish_every = "
                f"{every}: an evaluation waits at the actors for the weights of its step"
            )


BUILTIN_RECIPE: Final[dict[str, object]] = {
    "learner": {"lr": 3e-4},
    "buffer": {"max_staleness": 1},
    "actor": {"segment_tokens": 64},
}
"""Laid under what the user says where the student is the built-in one: what suits a model of under a million parameters
does not suit others."""

ALIASES: Final = {
    "student": "models.student",
    "teacher": "models.teacher",
    "max_staleness": "buffer.max_staleness",
    "prompts": "learner.tasks.prompts",
    "eval_prompts": "learner.tasks.eval_prompts",
    "env": "learner.tasks.env",
    "divergence": "learner.objective.divergence",
    "importance": "learner.objective.importance",
    "advantage": "learner.objective.advantage",
    "lambda": "learner.offline.student_fraction",
    "offline": "learner.offline.file",
    "record": "learner.record",
}
"""Short flag -> key. On the command line only; a file says the key."""
