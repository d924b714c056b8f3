"""Whether the hosts of a run have room on the nodes of a Ray cluster, were they empty. Numbers only, without Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from stillhouse.launch.config.cluster import HostConfig
from stillhouse.launch.report.figures import plural
from stillhouse.launch.topology import HostGroup, resources, said_of

GIB: Final = 2**30
ADVICE: Final = (
    "add nodes, or ask for less: fewer workers, or cluster.learner, cluster.actors and cluster.teachers with fewer "
    "cpus, gpus and memory_gib"
)
Counts: TypeAlias = tuple[int, ...]
"""Hosts by group, without the run's own."""


class Node(NamedTuple):
    """A node of the cluster, with all that it has."""

    address: str
    cpus: float
    gpus: float
    memory_bytes: float
    here: bool
    """The command is typed on it; the run itself stays there."""

    def most(self, host: HostConfig) -> int:
        """How many such hosts it holds."""
        has = (self.cpus, self.gpus, self.memory_bytes)
        asked = (host.cpus, host.gpus, host.memory_gib * GIB)
        return max(0, min(int(n // each) for n, each in zip(has, asked, strict=True) if each))

    def without(self, host: HostConfig, n: int = 1) -> Node:
        return self._replace(
            cpus=self.cpus - n * host.cpus,
            gpus=self.gpus - n * host.gpus,
            memory_bytes=self.memory_bytes - n * host.memory_gib * GIB,
        )


class Layout(NamedTuple):
    """One way to put as many hosts as possible on the nodes. Ray may choose another one."""

    hosts: tuple[Mapping[str, int], ...]
    """Number of hosts by the label of their group, for each node."""
    missing: Mapping[str, int]
    """Hosts without room, by the label of their group; empty: all have some."""


def spread_over(groups: Sequence[HostGroup], nodes: Sequence[Node]) -> Layout:
    """The most hosts that the nodes hold together. The first group is the run itself, which needs the node `here`."""
    run, others = groups[0], groups[1:]
    missing: dict[str, int] = {}
    left: list[Node] = []
    for node in nodes:
        if node.here and not node.most(run.host):
            missing["run"] = 1
        left.append(node.without(run.host) if node.here and not missing else node)
    chosen = _fill([group.host for group in others], tuple(len(group.workers) for group in others), left)
    hosts: list[Mapping[str, int]] = []
    for node, counts in zip(nodes, chosen, strict=True):
        own: dict[str, int] = {"run": 1} if node.here and not missing.get("run") else {}
        beside: dict[str, int] = {group.label: n for group, n in zip(others, counts, strict=True) if n}
        hosts.append(own | beside)
    for index, group in enumerate(others):
        if lacking := len(group.workers) - sum(counts[index] for counts in chosen):
            missing[group.label] = lacking
    return Layout(tuple(hosts), missing)


def _fill(kinds: Sequence[HostConfig], wanted: Counts, nodes: Sequence[Node]) -> list[Counts]:
    """Hosts by kind for each node, as many as possible in all. Exact: it goes through the nodes and keeps every number
    of hosts that can be left to place, with how it came about."""
    came: list[dict[Counts, tuple[Counts, Counts]]] = []
    states = {wanted}
    for node in nodes:
        after: dict[Counts, tuple[Counts, Counts]] = {}
        for left in states:
            for here in _options(kinds, left, node):
                after.setdefault(tuple(a - b for a, b in zip(left, here, strict=True)), (left, here))
        came.append(after)
        states = set(after)
    left = min(states, key=lambda counts: (sum(counts), counts))
    chosen: list[Counts] = []
    for after in reversed(came):
        left, here = after[left]
        chosen.append(here)
    return chosen[::-1]


def _options(kinds: Sequence[HostConfig], left: Counts, node: Node) -> Iterator[Counts]:
    """Numbers of hosts that fit on the node together; of the last kind as many as possible, as more never hurts."""
    if not kinds:
        yield ()
        return
    n = min(left[0], node.most(kinds[0]))
    for fewer in range(n, n - 1 if len(kinds) == 1 else -1, -1):
        for others in _options(kinds[1:], left[1:], node.without(kinds[0], fewer)):
            yield (fewer, *others)


def too_small(groups: Sequence[HostGroup], nodes: Sequence[Node], layout: Layout) -> str:
    """What has no room, and what there is."""
    return f"it has no room for {said_of_missing(groups, layout.missing)}. It has {said_of_nodes(nodes)}"


def said_of_missing(groups: Sequence[HostGroup], missing: Mapping[str, int]) -> str:
    """`2 of 4 hosts of actors (8 CPUs, 8 GPUs and 512 GiB each) and ...`."""
    parts: list[str] = []
    for group in groups:
        if n := missing.get(group.label):
            if group.name == "run":
                parts.append(f"the run itself on this node ({said_of(group.host)}, section cluster.learner)")
                continue
            whose = "further ranks of the learner" if group.name == "ranks" else group.label
            parts.append(f"{n} of {plural(len(group.workers), 'host')} of {whose} ({said_of(group.host)} each)")
    return " and ".join(parts)


def said_of_nodes(nodes: Sequence[Node]) -> str:
    """Equal ones together: `2 nodes with 64 CPUs, 8 GPUs and 480 GiB, ...`."""
    counts = Counter((int(node.cpus), int(node.gpus), int(node.memory_bytes // GIB)) for node in nodes)
    return ", ".join(
        f"{plural(n, 'node')} with {resources(cpus, gpus, gib)}{' each' if n > 1 else ''}"
        for (cpus, gpus, gib), n in counts.items()
    )


def said_of_layout(nodes: Sequence[Node], layout: Layout) -> Iterator[str]:
    """Lines for --check."""
    used = [(node, hosts) for node, hosts in zip(nodes, layout.hosts, strict=True) if hosts]
    total = sum(sum(hosts.values()) for _, hosts in used)
    yield f"Ray: {said_of_nodes(nodes)}; {plural(total, 'host')} of this run fit, for example so (Ray may choose else):"
    for node, hosts in used:
        what = ", ".join("the run itself" if name == "run" else f"{n} of {name}" for name, n in hosts.items())
        yield f"  {node.address}{' (this node)' if node.here else ''}: {what}"
