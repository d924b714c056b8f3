"""Which hosts a run needs, and what starts on each: a pure function of its configuration.

Roles with hosts of their own (`cluster.actors.each`, `cluster.teachers.each`) join the run from there; the others run
beside the learner. The renderers turn this into the files of a scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from launch.config.cluster import HostConfig
from launch.config.run import RunConfig
from launch.errors import ConfigError
from protocol.addresses import is_local

GroupName: TypeAlias = Literal["run", "ranks", "actors", "teachers"]
REJOIN_S: Final = 10
"""Seconds between two tries to join the run, in every scheduler's script."""


class HostGroup(NamedTuple):
    """Hosts with the same task."""

    name: GroupName
    """run: the launcher, the buffer, the learner (or its first ranks), and roles without hosts of their own. ranks:
    further ranks of the learner."""
    workers: tuple[int, ...]
    """Workers on each host, as even as possible; of `run` and `ranks`, the learner's ranks there."""
    host: HostConfig

    @property
    def flag(self) -> str:
        """The flag of `cluster.py join` that says how many of these workers join."""
        return "--learner-ranks" if self.name == "ranks" else f"--{self.name}"


def host_groups(config: RunConfig, *, one_machine: bool = False) -> tuple[HostGroup, ...]:
    """All groups; that of the run is the first. `one_machine`: all hosts are this machine. Raises ConfigError for a
    configuration that cannot be spread."""
    cluster, learner = config.cluster, config.learner
    groups = [HostGroup("run", (learner.ranks_each,), cluster.learner)]
    if learner.hosts > 1:
        groups.append(HostGroup("ranks", (learner.ranks_each,) * (learner.hosts - 1), cluster.learner))
    if cluster.teachers.each and config.teachers:
        groups.append(HostGroup("teachers", _shares(config.teachers, cluster.teachers.each), cluster.teachers))
    if cluster.actors.each and config.actors:
        groups.append(HostGroup("actors", _shares(config.actors, cluster.actors.each), cluster.actors))
    if mistakes := list(_mistakes(config, groups, one_machine=one_machine)):
        raise ConfigError(*mistakes)
    return tuple(groups)


def none_beside_the_learner(groups: Sequence[HostGroup]) -> str:
    """Flags of the run itself: it starts no worker of a role that has hosts of its own."""
    names = {group.name for group in groups}
    return "".join(f" --{role} 0" for role in ("actors", "teachers") if role in names)


def _shares(count: int, each: int) -> tuple[int, ...]:
    """`count` workers on as few hosts as `each` allows, as evenly as possible, larger shares first."""
    hosts = -(-count // each)
    return tuple(count // hosts + (host < count % hosts) for host in range(hosts))


def _mistakes(config: RunConfig, groups: Sequence[HostGroup], *, one_machine: bool) -> Iterator[str]:
    names = [group.name for group in groups]
    if "actors" in names and config.actor.urls:
        yield "cluster.actors.each: expected 0 with actor.urls, whose servers are there already"
    if "teachers" in names and (config.teacher.urls or config.pools):
        yield (
            "cluster.teachers.each: expected 0 with teacher.urls or pools; let those teachers run beside the learner, "
            "or start them by `cluster.py join RUN --pool NAME`"
        )
    plain = config.weights.allow_plain_network or one_machine
    if "ranks" in names and not plain:
        yield (
            "weights.allow_plain_network: got false, but the learner's ranks on several hosts exchange batches and "
            "gradients without encryption (SECURITY.md); set it to true if the network between these hosts is private"
        )
    if "actors" in names and config.weights.backend == "nccl" and not plain:
        yield (
            "weights.backend: got nccl, which sends weights to other hosts without encryption (SECURITY.md); use auto, "
            "or set weights.allow_plain_network to true if the network between these hosts is private"
        )
    if len(groups) > 1 and not (is_local(config.buffer.bind) and is_local(config.weights.host)):
        yield (
            "buffer.bind, weights.host: got an address of a host, expected none: which hosts the job gets is known "
            "when it starts, and it uses that of its first one, with cluster.port"
        )
