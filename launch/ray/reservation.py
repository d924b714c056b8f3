"""Reserves what the hosts of a run need, as placement groups of Ray, before anything starts.

The learner's hosts are one group, packed: the first bundle is on this node, where the run itself stays. Every other
host is a group of one bundle, so that all its workers, with their servers, are on one node, and so that it can be given
back alone when it leaves. A group that waits for room is also what makes an autoscaling Ray cluster add nodes. When a
node dies, Ray moves its bundles to another one.
"""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from stillhouse.launch.config.cluster import HostConfig
from stillhouse.launch.errors import LaunchError
from stillhouse.launch.ray.room import ADVICE, GIB, Node, said_of_missing, said_of_nodes, spread_over
from stillhouse.launch.topology import HostGroup

LOOK_S: Final = 0.2
SAY_AFTER_S: Final = 2.0
"""A wait that is longer is said."""
CREATED: Final = "CREATED"


class Room(NamedTuple):
    """The place of one host."""

    group: Any
    """Placement group of Ray."""
    bundle: int
    alone: bool
    """It is the only one in its group."""


class Reservation:
    """The rooms of all hosts, by name: `run`, `actors-0`, ..."""

    def __init__(self, node_id: str) -> None:
        """`node_id`: Ray's name of this node."""
        self._ray: Any = importlib.import_module("ray.util.placement_group")
        self._strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        self._node_id = node_id
        self._rooms: dict[str, Room] = {}

    def ask(self, groups: Sequence[HostGroup]) -> None:
        """Ask for all hosts; returns at once."""
        learner = [group for group in groups if group.name in ("run", "ranks")]
        names = [name for group in learner for name in host_names(group)]
        bundles = [bundle(group.host) for group in learner for _ in group.workers]
        pinned = [{"ray.io/node-id": self._node_id}, *({} for _ in bundles[1:])]
        packed = self._ray.placement_group(bundles, strategy="PACK", bundle_label_selector=pinned)
        self._rooms |= {name: Room(packed, index, alone=False) for index, name in enumerate(names)}
        for group in groups:
            if group not in learner:
                for name in host_names(group):
                    self._ask_one(name, group.host)

    def _ask_one(self, name: str, host: HostConfig) -> Room:
        group = self._ray.placement_group([bundle(host)], strategy="STRICT_PACK")
        self._rooms[name] = Room(group, 0, alone=True)
        return self._rooms[name]

    def wait(self, groups: Sequence[HostGroup], limit_s: float, look: Look, say: Callable[[str], None]) -> None:
        """Wait until all have room. Says what is waited for, once and when it changes. Raises LaunchError at the limit;
        nothing is held then."""
        began_s, said = time.monotonic(), Counter[str]()
        while missing := self._missing(groups):
            waited_s = time.monotonic() - began_s
            if waited_s > limit_s:
                self.release_all()
                raise LaunchError(
                    f"launch.backend: the Ray cluster had no room for {said_of_missing(groups, missing)} within "
                    f"{limit_s:.0f} s (launch.ready_timeout_s). It has {said_of_nodes(look.nodes())}; free are "
                    f"{look.free()}. Wait for other programs, {ADVICE}"
                )
            if waited_s > SAY_AFTER_S and missing != said:
                said = missing
                nodes = look.nodes()
                small = " That is too few even when nothing else runs." if spread_over(groups, nodes).missing else ""
                say(
                    f"Ray: waiting for {said_of_missing(groups, missing)}; the cluster has {said_of_nodes(nodes)}; "
                    f"free are {look.free()}.{small} At most {limit_s:.0f} s (launch.ready_timeout_s)"
                )
            time.sleep(LOOK_S)

    def _missing(self, groups: Sequence[HostGroup]) -> Counter[str]:
        missing = Counter[str]()
        states: dict[Any, str] = {}
        for group in groups:
            for name in host_names(group):
                place = self._rooms[name].group
                if place.id not in states:
                    states[place.id] = self._ray.placement_group_table(place)["state"]
                missing[group.label] += states[place.id] != CREATED
        return +missing

    def strategy(self, name: str, host: HostConfig) -> Any:
        """Where to start the actor of a host. A host that came later is asked for now."""
        room = self._rooms.get(name) or self._ask_one(name, host)
        return self._strategies.PlacementGroupSchedulingStrategy(
            placement_group=room.group, placement_group_bundle_index=room.bundle
        )

    def release(self, name: str) -> None:
        """Give a host's resources back."""
        room = self._rooms.get(name)
        if room is not None and room.alone:
            self._ray.remove_placement_group(self._rooms.pop(name).group)

    def release_all(self) -> None:
        for group in {room.group.id: room.group for room in self._rooms.values()}.values():
            self._ray.remove_placement_group(group)
        self._rooms.clear()


class Look(NamedTuple):
    """What the cluster is like now, for messages."""

    nodes: Callable[[], list[Node]]
    free: Callable[[], str]


def host_names(group: HostGroup) -> list[str]:
    """One per host. The run itself has one host."""
    return ["run"] if group.name == "run" else [f"{group.label}-{index}" for index in range(len(group.workers))]


def bundle(host: HostConfig) -> dict[str, float]:
    """The resources of a host, as Ray counts them."""
    resources = {"CPU": float(host.cpus), "GPU": float(host.gpus), "memory": float(host.memory_gib * GIB)}
    return {name: n for name, n in resources.items() if n}
