"""The hosts of a run on Ray that names none: what the nodes of the cluster have. Numbers only, without Ray."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from stillhouse.launch.config.cluster import HostConfig, RoleHostsConfig
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.ray.room import GIB, Node

replace = msgspec.structs.replace
LEAST: Final = Node("", 1, 0, GIB, here=False)
"""What a host needs."""


def with_hosts(config: RunConfig, nodes: Sequence[Node]) -> RunConfig:
    """The configuration with a section `cluster` that uses the nodes, if it names no host beside the learner's.

    The node of the command is the learner's, each other one a host of actors or of teachers, in proportion to their
    numbers; nodes without GPUs are left out where some have them. Where there is one other node it is the actors', and
    of a node that is alone the second half is. Teachers stay beside the learner then, and in a run with pools; so does
    what has running servers, and everybody where the cluster has no second CPU."""
    cluster = config.cluster
    if cluster.actors.each or cluster.teachers.each or config.learner.hosts > 1:
        return config
    here = next(node for node in nodes if node.here)
    others = [node for node in nodes if not node.here and _whole(node)]
    others = [node for node in others if node.gpus >= 1] or others
    given = cluster.learner != HostConfig()
    if not others:
        rest = here.without(cluster.learner) if given else _half(here)
        others = [rest] if _whole(rest) else []
        here = here.without(_resources([rest])) if others else here
    learner = cluster.learner if given else _resources([here])
    on_hosts = _hosts_of_teachers(config, len(others))
    actors, teachers = others[on_hosts:], others[:on_hosts]
    changed = replace(cluster, learner=learner)
    if actors and config.actors and not config.actor.urls:
        changed = replace(changed, actors=_role(cluster.actors, config.actors, actors))
    if teachers:
        changed = replace(changed, teachers=_role(cluster.teachers, config.teachers, teachers))
    return replace(config, cluster=changed)


def _hosts_of_teachers(config: RunConfig, n: int) -> int:
    """How many of `n` nodes are theirs."""
    elsewhere = config.teachers and not config.teacher.urls and config.learner.objective.reads_teachers
    if n < 2 or not elsewhere or config.pools:
        return 0
    return min(n - 1, max(1, round(n * config.teachers / (config.actors + config.teachers))))


def _role(hosts: RoleHostsConfig, workers: int, nodes: Sequence[Node]) -> RoleHostsConfig:
    given = replace(hosts, each=0, most=0) != RoleHostsConfig()
    own = hosts if given else _resources(nodes)
    n = sum(node.most(own) for node in nodes) if given else len(nodes)
    each = math.ceil(workers / max(1, n))
    return replace(hosts, each=each, cpus=own.cpus, gpus=own.gpus, memory_gib=own.memory_gib)


def _whole(node: Node) -> bool:
    return node.most(_resources([LEAST])) > 0


def _half(node: Node) -> Node:
    return node._replace(cpus=node.cpus // 2, gpus=node.gpus // 2, memory_bytes=node.memory_bytes // 2, here=False)


def _resources(nodes: Sequence[Node]) -> HostConfig:
    """What each of the nodes has; at least what a host has to ask for."""
    return HostConfig(
        cpus=max(1, min(int(node.cpus) for node in nodes)),
        gpus=min(int(node.gpus) for node in nodes),
        memory_gib=max(1, min(int(node.memory_bytes // GIB) for node in nodes)),
    )
