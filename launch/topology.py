"""Which hosts a run needs, and what starts on each: a pure function of its configuration.

Roles with hosts of their own (`cluster.actors.each`, `cluster.teachers.each`) join the run from there; the others run
beside the learner. launch.render turns this into the files of a scheduler, launch.ray asks Ray for these hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from stillhouse.launch.config.cluster import HostConfig
from stillhouse.launch.config.pools import needs_no_teacher
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.report.figures import plural
from stillhouse.protocol.addresses import is_local

GroupName: TypeAlias = Literal["run", "ranks", "actors", "teachers"]
LONGEST_POOL: Final = 30
POOL_NAME: Final = re.compile(rf"[a-z0-9]([a-z0-9-]{{0,{LONGEST_POOL - 2}}}[a-z0-9])?")
"""What Kubernetes and the names of workers allow."""
REJOIN_S: Final = 10
"""Seconds between two tries to join the run."""


class HostGroup(NamedTuple):
    """Hosts with the same task."""

    name: GroupName
    """run: the launcher, the buffer, the learner (or its first ranks), and roles without hosts of their own. ranks:
    further ranks of the learner."""
    workers: tuple[int, ...]
    """Workers on each host (`shares`); of `run` and `ranks`, the learner's ranks there."""
    host: HostConfig
    pool: str = ""
    """The pool that these teachers serve, in a run with `pools`; else empty."""

    @property
    def label(self) -> str:
        """Another one for each group; the workers' names begin with it."""
        return f"{self.name}-{self.pool}" if self.pool else self.name

    @property
    def flag(self) -> str:
        """The flags of `stillhouse join`, up to the number of these workers."""
        pool = f"--pool {self.pool} " if self.pool else ""
        return "--learner-ranks" if self.name == "ranks" else f"{pool}--{self.name}"


def host_groups(config: RunConfig, *, one_machine: bool = False) -> tuple[HostGroup, ...]:
    """All groups; that of the run is the first. `one_machine`: all hosts are this machine. Raises ConfigError for a
    configuration that cannot be spread."""
    cluster, learner = config.cluster, config.learner
    groups = [HostGroup("run", (learner.ranks_each,), cluster.learner)]
    if learner.hosts > 1:
        groups.append(HostGroup("ranks", (learner.ranks_each,) * (learner.hosts - 1), cluster.learner))
    for pool, n in ({name: pool.count for name, pool in config.pools.items()} or {"": config.teachers}).items():
        if cluster.teachers.each and n:
            groups.append(HostGroup("teachers", shares(n, cluster.teachers.each), cluster.teachers, pool))
    if cluster.actors.each and config.actors:
        groups.append(HostGroup("actors", shares(config.actors, cluster.actors.each), cluster.actors))
    if mistakes := list(_mistakes(config, groups, one_machine=one_machine)):
        raise ConfigError(*mistakes)
    return tuple(groups)


def shares(count: int, each: int) -> tuple[int, ...]:
    """`count` workers on hosts of `each`; the last host has the rest."""
    return (each,) * (count // each) + ((count % each,) if count % each else ())


def beside_the_learner(config: RunConfig) -> RunConfig:
    """The configuration of the run itself: without the workers of roles that have hosts of their own."""
    replace, cluster = msgspec.structs.replace, config.cluster
    if cluster.teachers.each:
        pools = {name: replace(pool, count=0) for name, pool in config.pools.items()}
        config = replace(config, teachers=0, pools=pools)
    return replace(config, actors=0) if cluster.actors.each else config


def workers_text(config: RunConfig, elsewhere: str) -> str:
    """Workers beside the learner, and those on other hosts. `elsewhere`: those that the backend starts; without it, a
    role with hosts of its own joins from there, as many as come."""
    parts: list[str] = []
    joining: list[str] = []
    for role, here, hosts in (
        ("actor", config.actors, config.cluster.actors),
        ("teacher", config.teachers, config.cluster.teachers),
    ):
        if role == "teacher" and needs_no_teacher(config):
            parts.append("no teacher")
        elif here or not hosts.each:
            parts.append(plural(here, role))
        elif not elsewhere:
            joining.append(f"{role}s")
    if joining:
        elsewhere = f"{' and '.join(joining)} that join from other hosts"
    return ", ".join([*parts, *filter(None, [elsewhere])])


def flags_of_the_run(groups: Sequence[HostGroup]) -> str:
    """`beside_the_learner` as flags, in a scheduler's script."""
    none = [f" --pools.{group.pool}.count 0" if group.pool else f" --{group.name} 0" for group in _workers(groups)]
    return "".join(none)


def _workers(groups: Sequence[HostGroup]) -> list[HostGroup]:
    """Those of actors and teachers, the actors first."""
    return sorted((group for group in groups if group.name in ("actors", "teachers")), key=lambda group: group.name)


def said_of(host: HostConfig) -> str:
    """The resources of a host, for a message."""
    return resources(host.cpus, host.gpus, host.memory_gib)


def said_of_groups(groups: Sequence[HostGroup]) -> Iterator[str]:
    """A line for each group of hosts."""
    for group in groups:
        n = len(group.workers)
        yield f"  {group.label}: {plural(n, 'host')} with {said_of(group.host)}{' each' if n > 1 else ''}"


def resources(cpus: int, gpus: int, memory_gib: int) -> str:
    """`8 CPUs, 1 GPU and 64 GiB`."""
    return f"{plural(cpus, 'CPU')}, {plural(gpus, 'GPU')} and {memory_gib} GiB"


def _mistakes(config: RunConfig, groups: Sequence[HostGroup], *, one_machine: bool) -> Iterator[str]:
    names = [group.name for group in groups]
    if "actors" in names and config.actor.urls:
        yield "cluster.actors.each: expected 0 with actor.urls, whose servers are there already"
    if "teachers" in names and (config.teacher.urls or any(pool.urls for pool in config.pools.values())):
        yield "cluster.teachers.each: expected 0 with urls of teachers, whose servers are there already"
    if "teachers" in names and not config.learner.objective.reads_teachers:
        yield (
            f"teachers: got {config.teachers} on hosts of their own, but nothing in the objective reads their scores, "
            "so that no task would be sent to them; expected 0, or cluster.teachers.each = 0, where scores are figures"
        )
    if "teachers" in names and config.pools:
        for pool in config.pools:
            if not POOL_NAME.fullmatch(pool):
                yield (
                    f"pools.{pool}: expected a name of at most {LONGEST_POOL} small letters, digits and dashes, "
                    "because teachers on hosts of their own are called by it"
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
