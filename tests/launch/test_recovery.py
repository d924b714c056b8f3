"""Supervision when what it rests upon is killed, stopped or slow: the fork server, the buffer, the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from launcher_process import Launcher, StartLauncher, eventually

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.processes.activity import Activity, vitals_of
from stillhouse.launch.processes.backend import ProcessBackend, Vitals
from stillhouse.launch.processes.slots import RestartBudget, Worker
from stillhouse.launch.servers.watch import ServerWatch
from stillhouse.launch.workers.crew import Crew
from stillhouse.launch.workers.launch_plan import LaunchPlan
from stillhouse.launch.workers.roles import ENTRIES, RANKS_ENTRY, entries_of
from stillhouse.launch.workers.start_role import StartRole
from tests.patience import SLOWNESS

REAL_BUFFER = {"buffer-0": "real"}


def fork_server(launcher: Launcher) -> psutil.Process:
    parent = psutil.Process(launcher.pids("actor-0")[-1]).parent()
    assert parent is not None and parent.pid != launcher.process.pid
    return parent


def restarts(summary: dict[str, Any]) -> dict[str, int]:
    return {name: worker["restarts"] for name, worker in summary["workers"].items()}


@pytest.mark.parametrize("method", ["auto", "fork"])
def test_a_killed_fork_server_is_started_again_and_forks_its_workers_anew(
    start_launcher: StartLauncher, method: str
) -> None:
    launcher = start_launcher(settings={"launch": {"start_method": method}})
    launcher.until_ready()
    first = fork_server(launcher)
    first.kill()
    for name in ("learner-0", "teacher-0", "actor-0"):
        eventually(lambda name=name: len(launcher.pids(name)) == 2, f"{name} is forked anew")
    assert fork_server(launcher).pid != first.pid
    summary = launcher.summary_when_finished()
    assert restarts(summary) == {"buffer-0": 0, "learner-0": 1, "teacher-0": 1, "actor-0": 1}
    assert "the fork server died, and its workers with it; it is started again" in launcher.said
    assert launcher.leftovers() == []


def test_a_stopped_fork_server_is_told_to_go_on_and_nothing_is_lost(start_launcher: StartLauncher) -> None:
    launcher = start_launcher()
    launcher.until_ready()
    server = fork_server(launcher)
    server.suspend()
    os.kill(launcher.pids("actor-0")[0], signal.SIGKILL)  # only the fork server would tell
    eventually(lambda: len(launcher.pids("actor-0")) == 2, "its death was noticed")
    assert "the fork server was stopped (SIGSTOP); it is continued" in launcher.log("launcher")
    assert server.is_running()
    assert restarts(launcher.summary_when_finished())["learner-0"] == 0


def test_a_stopped_buffer_is_killed_and_goes_on_from_its_journal(start_launcher: StartLauncher) -> None:
    launcher = start_launcher(REAL_BUFFER)
    launcher.until_ready()
    os.kill(launcher.pids("buffer-0")[0], signal.SIGSTOP)
    eventually(lambda: len(launcher.pids("buffer-0")) == 2, "another buffer is there")
    assert "and is stopped (SIGSTOP); it is killed" in launcher.log("launcher")
    summary = launcher.summary_when_finished()
    assert restarts(summary) == {"buffer-0": 1, "learner-0": 0, "teacher-0": 0, "actor-0": 0}
    assert summary["ledger"]["source"] == "final"
    assert launcher.leftovers() == []


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_buffer_that_breaks_off_while_it_drains_still_leaves_its_ledger(
    start_launcher: StartLauncher, signum: signal.Signals
) -> None:
    launcher = start_launcher(
        {**REAL_BUFFER, "actor-0": "deaf"},
        settings={"launch": {"shutdown_grace_s": 3.0}, "buffer": {"peer_timeout_s": 3.0}},
    )
    launcher.until_ready()
    launcher.finish()
    eventually(lambda: "the run is over" in launcher.log("launcher"), "the end is announced")
    os.kill(launcher.pids("buffer-0")[0], signum)
    assert launcher.wait() == 0, launcher.said
    summary = launcher.summary()
    assert summary["ledger"]["source"] == "final" and summary["ok"], launcher.said
    assert "buffer-0 died before the ledger was written; it is started again to write it" in launcher.said
    assert launcher.leftovers() == []


def test_a_buffer_that_does_not_come_back_at_the_end_makes_nobody_wait(start_launcher: StartLauncher) -> None:
    """Without restarts it is not started again. A worker that was not told of the end is, by the launcher."""
    launcher = start_launcher(
        {**REAL_BUFFER, "actor-0": "misses_the_end"},
        settings={"launch": {"shutdown_grace_s": 100_000.0, "max_restarts": 0}},
    )
    launcher.until_ready()
    launcher.finish()
    eventually(lambda: "the run is over" in launcher.log("launcher"), "the end is announced")
    os.kill(launcher.pids("buffer-0")[0], signal.SIGKILL)
    assert launcher.wait() == 1, "without a ledger"
    assert "buffer-0 was killed by SIGKILL at the end and is not started again; actor-0" in launcher.said
    assert launcher.leftovers() == []


def test_a_damaged_journal_is_named_and_what_to_do(start_launcher: StartLauncher) -> None:
    launcher = start_launcher({"buffer-0": "damaged_journal"})
    assert launcher.wait() == 1
    reason = launcher.summary()["reason"]
    assert f"buffer-0 was killed by SIGABRT in LMDB: its journal {launcher.run_dir / 'journal'} is damaged" in reason
    assert "Use --resume: it starts from the newest checkpoint with a new journal" in reason
    assert launcher.summary()["workers"]["buffer-0"]["restarts"] == 0


def test_a_buffer_that_takes_long_to_start_is_waited_for_while_it_computes(start_launcher: StartLauncher) -> None:
    """The other side, a worker that does nothing, is in test_supervisor."""
    timeout_s = 4.0 * SLOWNESS
    launcher = start_launcher(
        {"buffer-0": f"computes {1.5 * timeout_s}"}, settings={"launch": {"ready_timeout_s": timeout_s}}
    )
    launcher.until_ready()
    assert launcher.summary_when_finished()["ready_s"] > timeout_s


def seen(pid: int) -> dict[str, Vitals]:
    vitals = vitals_of(pid)
    return {str(pid): vitals} if vitals is not None else {}


def is_stopped(pid: int) -> bool:
    return any(vitals.stopped for vitals in seen(pid).values())


def test_activity_tells_who_computes_from_who_sleeps_or_is_stopped() -> None:
    programs = {"busy": "while True: pass", "asleep": "import time; time.sleep(600)"}
    children = {
        name: subprocess.Popen(
            [sys.executable, "-c", f"print(flush=True)\n{program}"], stdout=subprocess.PIPE, close_fds=True
        )
        for name, program in programs.items()
    }
    try:
        for child in children.values():
            assert child.stdout is not None
            child.stdout.readline()
        busy, asleep = children["busy"].pid, children["asleep"].pid
        activity = Activity()
        eventually(lambda: activity.moved(seen(busy)), "it computes")
        eventually(lambda: not activity.moved(seen(asleep)), "it sleeps")
        assert not is_stopped(busy)
        os.kill(busy, signal.SIGSTOP)
        eventually(lambda: is_stopped(busy), "it is stopped")
        eventually(lambda: not activity.moved(seen(busy)), "it stands still")
    finally:
        for child in children.values():
            child.kill()
            child.communicate()
    assert not activity.moved(seen(busy)) and not is_stopped(busy), "who is gone does nothing"


class _Recorded:
    """Stands for a backend: how each worker was to be started."""

    def __init__(self) -> None:
        self.preloaded: dict[str, bool] = {}

    def start(self, start: StartRole, *, preloaded: bool) -> None:
        self.preloaded[start.name] = preloaded


@pytest.mark.parametrize("resume", [False, True])
def test_the_buffer_never_waits_for_the_import_of_torch(tmp_path: Path, resume: bool) -> None:
    """Not when it resumes, either: it is spawned, and what it reads of a checkpoint needs no torch."""
    config = build(RunConfig, {})
    recorded = _Recorded()
    workers = [Worker("buffer", 0), Worker("learner", 0), Worker("actor", 0)]
    servers = ServerWatch((), config, tmp_path, RestartBudget(config.launch), "")
    plan = LaunchPlan(config=config, began_s=0.0, resume=resume, preload=("stillhouse.learner.worker",))
    crew = Crew(plan, "run-1", cast(ProcessBackend, recorded), servers, workers)
    for worker in workers:
        crew.start(worker)
    assert recorded.preloaded == {"buffer-0": False, "learner-0": True, "actor-0": True}
    assert entries_of(config) == ENTRIES == plan.entries, "what is preloaded is what is started"
    assert entries_of(build(RunConfig, {"learner": {"ranks": 2}}))["learner"] == RANKS_ENTRY
