"""Which shard of the buffer each worker talks to: those of all hosts together are dealt out evenly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.processes.slots import RestartBudget, Worker
from stillhouse.launch.servers.watch import ServerWatch
from stillhouse.launch.topology import HostGroup, host_groups
from stillhouse.launch.workers.crew import Crew
from stillhouse.launch.workers.launch_plan import LaunchPlan
from stillhouse.launch.workers.start_role import StartRole
from stillhouse.protocol.context import WorkerRole

ADDRESS = "tcp://10.0.0.1:5000"
N = 4
"""Shards."""


def shards_of(config: RunConfig, workers: list[Worker]) -> list[int]:
    """By worker, from the port that it is told."""
    started: list[StartRole] = []

    def begin(start: StartRole, *, preloaded: bool) -> None:
        started.append(start)

    plan = LaunchPlan(config=config, began_s=0.0)
    servers = ServerWatch((), config, Path(), RestartBudget(config.launch), "")
    crew = Crew(plan, "r", cast(Any, SimpleNamespace(start=begin)), servers, workers)
    crew.address = ADDRESS
    for worker in workers:
        crew.start(worker)
    return [int(start.buffer_address.rpartition(":")[2]) - 5000 for start in started]


def on_hosts(keys: dict[str, Any], group: HostGroup, named: str) -> Counter[int]:
    """Workers of each shard, when each host of the group has joined by its own launcher."""
    role: WorkerRole = "actor" if group.name == "actors" else "teacher"
    dealt = Counter[int]()
    for host, n in enumerate(group.workers):
        here = build(RunConfig, {**keys, group.name: n})
        dealt.update(shards_of(here, [Worker(role, index, f"{named}{host}") for index in range(n)]))
    return dealt


@pytest.mark.parametrize("named", ["actors-", "node", "teachers-", "job-17-"])
@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("count", [4, 13])
def test_hosts_with_numbers_together_serve_all_shards_evenly(named: str, each: int, count: int) -> None:
    name = "teachers" if named == "teachers-" else "actors"
    plain = {"weights": {"allow_plain_network": True}, "buffer": {"shards": N}}
    keys = {**plain, "actors": 0, "teachers": 0, "cluster": {name: {"each": each}}}
    (group,) = [group for group in host_groups(build(RunConfig, {**keys, name: count})) if group.name == name]
    dealt = on_hosts(keys, group, named)
    assert sum(dealt.values()) == count
    assert len(dealt) == N and max(dealt.values()) - min(dealt.values()) <= 1, dict(dealt)


def test_one_host_without_a_number_deals_its_own_out_evenly() -> None:
    config = build(RunConfig, {"actors": 8, "buffer": {"shards": N}})
    for prefix in ("", "here", "node-1a2b"):
        dealt = Counter(shards_of(config, [Worker("actor", index, prefix) for index in range(8)]))
        assert dealt == dict.fromkeys(range(N), 2)
