"""The machines of a run on several hosts: --backend ray, and `stillhouse render`. No torch."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from stillhouse.protocol.settings import NonNegativeInt, PositiveInt, Settings


class HostConfig(Settings, frozen=True, kw_only=True):
    """What each host of the learner is asked for. The first one also has the launcher, the buffer, and the workers of
    roles without hosts of their own."""

    cpus: PositiveInt = 8
    """CPU cores of each host."""
    gpus: NonNegativeInt = 0
    """GPUs of each host."""
    memory_gib: PositiveInt = 32
    """Memory of each host, GiB."""


class RoleHostsConfig(HostConfig, frozen=True, kw_only=True):
    """Hosts of actors, or of teachers."""

    each: NonNegativeInt = 0
    """Workers on each host. 0: the role has no hosts of its own; its workers run beside the learner."""


class ClusterConfig(Settings, frozen=True, kw_only=True):
    """Machines by role, for --backend ray and for stillhouse render. Other runs use the machine that they are on."""

    learner: HostConfig = msgspec.field(default_factory=HostConfig)
    actors: RoleHostsConfig = msgspec.field(default_factory=RoleHostsConfig)
    teachers: RoleHostsConfig = msgspec.field(default_factory=RoleHostsConfig)
    port: Annotated[int, Meta(ge=1, le=65535)] = 5555
    """Port of the buffer on the learner's first host, where other hosts join the run."""
    sbatch: str = ""
    """Further options of Slurm's sbatch, for every group of hosts: --partition=gpu --time=24:00:00"""
    image: str = ""
    """Kubernetes: the container image of all pods, in which `stillhouse` can be called."""
    volume_gib: PositiveInt = 200
    """Kubernetes: size of the volume for the run's folder."""
