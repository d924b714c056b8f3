"""What a launcher has decided before it starts anything. Made once, by launch.run or launch.join.command."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from stillhouse.engines.provider import API_KEY_VARIABLE
from stillhouse.launch.checks.placement import NOWHERE, Placement
from stillhouse.launch.config.pools import group_of, worker_groups
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.processes.backend import ProcessBackend
from stillhouse.launch.servers.plan import ServerPlan, nccl_environment
from stillhouse.launch.workers.roles import ENTRIES
from stillhouse.launch.workers.start_role import WorkFolder
from stillhouse.protocol.context import WorkerRole

PRELOADED: Final = ("stillhouse.actors.worker", "stillhouse.teachers.worker")
PRELOADED_WITH_TORCH: Final = ("torch", "transformers")
"""Preloaded, with the learner's module, where an engine loads models in the worker's process. Without such an engine
the learner is spawned."""


def new_api_key() -> str:
    """A bearer key for servers."""
    return secrets.token_hex(32)  # letters and digits: a key that began with - would be taken for an argument


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The processes to start, and what they need."""

    config: RunConfig
    began_s: float
    """Monotonic time at which the user's command started."""
    resume: bool = False
    """Continue from the newest checkpoint in the run folder."""
    preload: tuple[str, ...] = ()
    """Modules that workers need; a backend may import them once for all workers."""
    entries: Mapping[WorkerRole, str] = field(default_factory=lambda: ENTRIES)
    """Role -> `module:function` of its main."""
    servers: tuple[ServerPlan, ...] = ()
    """Inference servers, started with the workers."""
    placement: Placement = NOWHERE
    """Devices of embedded workers."""
    api_key: str = field(default_factory=new_api_key, repr=False)
    """Bearer key of the servers."""

    def takes_turns(self, role: WorkerRole, index: int) -> bool:
        """Whether a worker shares its device with others in turn; a teacher at an API has none."""
        if self.config.launch.share != "turns" or role == "buffer":
            return False
        return role == "learner" or group_of(self.config, role, index).engine.takes_turns

    def gpus_of(self, role: WorkerRole, index: int) -> float:
        """See RoleContext."""
        places = self.placement.places
        own: Sequence[int | None] = ()
        if role == "learner":
            own = [gpu for who, gpu in places.seats.items() if who.startswith(role)] * self.config.learner.hosts
        elif role != "buffer":
            group = group_of(self.config, role, index)
            servers = places.servers.get(group.key)
            own = servers[index - group.first] if servers else [places.seats.get(f"{role}-{index}")]
        return sum(1 / places.gpus[gpu] for gpu in own if gpu is not None)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that workers get in addition to their host's. One of them is the servers' key, which
        must not appear on a command line or in a log."""
        shared = self.placement.weights.shared
        return nccl_environment(self.config, shared=shared) | ({API_KEY_VARIABLE: self.api_key} if self.servers else {})


MakeBackend: TypeAlias = Callable[[LaunchPlan, WorkFolder], ProcessBackend]
"""Makes what runs the workers of a plan, in a folder that exists."""


def preload_modules(
    config: RunConfig,
    model_types: Sequence[str],
    *,
    learner: bool = True,
    roles: Collection[str] = ("actor", "teacher"),
) -> tuple[str, ...]:
    """Modules that the fork server imports before it forks workers of `roles` and, with `learner`, the learner.

    They include everything that the workers' mains import inside functions, and the modules of the models, which
    transformers would otherwise import in each worker. Without an engine that loads a model there is no torch."""
    groups = [group for group in worker_groups(config) if group.role in roles]
    needed = [*PRELOADED, *(module for group in groups for module in group.engine.preload(group.role))]
    if not any(group.engine.loads_model for group in groups):
        return tuple(dict.fromkeys(needed))
    transformers = importlib.util.find_spec("transformers")
    models: list[str] = []
    if transformers is not None and transformers.origin is not None:
        folder = Path(transformers.origin).parent / "models"
        for model_type in model_types:
            name = model_type.replace("-", "_")
            if (folder / name / f"modeling_{name}.py").is_file():
                models.append(f"transformers.models.{name}.modeling_{name}")
    with_torch = (*PRELOADED_WITH_TORCH, "stillhouse.learner.worker") if learner else PRELOADED_WITH_TORCH
    return tuple(dict.fromkeys((*with_torch, *needed, *models)))
