"""Checks of this machine: open files, cores, shared memory."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stillhouse.engines.provider import ServerEngine
from stillhouse.launch.checks.finding import Case, Finding, Impossible
from stillhouse.launch.config.pools import worker_groups
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.report.figures import plural
from stillhouse.protocol.processors import usable_cores

FILES_OF_ITSELF: Final = 64
"""Descriptors of a process without workers or rollouts: libraries, logs, sockets that listen. Measured: 20 to 50."""
FILES_PER_WORKER: Final = 3
"""The learner has a control channel and a broadcast per actor, the buffer a connection per worker. Measured: 1 to 2."""
CORES_SHARED: Final = 2.0
"""Processes that compute, per core, above which it is worth a warning."""
SHARED_MEMORY: Final = Path("/dev/shm")
SHARED_BYTES: Final = 1 << 30


def open_files(case: Case) -> Iterator[Finding]:
    """The limit of open files against what the learner and the buffer need. Actors raise their own."""
    needed = FILES_OF_ITSELF + FILES_PER_WORKER * (case.config.actors + case.config.teachers)
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = "" if hard == resource.RLIM_INFINITY or hard > limit else ", and the hard limit with it"
    yield Finding(
        check="open files",
        status="failed" if limit < needed else "warning" if limit < 2 * needed else "ok",
        measured=f"at most {limit:,} per process",
        normal=f"at least {2 * needed:,}: the learner needs up to {needed:,}",
        advice=f"ulimit -n {max(4096, 2 * needed)} in the shell that starts the run{more}",
        figures={"limit_files": float(limit), "needed_files": float(needed)},
    )


def cores(case: Case) -> Iterator[Finding]:
    """Processes that compute on the CPU against its cores."""
    placement = case.checked.servers.placement
    computing = list(_computing(case.config, gpus=placement.places.seats))
    available, load = usable_cores(), os.getloadavg()[0]
    on_cpu = [who for who, gpu in placement.places.seats.items() if gpu is None]
    demand = len(computing) + sum(placement.threads.each.get(who, 1) - 1 for who in on_cpu)
    yield Finding(
        check="cores",
        status="warning" if demand > CORES_SHARED * available else "ok",
        measured=f"{len(computing)} processes compute on the CPU ({', '.join(_grouped(computing))}) "
        f"with {plural(demand, 'thread')} in all, on {available:g} cores, with a load of {load:.1f} now",
        normal=f"at most {CORES_SHARED:g} threads per core; more are slower together, and late heartbeats look like "
        "losses",
        advice="fewer --actors or --teachers, or launch.threads_per_worker = auto",
        figures={"threads": float(demand), "cores": available, "load": load},
    )


def _computing(config: RunConfig, gpus: dict[str, int | None]) -> Iterator[str]:
    """Workers, and servers in their place, that compute on the CPU. `gpus`: seats of the placement."""
    if gpus.get("learner") is None:
        yield from ["learner"] * config.learner.ranks_each
    for group in worker_groups(config):
        for worker in group.workers:
            if group.engine.servers is not None:
                if not group.settings.urls and group.settings.server.device != "cuda":
                    yield f"server of {group.role}"
            elif gpus.get(worker) is None:
                yield group.role


def _grouped(names: list[str]) -> list[str]:
    return [plural(names.count(name), name) for name in dict.fromkeys(names)]


def shared_memory(case: Case, folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Room in /dev/shm, which NCCL and servers of several GPUs use."""
    users = _shared_memory_users(case)
    if not users:
        raise Impossible("nothing in this run uses shared memory (NCCL and servers of several GPUs would)")
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        free, why = 0, f" ({error})"
    else:
        why = ""
    yield Finding(
        check="shared memory",
        status="ok" if free >= SHARED_BYTES else "failed",
        measured=f"{free / 2**30:.2f} GiB free in {folder}{why}",
        normal=f"at least {SHARED_BYTES / 2**30:g} GiB, for {', '.join(users)}",
        advice="start the container with --shm-size 8g, or remount /dev/shm with a larger size",
        figures={"free_bytes": float(free)},
    )


def _shared_memory_users(case: Case) -> list[str]:
    config, checked = case.config, case.checked
    users = ["weights by NCCL"] if checked.servers.placement.weights.backend == "nccl" else []
    if config.learner.ranks > 1:
        users.append("ranks of the learner")
    servers = [group for group in worker_groups(config) if isinstance(group.engine.servers, ServerEngine)]
    return users + [f"servers of {group.key} with tp > 1" for group in servers if group.settings.server.tp > 1]
