"""The configuration tree of a run: one Struct per component, each beside its component, composed here. No torch.

A field is a key on the command line (`--learner.lr 1e-3`) and in a file. What a key means stands under it.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from stillhouse.actors.config import ActorConfig, EnvConfig
from stillhouse.buffer.config import BufferConfig
from stillhouse.launch.config.cluster import ClusterConfig
from stillhouse.learner.config import LearnerConfig
from stillhouse.protocol.messages import TopIdsWanted
from stillhouse.protocol.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Settings
from stillhouse.teachers.config import PoolConfig, TeacherConfig
from stillhouse.weights.config import WeightsConfig

BUILTIN: Final = "builtin"
"""Value of a model or of prompts: the ones that ship with the project."""
AUTO_THREADS: Final = "auto"
"""Value of launch.threads_per_worker with which the launcher shares the cores."""


class ModelsConfig(Settings, frozen=True, kw_only=True):
    """The student and the teacher: each a Hugging Face folder, a name on the model hub, or `builtin`."""

    student: str = BUILTIN
    """Model to train."""
    teacher: str = BUILTIN
    """Model that scores what the student writes. Its tokenizer must map the same tokens to the same ids."""


class LaunchConfig(Settings, frozen=True, kw_only=True):
    """How processes are started, watched and stopped."""

    backend: Literal["local", "ray"] = "local"
    """local: all workers on this machine. ray: as the section `cluster` says, on the nodes of the Ray cluster at
    RAY_ADDRESS, or of one that is started here. Jobs for Slurm and Kubernetes are made by `stillhouse render`
    (docs/cluster.md)."""
    start_method: Literal["auto", "fork", "spawn"] = "auto"
    """fork: workers start from one parent that has imported torch (Linux). spawn: each is a new interpreter. auto: fork
    where that is safe."""
    threads_per_worker: PositiveInt | Literal["auto"] = "auto"
    """Native threads of each worker process, whatever OMP_NUM_THREADS says. auto: the cores of each machine (fewer by
    affinity or by the quota of a container) are shared among the learner, teachers and actors that compute on its CPU,
    by what each has to do; --check shows the result."""
    share: Literal["together", "turns"] = "together"
    """How roles share a device. together: all compute at the same time, and each has a part of the memory. turns: the
    learner, actors and teachers of this machine compute one after the other, and only one of them has its weights and
    caches on the device; the others keep theirs in host memory (docs/one-gpu.md)."""
    ready_timeout_s: PositiveFloat = 600.0
    """Seconds after the start by which all workers must have connected to the buffer, and a restarted one again; and
    for which workers wait for a buffer that is being restarted. Raise it for models that load slowly. With --backend
    ray, also how long the start waits for room on the cluster."""
    max_restarts: NonNegativeInt = 3
    """Restarts of one worker within five minutes. If it dies once more, the run ends. 0: never restart."""
    restart_backoff_s: NonNegativeFloat = 0.5
    """Seconds before the first restart of a worker; doubled with each further one, up to 30 times."""
    silent_kill_s: PositiveFloat = 60.0
    """A worker that was connected and whose process runs, but from which the buffer has heard nothing for this many
    seconds, is killed and restarted like a dead one."""
    shutdown_grace_s: PositiveFloat = 20.0
    """Seconds that workers have to leave by themselves, at each stage of stopping, before SIGKILL. A teacher always has
    at least its drain_s."""
    status: Literal["auto", "rich", "plain", "off"] = "auto"
    """Live status. rich: a table in the terminal. plain: one line every status_every_s. auto: rich in a terminal, else
    plain."""
    status_every_s: PositiveFloat = 5.0
    """Seconds between plain status lines."""
    trace: str = ""
    """File for a trace of the run, which https://ui.perfetto.dev opens: what every process did when (docs/tracing.md).
    Compressed if its name ends in .gz. Written at the end of the run; until then each process writes its events into
    trace/ of the run folder, at most 64 MiB. Empty: no trace, and no cost."""
    gpu_hour_price: NonNegativeFloat = 0.0
    """What an hour of one GPU costs, in any currency. The summary then has what the run's GPU hours cost: those of all
    GPUs of the learner, students and teachers, from the start of a launch to its end. 0: it has the hours only."""
    prometheus: str = ""
    """Serve the status to Prometheus at this port of 127.0.0.1, or at HOST:PORT, under /metrics. 0: a free port, which
    is printed. Empty: do not serve it. Anyone who reaches the port can read it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prometheus and not re.fullmatch(r"([^\s:]+:)?\d{1,5}", self.prometheus):
            raise ValueError(f"prometheus: got {self.prometheus!r}, expected a port or HOST:PORT, e.g. 9464")


