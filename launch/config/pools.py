"""Teacher pools of a run: who serves which, with which model and settings. No torch.

A run without `[pools]` has one, `teacher.pool`, of `teachers` teachers; or none, where no task is for a teacher.
Teachers are numbered through all pools, in the order of the configuration: teacher-0, teacher-1, ...
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from actors.config import ActorConfig
from engines.provider import EngineProvider, EngineRole
from engines.registry import find_engine
from launch.config.run import RunConfig
from protocol.context import WorkerRole
from teachers.config import TeacherConfig

replace = msgspec.structs.replace


class TeacherPool(NamedTuple):
    """The teachers that hold one model."""

    name: str
    key: str
    """Where its settings stand: `teacher`, or `pools.NAME`."""
    model_key: str
    first: int
    """Index of its first teacher."""
    config: RunConfig
    """As these teachers see it: `teacher` and `models.teacher` are the pool's, `teachers` is how many they are."""


def teacher_pools(config: RunConfig) -> tuple[TeacherPool, ...]:
    """All pools, in the order of the configuration."""
    if needs_no_teacher(config):
        return ()
    if not config.pools:
        return (TeacherPool(config.teacher.pool, "teacher", "models.teacher", 0, config),)
    found: list[TeacherPool] = []
    first = 0
    for name, pool in config.pools.items():
        settings = pool.settings(config.teacher, name)
        if pool.server is None and settings.server.port:  # ports are counted through all that share these settings
            settings = replace(settings, server=replace(settings.server, port=settings.server.port + first))
        models = replace(config.models, teacher=pool.model or config.models.teacher)
        own = replace(config, pools={}, teachers=pool.count, teacher=settings, models=models)
        model_key = f"pools.{name}.model" if pool.model else "models.teacher"
        found.append(TeacherPool(name, f"pools.{name}", model_key, first, own))
        first += pool.count
    return tuple(found)


def engine_of(config: RunConfig, role: EngineRole) -> EngineProvider:
    """Of the actors, or of the teachers; `config`: of a pool, as its teachers see it."""
    return find_engine(config.actor.engine if role == "actor" else config.teacher.engine)


class WorkerGroup(NamedTuple):
    """Workers that are alike: the actors, or the teachers of one pool."""

    key: str
    """Where their settings stand: actor, teacher, pools.NAME."""
    role: EngineRole
    first: int
    """Number of the first of these workers."""
    config: RunConfig
    """As they see it."""

    @property
    def engine(self) -> EngineProvider:
        return engine_of(self.config, self.role)

    @property
    def settings(self) -> ActorConfig | TeacherConfig:
        return self.config.actor if self.role == "actor" else self.config.teacher

    @property
    def n(self) -> int:
        return self.config.actors if self.role == "actor" else self.config.teachers


def worker_groups(config: RunConfig) -> tuple[WorkerGroup, ...]:
    """All that have engines, the actors first."""
    pools = teacher_pools(config)
    return (
        WorkerGroup("actor", "actor", 0, config),
        *(WorkerGroup(pool.key, "teacher", pool.first, pool.config) for pool in pools),
    )


def needs_no_teacher(config: RunConfig) -> bool:
    """Nobody is asked to grade anything: there is no teacher, and none is expected to join."""
    return not config.teachers and not config.learner.tasks.routes


def without_idle_routes(config: RunConfig) -> RunConfig:
    """No task is for a teacher where there is none and grades would have no weight: what waited for one would wait for
    ever. With a teacher grades are a metric."""
    learner, objective = config.learner, config.learner.objective
    if config.teachers or objective.coef or any(objective.teacher_coefs.values()):
        return config
    tasks, objective = replace(learner.tasks, routes={}), replace(objective, teacher_coefs={})
    return replace(config, learner=replace(learner, tasks=tasks, objective=objective))


def config_of(config: RunConfig, role: WorkerRole, index: int) -> RunConfig:
    """What a worker reads. Of a teacher: the settings and the model of its pool."""
    return pool_of(config, index).config if role == "teacher" else config


def pool_of(config: RunConfig, index: int) -> TeacherPool:
    """Of the teacher with this number."""
    return next(pool for pool in reversed(teacher_pools(config)) if pool.first <= index)
