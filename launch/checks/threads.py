"""Shares the cores of this machine among the processes of a run that compute on its CPU.

The learner, an embedded teacher and an embedded actor divide their products over native threads. Each process gets at
least one. While cores are left, the process that has most to do per thread gets one more, and with it all that are
alike, so that equal actors stay equal. Each token passes through learner, teacher and actor: this makes the slowest of
them as fast as the cores allow. More threads than cores are never planned where one each fits: threads that wait for a
core hold up all others of their product (docs/results/README.md has what that costs).

What a process has to do per trained token, in products of a token with a model: a forward for an actor and a teacher; a
forward, and a backward of twice the cost, for the learner. A core is left for each other process of the run that needs
one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from stillhouse.launch.checks.model_files import check_weights
from stillhouse.launch.config.pools import worker_groups
from stillhouse.launch.config.run import AUTO_THREADS, RunConfig
from stillhouse.launch.machine.gpus import LEARNER, RANK
from stillhouse.protocol.processors import usable_cores

LEARNER_PASSES: Final = 3.0
"""Forwards that a training step costs; measured with SmolLM2-135M: 2.8."""
SMALL_PARAMETERS: Final = 10_000_000
SMALL_THREADS: Final = 2
"""A model of fewer than SMALL_PARAMETERS gets at most this many threads, because threads wait for each other at the end
of each of its short products. Two make its steps 1.1 to 1.6 times as fast; more were not measured."""


class Alike(NamedTuple):
    """Processes that do the same work on this machine's CPU."""

    name: str
    who: tuple[str, ...]
    """Names of their seats (launch.machine.gpus)."""
    work: float
    """What each has to do per trained token, in any unit that all groups share."""
    most: int | None
    """More threads do not help; None: no such bound is known."""


class Threads(NamedTuple):
    """The plan."""

    each: Mapping[str, int] = MappingProxyType({})
    """Seat -> native threads of its process; a process that is not in here has one."""
    text: str = ""
    """Part of the line to print; empty: nothing was planned."""


def share_cores(cores: int, groups: Sequence[Alike]) -> dict[str, int]:
    """Threads of each process in each group, by the group's name. If the sum is above `cores`, all have one."""
    threads = {group.name: 1 for group in groups}
    left = cores - sum(len(group.who) for group in groups)
    growing = [group for group in groups if group.who]
    while growing:
        group = max(growing, key=lambda one: one.work / threads[one.name])
        if len(group.who) > left or (group.most is not None and threads[group.name] >= group.most):
            growing.remove(group)
            continue
        threads[group.name] += 1
        left -= len(group.who)
    return threads


def plan_threads(
    config: RunConfig, seats: Mapping[str, int | None], cores: float, *, learner_here: bool = True
) -> Threads:
    """`seats`: the GPU of each embedded role, None for the CPU. `cores`: those that the run may use here; 0: unknown,
    or others have them. `learner_here`: whether the learner, or ranks of it, are on this machine."""
    chosen = config.launch.threads_per_worker
    here = [who for who in seats if learner_here or not _is_learner(who)]
    if chosen != AUTO_THREADS:
        n = chosen * len([who for who in here if seats[who] is None])
        slow = f": {n} on {cores:g} cores, where they wait for each other" if chosen > 1 and 0 < cores < n else ""
        return Threads(dict.fromkeys(here, chosen), f"{_threads(chosen)} per worker, as configured{slow}")
    groups = list(_groups(config, [who for who in here if seats[who] is None]))
    free = int(cores) - sum(seats[who] is not None for who in here) - _others(config)
    shared = share_cores(free, groups)
    each = {who: shared[group.name] for group in groups for who in group.who}
    return Threads(each, _described(groups, shared, cores))


def threads_alone(config: RunConfig) -> int:
    """Threads of a process that has the machine to itself, as replay and the measurement after a run have."""
    chosen = config.launch.threads_per_worker
    if chosen != AUTO_THREADS:
        return chosen
    variable = os.environ.get("OMP_NUM_THREADS", "")
    return int(variable) if variable.isdecimal() and int(variable) else max(1, int(usable_cores()))


def _is_learner(who: str) -> bool:
    return who == LEARNER or who.startswith(RANK)


def _groups(config: RunConfig, on_cpu: Sequence[str]) -> Iterator[Alike]:
    def alike(name: str, who: Sequence[str], model: str, share: float) -> Alike:
        size = check_weights("", Path(model)).parameters
        return Alike(name, tuple(who), share * max(size, 1), SMALL_THREADS if size < SMALL_PARAMETERS else None)

    ranks = [who for who in on_cpu if _is_learner(who)]
    if ranks:
        yield alike("learner", ranks, config.models.student, LEARNER_PASSES / config.learner.ranks)
    groups = worker_groups(config)
    for group in groups:
        who = [name for name in group.workers if name in on_cpu]
        if not who:
            continue
        of_all = group.n if group.role == "actor" else group.n * (len(groups) - 1)  # pools share the rollouts
        pool = f" of {group.key.removeprefix('pools.')}" if group.key.startswith("pools.") else ""
        yield alike(f"{group.role}s{pool}", who, group.model, 1.0 / of_all)


def _others(config: RunConfig) -> int:
    """Processes that take a core each and have one thread: servers on the CPU."""
    servers = [
        group.n
        for group in worker_groups(config)
        if group.engine.servers is not None and not group.settings.urls and group.settings.server.device == "cpu"
    ]
    return sum(servers)


def _described(groups: Sequence[Alike], shared: Mapping[str, int], cores: float) -> str:
    if not groups:
        return ""
    on = f" on {cores:g} cores" if cores else ""
    if max(shared.values()) == 1:
        return f"{_threads(1)} per worker{on}"
    parts = [f"{group.name} {shared[group.name]}{' each' if len(group.who) > 1 else ''}" for group in groups]
    return f"threads{on}: {', '.join(parts)}"


def _threads(n: int) -> str:
    return f"{n} thread" + ("s" if n != 1 else "")