class RunConfig(Settings, frozen=True, kw_only=True):
    """A whole run."""

    steps: PositiveInt = 200
    """Optimizer steps; the run ends after them."""
    seed: NonNegativeInt = 0
    """Random seed for task order and sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the learner, actors, teachers and servers whose own `device` is auto. auto: GPUs if there are any."""
    actors: NonNegativeInt = 2
    """Number of actors: student processes that write rollouts. With actor.urls: one per url. More can join during the
    run (stillhouse join). 0: the run waits for actors to join."""
    teachers: NonNegativeInt = 1
    """Number of teachers: processes that score rollouts. With teacher.urls: one per url; with pools: the sum of their
    counts. More can join. 0: the run waits for teachers to join, unless
    learner.objective.coef = 0 or learner.objective.divergence = null, which need none."""
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
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)

    @property
    def environments(self) -> dict[str, EnvConfig]:
        """All environments that a task may name."""
        return self.actor.environments_of(self.learner.tasks.env)

    @property
    def top_ids(self) -> TopIdsWanted | None:
        """The sets of the student's likeliest tokens that the teachers score; None: they score their own."""
        return self.teacher.sends.top_ids

    @property
    def mixed_teacher(self) -> str:
        """Model that is mixed into what the student samples from; empty: none."""
        return self.models.teacher if self.learner.tasks.teacher_share else ""

    def __post_init__(self) -> None:
        super().__post_init__()
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
            own_sets = [key for key in ("top_k", "top_mass") if getattr(pool, key) is not None]
            if own_sets and self.top_ids is not None:
                raise ValueError(
                    f"pools.{name}.{own_sets[0]}: got a value with teacher.top_k_of = student, expected none: all "
                    f"pools score the same sets of the student; set teacher.{own_sets[0]}"
                )
        if not self.pools:
            return
        if self.teacher.urls or self.teacher.pool != "default":
            raise ValueError(
                "teacher.urls and teacher.pool are of a run with one pool, got them beside pools; expected "
                "pools.NAME.urls, and the name in the key"
            )
        counted = sum(pool.count for pool in self.pools.values())
        if self.teachers != counted:
            counts = ", ".join(f"{name}: {pool.count}" for name, pool in self.pools.items())
            raise ValueError(
                f"teachers is {self.teachers}, expected {counted}, the sum of the pools ({counts}); leave it out, and "
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
        evaluated = {"eval_every": self.learner.eval_every}
        evaluated |= {f"eval_sets.{name}.every": one.every for name, one in self.learner.eval_sets.items()}
        for key, steps in evaluated.items():
            if steps % every:
                raise ValueError(
                    f"learner.{key} is {steps}, expected a multiple of learner.publish_every = "
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
    "trace": "launch.trace",
    "backend": "launch.backend",
    "track": "learner.trackers",
    "stop_on_alarm": "learner.stop_on_alarm",
}
"""Short flag -> key. On the command line only; files use the key."""
SHORT_FLAGS: Final = {key: alias.replace("_", "-") for alias, key in ALIASES.items()}
"""Key -> short flag, as it is typed after `--`."""
