"""The engines of the run, started in this process as its workers would start them, and their servers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Final

import msgspec

from stillhouse.engines.base import ScoringEngine
from stillhouse.engines.provider import API_KEY_VARIABLE, SERVERS, Student, StudentSource
from stillhouse.launch.checks.finding import Finding, Impossible
from stillhouse.launch.config.pools import TeacherPool, WorkerGroup, engine_of, worker_groups
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.processes.slots import RestartBudget
from stillhouse.launch.servers.plan import ServerPlan, launched_groups
from stillhouse.launch.servers.watch import ServerWatch
from stillhouse.launch.workers.launch_plan import new_api_key
from stillhouse.launch.workers.start_role import StartRole
from stillhouse.protocol.context import RoleContext, WorkerRole
from stillhouse.tools.doctor.case import ModelCase

LOOK_EVERY_S: Final = 0.2
LOG_LINES: Final = 4
EMBEDDED_REPLICAS: Final = 2
"""Teachers of a pool that are compared when each loads the model in its own process: they run the same code."""


class ServerFailed(Exception):
    """A server died before it answered, or did not answer in time."""


def starting_s(config: RunConfig) -> float:
    """Longest time in which servers start."""
    return max((group.settings.server.start_timeout_s for group in launched_groups(config)), default=0.0)


def servers(case: ModelCase) -> Iterator[Finding]:
    """Start one server of each kind that the run would start: the first actor's, and each pool's first teacher's."""
    attached = [url for group in worker_groups(case.config) for url in group.settings.urls]
    if not case.checked.servers.plans:
        which = f"the run uses servers that run already: {', '.join(attached)}" if attached else "no engine is a server"
        raise Impossible(which)
    began_s = time.monotonic()
    normal = "each answers within its server.start_timeout_s; the other servers of the run are the same"
    try:
        watch = _started(case)
    except ServerFailed as error:
        advice = "correct its server.args, or what its log says; docs/sglang.md lists what a server needs"
        yield Finding(check="servers", status="failed", measured=str(error), normal=normal, advice=advice)
        return
    took_s = time.monotonic() - began_s
    yield Finding(
        check="servers",
        status="ok",
        measured=f"{', '.join(watch.slots)} answered after {took_s:.1f} s",
        normal=normal,
        figures={"start_s": took_s},
    )


def _started(case: ModelCase) -> ServerWatch:
    def start() -> ServerWatch:
        plans = list(_first_plans(case))
        launch = case.config.launch
        budget = RestartBudget(msgspec.structs.replace(launch, max_restarts=0))
        key = new_api_key()
        watch = ServerWatch(plans, case.config, case.scratch, budget, key)
        case.at_end(watch.close)
        os.environ[API_KEY_VARIABLE] = key
        watch.start()
        while not all(watch.is_up(plan.worker) for plan in plans):
            for news in watch.pump(restart=True):
                if news.kind != "up":
                    log = (case.scratch / f"{watch.log_name(news.worker)}.log").read_text(
                        encoding="utf-8", errors="replace"
                    )
                    why = news.text.rpartition("; it ")[2]
                    raise ServerFailed(f"the server of {news.worker} {why}; its log ends with: {_tail(log)}")
            time.sleep(LOOK_EVERY_S)
        return watch

    return case.once("starting servers", start)


def _first_plans(case: ModelCase) -> Iterator[ServerPlan]:
    by_worker = {plan.worker: plan for plan in case.checked.servers.plans}
    for group in launched_groups(case.config):
        if group.workers and group.workers[0] in by_worker:
            yield by_worker[group.workers[0]]


def _tail(text: str) -> str:
    """The last lines, without those that a traceback indents."""
    return " | ".join([line for line in text.splitlines() if line.strip() and not line[0].isspace()][-LOG_LINES:])


def context(case: ModelCase, role: WorkerRole, index: int, server_url: str) -> RoleContext[RunConfig]:
    """What the launcher would give to the worker."""
    (case.scratch / SERVERS).mkdir(exist_ok=True)
    start = StartRole(
        entry="",
        role=role,
        index=index,
        name=f"{role}-{index}",
        incarnation="doctor",
        run_id="doctor",
        buffer_address="",
        resume=False,
        server_url=server_url,
        device=case.checked.servers.placement.device(role, index),
        threads=case.checked.servers.placement.threads_of(role, index),
    )
    return start.context(case.checked.config, case.scratch)


def _url(case: ModelCase, group: WorkerGroup, offset: int) -> str:
    """URL of the server of the group's worker number `offset`; empty for an embedded engine."""
    if group.engine.servers is None:
        return ""
    if group.settings.urls:
        return group.settings.urls[offset]
    watch = _started(case)
    worker = group.workers[offset] if group.workers else ""
    if worker not in watch:
        raise Impossible(f"no server of {group.key} is started for this run")
    return watch.url(worker)


def _group(case: ModelCase, key: str) -> WorkerGroup:
    return next(group for group in worker_groups(case.checked.config) if group.key == key)


@contextmanager
def student(case: ModelCase, wake: Callable[[], None] = lambda: None) -> Generator[tuple[StudentSource, Student]]:
    """The engine of the first actor."""
    group = _group(case, "actor")
    ctx = context(case, "actor", 0, _url(case, group, 0))
    source = engine_of(case.checked.config, "actor").student(ctx)
    started = source.start(wake)
    with closing(started.engine):
        yield source, started


@contextmanager
def scorer(case: ModelCase, pool: TeacherPool, offset: int) -> Generator[ScoringEngine]:
    """The engine of the pool's teacher number `offset`."""
    group = _group(case, pool.key)
    ctx = context(case, "teacher", pool.first + offset, _url(case, group, offset))
    with closing(group.engine.scorer(ctx).start()) as engine:
        yield engine


def replicas(case: ModelCase, pool: TeacherPool) -> int:
    """How many teachers of the pool can be compared here."""
    group = _group(case, pool.key)
    if group.settings.urls:
        return len(group.settings.urls)
    return 1 if group.engine.servers is not None else max(1, min(group.n, EMBEDDED_REPLICAS))


def exact(case: ModelCase, group_key: str) -> bool:
    """Whether the engine computes in float32 on a CPU, so that it agrees with another program to 1e-4."""
    group = _group(case, group_key)
    if group.engine.servers is not None:
        return group.settings.server.device == "cpu" and "--dtype" not in " ".join(group.settings.server.args)
    where = group.engine.device(group.role, group.settings)
    if case.checked.servers.placement.places.seats.get(group.workers[0] if group.workers else "") is not None:
        return False
    dtype = case.config.actor.torch.dtype if group.role == "actor" else group.config.teacher.dtype
    return (where is None or not where.device.startswith("cuda")) and dtype in ("auto", "float32")
