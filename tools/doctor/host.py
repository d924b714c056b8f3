"""Checks of this machine: open files, cores, shared memory, clocks."""

from __future__ import annotations

import email.utils
import os
import resource
import shutil
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stillhouse.engines.provider import ServerEngine
from stillhouse.launch.config.pools import WorkerGroup, worker_groups
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.report.figures import plural
from stillhouse.protocol.processors import usable_cores
from stillhouse.tools.doctor.case import Case, Impossible
from stillhouse.tools.doctor.finding import Finding

FILES_OF_ITSELF: Final = 64
"""Descriptors of a process without workers or rollouts: libraries, logs, sockets that listen. Measured: 20 to 50."""
FILES_PER_WORKER: Final = 3
"""The learner has a control channel and a broadcast per actor, the buffer a connection per worker. Measured: 1 to 2."""
FILES_PER_EPISODE: Final = 3
"""An actor runs each episode in a thread with an event loop of its own: a selector and a pair of sockets."""
CORES_SHARED: Final = 2.0
"""Processes that compute, per core, above which it is worth a warning."""
SHARED_MEMORY: Final = Path("/dev/shm")
SHARED_BYTES: Final = 1 << 30
CLOCK_READ_S: Final = 0.5
CLOCK_STEP_S: Final = 0.05
FILE_CLOCK_S: Final = 2.0
HOST_CLOCK_S: Final = 3.0
"""A `Date` header has whole seconds."""
DATE_TIMEOUT_S: Final = 5.0


def open_files(case: Case) -> Iterator[Finding]:
    """The limit of open files against what the process with the most of them needs."""
    needs = files_needed(case.config)
    who = max(needs, key=lambda name: needs[name])
    needed = needs[who]
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = "" if hard == resource.RLIM_INFINITY or hard > limit else ", and the hard limit with it"
    status = "failed" if limit < needed else "warning" if limit < 2 * needed else "ok"
    yield Finding(
        check="open files",
        status=status,
        measured=f"at most {limit:,} per process",
        normal=f"at least {2 * needed:,}: {who} needs up to {needed:,}",
        advice=f"ulimit -n {max(4096, 2 * needed)} in the shell that starts the run{more}",
        figures={"limit_files": float(limit), "needed_files": float(needed)},
    )


def files_needed(config: RunConfig) -> dict[str, int]:
    """Process -> descriptors, rounded up."""
    workers, rollouts = config.actors + config.teachers, config.actor.max_concurrent_rollouts
    return {
        "each actor": FILES_OF_ITSELF + FILES_PER_EPISODE * 2 * rollouts,  # 2: ended episodes may still be closing
        "the learner": FILES_OF_ITSELF + FILES_PER_WORKER * workers,
    }


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


def clocks(case: Case) -> Iterator[Finding]:
    """Wall clock against the monotonic one, the run folder's file system, and other hosts."""
    yield _steady(case)
    yield _of_files(case)
    for group in worker_groups(case.config):
        if group.settings.urls:
            yield from _of_hosts(group)


def _steady(case: Case) -> Finding:
    """The wall clock may be adjusted; it must not jump."""
    began_wall_s, began_s = time.time(), time.monotonic()
    time.sleep(CLOCK_READ_S)
    apart_s = (time.time() - began_wall_s) - (time.monotonic() - began_s)
    return Finding(
        check="clocks",
        subject="wall",
        status="ok" if abs(apart_s) < CLOCK_STEP_S else "warning",
        measured=f"the wall clock moved {apart_s * 1000:+.1f} ms against the monotonic one in {CLOCK_READ_S:g} s",
        normal=f"less than {CLOCK_STEP_S * 1000:.0f} ms",
        advice="let one time service alone set the clock (chrony or ntpd); deadlines use the monotonic clock, but logs "
        "and TensorBoard have wall times",
        figures={"apart_s": apart_s},
    )


def _of_files(case: Case) -> Finding:
    """A network file system stamps files by the clock of its server."""
    folder = existing(case.run_path)
    probe = folder / f".doctor-clock-{os.getpid()}"
    try:
        before_s = time.time()
        probe.touch(exist_ok=False)
        apart_s = probe.stat().st_mtime - before_s
    except OSError as error:
        raise Impossible(f"{folder} cannot be written: {error}") from error
    finally:
        probe.unlink(missing_ok=True)
    return Finding(
        check="clocks",
        subject="files",
        status="ok" if abs(apart_s) < FILE_CLOCK_S else "warning",
        measured=f"new files in {folder} are {apart_s:+.2f} s from this machine's clock",
        normal=f"less than {FILE_CLOCK_S:g} s",
        advice="set the clocks of this machine and of the file server by one time service",
        figures={"apart_s": apart_s},
    )


def _of_hosts(group: WorkerGroup) -> Iterator[Finding]:
    """Hosts of running servers, by the `Date` of an answer. The middle of the exchange is this machine's time."""
    for url in group.settings.urls:
        offset_s = _offset_s(url)
        if offset_s is None:
            yield Finding(
                check="clocks", subject=url, status="skipped", measured="the server sends no date, or does not answer"
            )
            continue
        yield Finding(
            check="clocks",
            subject=url,
            status="ok" if abs(offset_s) < HOST_CLOCK_S else "warning",
            measured=f"its host's clock is {offset_s:+.1f} s from this machine's (a second more or less)",
            normal=f"less than {HOST_CLOCK_S:g} s",
            advice="set the clocks of both hosts by one time service, or their logs cannot be compared",
            figures={"offset_s": offset_s},
        )


def _offset_s(url: str) -> float | None:
    began_s = time.time()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would tell its own time
    try:
        with opener.open(f"{url}/model_info", timeout=DATE_TIMEOUT_S) as answer:
            date = answer.headers["Date"]
    except urllib.error.HTTPError as error:  # it wants a key, and still says what time it is
        date = error.headers["Date"]
    except OSError:
        return None
    if date is None:
        return None
    there_s = email.utils.parsedate_to_datetime(date).timestamp() + 0.5  # it was cut to whole seconds
    return there_s - statistics.fmean((began_s, time.time()))


def existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
