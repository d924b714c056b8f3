"""A run on Ray that names no hosts: it fits on any cluster, each worker is somewhere, and what was named stays."""

from __future__ import annotations

import random
from typing import Any

import pytest

from stillhouse.launch.config.cluster import ClusterConfig
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.ray.default_hosts import with_hosts
from stillhouse.launch.ray.room import GIB, Node, spread_over
from stillhouse.launch.topology import beside_the_learner, host_groups


def node(cpus: int, gpus: int = 0, memory_gib: int = 64, *, here: bool = False) -> Node:
    return Node("10.0.0.1" if here else "10.0.0.2", cpus, gpus, memory_gib * GIB, here)


def config(**keys: Any) -> RunConfig:
    return build(RunConfig, {"weights": {"allow_plain_network": True}, **keys})


def sharing(filled: RunConfig) -> list[tuple[str, tuple[int, ...], int, int, int]]:
    return [(g.name, g.workers, g.host.cpus, g.host.gpus, g.host.memory_gib) for g in host_groups(filled)]


@pytest.mark.parametrize("seed", range(60))
def test_the_hosts_fit_on_any_cluster_and_each_worker_is_somewhere(seed: int) -> None:
    rng = random.Random(seed)
    nodes = [node(rng.randint(1, 8), rng.randint(0, 4), rng.randint(1, 16), here=True)]
    nodes += [node(rng.randint(0, 8), rng.randint(0, 4), rng.randint(0, 16)) for _ in range(rng.randint(0, 4))]
    actors, teachers = rng.randint(1, 40), rng.randint(0, 9)
    filled = with_hosts(config(actors=actors, teachers=teachers), nodes)
    groups = host_groups(filled)
    assert not spread_over(groups, nodes).missing
    beside = beside_the_learner(filled)
    placed = {group.name: sum(group.workers) for group in groups[1:]}
    assert placed.get("actors", 0) + beside.actors == actors
    assert placed.get("teachers", 0) + beside.teachers == teachers
    if len(nodes) == 1 and (nodes[0].cpus < 2 or nodes[0].memory_bytes < 2 * GIB):
        assert not placed
    elif len(nodes) == 1:
        assert placed == {"actors": actors}


def test_one_node_is_shared_by_the_run_and_the_actors() -> None:
    filled = with_hosts(config(actors=8, teachers=2), [node(2, 0, 15, here=True)])
    assert sharing(filled) == [("run", (1,), 1, 0, 8), ("actors", (8,), 1, 0, 7)]
    assert beside_the_learner(filled).teachers == 2


def test_other_nodes_are_hosts_in_proportion_to_the_workers() -> None:
    nodes = [node(8, 0, 32, here=True), *(node(16, 8, 120) for _ in range(4)), node(64, 0, 500)]
    filled = with_hosts(config(actors=32, teachers=8), nodes)
    assert sharing(filled) == [
        ("run", (1,), 8, 0, 32),
        ("teachers", (8,), 16, 8, 120),
        ("actors", (11, 11, 10), 16, 8, 120),
    ]


@pytest.mark.parametrize(
    "named",
    [
        {"cluster": {"actors": {"each": 3}}},
        {"cluster": {"teachers": {"each": 1}}},
        {"learner": {"ranks": 2, "hosts": 2}},
    ],
)
def test_hosts_that_are_named_stay_as_they_are(named: dict[str, Any]) -> None:
    asked = config(actors=8, teachers=2, **named)
    assert with_hosts(asked, [node(2, here=True), node(4)]) == asked


def test_resources_that_are_named_stay_as_they_are() -> None:
    cluster = {"learner": {"cpus": 3, "memory_gib": 4}, "actors": {"cpus": 2, "memory_gib": 5, "most": 20}}
    filled = with_hosts(config(actors=8, teachers=2, cluster=cluster), [node(8, 0, 32, here=True)])
    assert sharing(filled) == [("run", (1,), 3, 0, 4), ("actors", (4, 4), 2, 0, 5)]
    assert filled.cluster.actors.most == 20


def test_servers_that_run_and_pools_get_no_hosts() -> None:
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    nodes = [node(8, here=True), node(8), node(8)]
    attached = with_hosts(config(actors=2, teachers=2, actor={"urls": urls}, teacher={"urls": urls}), nodes)
    pools = with_hosts(config(actors=2, teachers=2, pools={"math": {"count": 2}}), nodes)
    assert [group.name for group in host_groups(attached)] == ["run"]
    assert [group.name for group in host_groups(pools)] == ["run", "actors"]
    assert attached.cluster.actors == ClusterConfig().actors
