"""The teacher pools of a run, each with its model and settings. No torch.

A run without `[pools]` has one pool, `teacher.pool`, with `teachers` teachers; or none, if no task needs a teacher.
Teachers are numbered across all pools in the order of the configuration: teacher-0, teacher-1, ...
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from stillhouse.actors.config import ActorConfig
from stillhouse.engines.provider import EngineProvider, EngineRole, ServerEngine
from stillhouse.engines.registry import find_engine
from stillhouse.launch.config.run import RunConfig
from stillhouse.teachers.config import TeacherConfig

replace = msgspec.structs.replace


class TeacherPool(NamedTuple):
    """The teachers that hold one model."""

    name: str
    key: str
    """Key of its settings: `teacher` or `pools.NAME`."""
    model_key: str
    first: int
    """Index of its first teacher."""
    config: RunConfig
    """The configuration with `teacher`, `models.teacher` and `teachers` (their number) of this pool."""


def teacher_pools(config: RunConfig) -> tuple[TeacherPool, ...]:
    """All pools, in the order of the configuration."""
    if needs_no_teacher(config):
        return ()
    if not config.pools:
        return (_pool(config.teacher.pool, "teacher", "models.teacher", 0, config),)
    found: list[TeacherPool] = []
    first = 0
    for name, pool in config.pools.items():
        settings = pool.settings(config.teacher, name)
        if pool.server is None and settings.server.port:  # teachers that share settings share one range of ports
            settings = replace(settings, server=replace(settings.server, port=settings.server.port + first))
        models = replace(config.models, teacher=pool.model or config.models.teacher)
        own = replace(config, pools={}, teachers=pool.count, teacher=settings, models=models)
        model_key = f"pools.{name}.model" if pool.model else "models.teacher"
        found.append(_pool(name, f"pools.{name}", model_key, first, own))
        first += pool.count
    return tuple(found)


def measurable_pools(config: RunConfig) -> tuple[TeacherPool, ...]:
    """Pools whose model can write in a process of its own as the student does, for an accuracy of the teachers."""
    learner, tasks = config.learner, config.learner.tasks
    asked = any(learner.eval_tasks(name).eval_prompts_needed for name in learner.eval_names)
    if not learner.eval_every or learner.frozen or not (asked if learner.eval_teacher else tasks.eval_sampled):
        return ()
    if not engine_of(config, "actor").loads_model:
        return ()
    average = learner.ema.pool if learner.ema.decay else None
    return tuple(
        pool
        for pool in teacher_pools(config)
        if engine_of(pool.config, "teacher").loads_model and pool.config.teachers and pool.name != average
    )


def _pool(name: str, key: str, model_key: str, first: int, own: RunConfig) -> TeacherPool:
    """An API has no model folder. Where its tokenizer must be the student's, the student stands for it."""
    if own.teacher.api.url and own.teacher.tokenizer != "other":
        model_key, own = "models.student", replace(own, models=replace(own.models, teacher=own.models.student))
    return TeacherPool(name, key, model_key, first, own)


def engine_of(config: RunConfig, role: EngineRole) -> EngineProvider:
    """The engine of the actors or the teachers. For teachers, `config` is that of their pool (`TeacherPool.config`)."""
    return find_engine(config.actor.engine if role == "actor" else config.teacher.engine)


class WorkerGroup(NamedTuple):
    """Workers with the same settings: the actors, or the teachers of one pool."""

    key: str
    """Key of their settings: actor, teacher or pools.NAME."""
    role: EngineRole
    first: int
    """Index of the first worker."""
    config: RunConfig
    """The run's for actors, the pool's for teachers."""

    @property
    def engine(self) -> EngineProvider:
        return engine_of(self.config, self.role)

    @property
    def settings(self) -> ActorConfig | TeacherConfig:
        return self.config.actor if self.role == "actor" else self.config.teacher

    @property
    def model(self) -> str:
        return self.config.models.student if self.role == "actor" else self.config.models.teacher

    @property
    def servers(self) -> ServerEngine:
        """The servers' engine of a group that has servers."""
        servers = self.engine.servers
        assert servers is not None
        return servers

    @property
    def n(self) -> int:
        return self.config.actors if self.role == "actor" else self.config.teachers

    @property
    def workers(self) -> list[str]:
        """Their names, e.g. `actor-0`."""
        return [f"{self.role}-{self.first + index}" for index in range(self.n)]


def worker_groups(config: RunConfig) -> tuple[WorkerGroup, ...]:
    """All groups of workers that have engines; the actors come first."""
    pools = teacher_pools(config)
    return (
        WorkerGroup("actor", "actor", 0, config),
        *(WorkerGroup(pool.key, "teacher", pool.first, pool.config) for pool in pools),
    )


def group_of(config: RunConfig, role: EngineRole, index: int) -> WorkerGroup:
    """The group of the worker of this role with this index."""
    groups = [group for group in worker_groups(config) if group.role == role]
    return next(group for group in reversed(groups) if group.first <= index)


def needs_no_teacher(config: RunConfig) -> bool:
    """Whether nothing is scored: there is no teacher, and none is expected to join."""
    return not config.teachers and not config.learner.tasks.routes


def without_idle_routes(config: RunConfig) -> RunConfig:
    """Drop the routes if there is no teacher and scores have no weight in the loss, because tasks would wait for a
    teacher forever. If there is a teacher, scores are still reported as a metric."""
    learner, objective = config.learner, config.learner.objective
    if config.teachers or objective.reads_teachers:
        return config
    tasks, objective = replace(learner.tasks, routes={}), replace(objective, teacher_coefs={}, teacher_divergences={})
    return replace(config, learner=replace(learner, tasks=tasks, objective=objective))


def pool_of(config: RunConfig, index: int) -> TeacherPool:
    """The pool of the teacher with this index."""
    return next(pool for pool in reversed(teacher_pools(config)) if pool.first <= index)
