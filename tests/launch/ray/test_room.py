"""Whether hosts fit on nodes: compared with trying every way to place them."""

from __future__ import annotations

import itertools
import random

import pytest

from stillhouse.launch.config.cluster import HostConfig
from stillhouse.launch.ray.room import GIB, Node, said_of_layout, spread_over, too_small
from stillhouse.launch.topology import HostGroup


def host(cpus: int, gpus: int = 0, memory_gib: int = 1) -> HostConfig:
    return HostConfig(cpus=cpus, gpus=gpus, memory_gib=memory_gib)


def node(cpus: int, gpus: int = 0, memory_gib: int = 64, *, here: bool = False) -> Node:
    return Node("10.0.0.1" if here else "10.0.0.2", cpus, gpus, memory_gib * GIB, here)


def placed_by_trying(groups: list[HostGroup], nodes: list[Node]) -> int:
    """Most hosts that fit beside the run: each host goes to any node, or to none."""
    hosts = [group.host for group in groups[1:] for _ in group.workers]
    best = 0
    for places in itertools.product(range(-1, len(nodes)), repeat=len(hosts)):
        used = [[0, 0, 0] for _ in nodes]
        for index, one in enumerate(nodes):
            if one.here:
                used[index] = [groups[0].host.cpus, groups[0].host.gpus, groups[0].host.memory_gib]
        for place, one in zip(places, hosts, strict=True):
            if place >= 0:
                used[place] = [a + b for a, b in zip(used[place], (one.cpus, one.gpus, one.memory_gib), strict=True)]
        fits = all(
            cpus <= one.cpus and gpus <= one.gpus and memory <= one.memory_bytes / GIB
            for (cpus, gpus, memory), one in zip(used, nodes, strict=True)
        )
        if fits:
            best = max(best, sum(place >= 0 for place in places))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_as_many_hosts_are_placed_as_by_trying_every_way(seed: int) -> None:
    rng = random.Random(seed)
    nodes = [node(8, 4, 32, here=True)]
    nodes += [node(rng.randint(1, 8), rng.randint(0, 4), rng.randint(1, 16)) for _ in range(rng.randint(0, 2))]
    groups = [HostGroup("run", (1,), host(2, 1, 4))]
    for name in ("ranks", "teachers", "actors"):
        one = host(rng.randint(1, 5), rng.randint(0, 3), rng.randint(1, 9))
        groups.append(HostGroup(name, (1,) * rng.randint(1, 2), one))
    layout = spread_over(groups, nodes)
    placed = sum(n for hosts in layout.hosts for name, n in hosts.items() if name != "run")
    wanted = sum(len(group.workers) for group in groups[1:])
    assert placed == placed_by_trying(groups, nodes)
    assert sum(layout.missing.values()) == wanted - placed
    for one, hosts in zip(nodes, layout.hosts, strict=True):
        by_name = {group.name: group.host for group in groups}
        assert sum(by_name[name].gpus * n for name, n in hosts.items()) <= one.gpus
        assert sum(by_name[name].cpus * n for name, n in hosts.items()) <= one.cpus


def test_many_nodes_and_hosts_are_no_problem() -> None:
    groups = [HostGroup("run", (8,), host(64, 8, 512)), HostGroup("ranks", (8,) * 3, host(64, 8, 512))]
    groups += [HostGroup("teachers", (8,) * 8, host(32, 4, 256)), HostGroup("actors", (8,) * 64, host(32, 4, 256))]
    nodes = [node(64, 8, 512, here=True), *(node(64, 8, 512) for _ in range(39))]
    assert not spread_over(groups, nodes).missing
    assert spread_over(groups, nodes[:-1]).missing == {"ranks": 1}, "rather one large host than two small ones"


def test_the_run_itself_needs_this_node() -> None:
    groups = [HostGroup("run", (1,), host(4)), HostGroup("actors", (2,), host(1))]
    layout = spread_over(groups, [node(2, here=True), node(64)])
    assert layout.missing == {"run": 1}
    assert "the run itself on this node (4 CPUs, 0 GPUs and 1 GiB, section cluster.learner)" in too_small(
        groups, [node(2, here=True), node(64)], layout
    )


def test_what_is_missing_and_what_there_is_are_said() -> None:
    groups = [HostGroup("run", (1,), host(4)), HostGroup("actors", (8,) * 4, host(8, 8, 32))]
    nodes = [node(8, here=True), node(16, 8), node(16, 8)]
    layout = spread_over(groups, nodes)
    assert layout.missing == {"actors": 2}
    assert too_small(groups, nodes, layout) == (
        "it has no room for 2 of 4 hosts of actors (8 CPUs, 8 GPUs and 32 GiB each). It has 1 node with 8 CPUs, 0 GPUs "
        "and 64 GiB, 2 nodes with 16 CPUs, 8 GPUs and 64 GiB each"
    )


def test_a_layout_is_said_by_node() -> None:
    groups = [HostGroup("run", (1,), host(4)), HostGroup("actors", (8,) * 3, host(2))]
    nodes = [node(6, here=True), node(4)]
    assert list(said_of_layout(nodes, spread_over(groups, nodes)))[1:] == [
        "  10.0.0.1 (this node): the run itself, 1 of actors",
        "  10.0.0.2: 2 of actors",
    ]


def test_hosts_of_two_pools_are_counted_apart() -> None:
    groups = [HostGroup("run", (1,), host(1)), HostGroup("teachers", (1, 1), host(2), "math")]
    groups.append(HostGroup("teachers", (1,), host(2), "style"))
    nodes = [node(7, here=True)]
    assert spread_over(groups, nodes).hosts == ({"run": 1, "teachers-math": 2, "teachers-style": 1},)
    layout = spread_over(groups, [node(5, here=True)])
    (short,) = layout.missing
    assert short in ("teachers-math", "teachers-style") and f"of {short} (2 CPUs" in too_small(groups, nodes, layout)
