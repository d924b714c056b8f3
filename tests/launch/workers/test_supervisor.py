"""Supervision with real processes: starting, restarting, the several ways of ending, and no process left behind."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest
from launcher_process import StartLauncher

from tests.patience import eventually

BOTH = pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])


@BOTH
def test_a_run_ends_well_when_the_learner_says_so(start_launcher: StartLauncher, method: str) -> None:
    """Workers that leave before the launcher hears of the end are not dead."""
    settings = {"actors": 2, "launch": {"start_method": method}}
    launcher = start_launcher({"buffer-0": "tells_launcher_last"}, settings=settings)
    launcher.until_ready()
    summary = launcher.summary_when_finished()
    assert summary["ok"] and "started again" not in launcher.said
    assert summary["ledger"]["source"] == "final"
    assert all(worker["exit_codes"] == [0] for worker in summary["workers"].values()), summary["workers"]
    assert summary["workers"].keys() == {"buffer-0", "learner-0", "teacher-0", "actor-0", "actor-1"}
    assert launcher.leftovers() == []


def test_a_dead_worker_is_started_again_under_its_name_and_what_it_had_started_goes_with_it(
    start_launcher: StartLauncher,
) -> None:
    launcher = start_launcher({"actor-0": "litter"})
    launcher.until_ready()
    second = start_launcher(run_dir=launcher.run_dir)
    (child,) = psutil.Process(launcher.pids("actor-0")[0]).children()
    for name in ("actor-0", "teacher-0"):
        os.kill(launcher.pids(name)[0], signal.SIGKILL)
        eventually(lambda name=name: len(launcher.pids(name)) == 2, f"{name} starts again")
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child goes too")
    eventually(lambda: "actor-0 does" in launcher.log("actor-0"), "the new one works")
    assert second.wait() == 2
    assert f"in use by another launcher (pid {launcher.process.pid})" in second.said
    launcher.finish()
    assert launcher.wait() == 0, launcher.said
    assert launcher.summary()["workers"]["actor-0"]["restarts"] == 1
    assert launcher.summary()["workers"]["actor-0"]["exit_codes"] == [-9, 0]
    assert launcher.leftovers() == []


def test_a_worker_that_keeps_dying_stops_the_run_and_its_last_words_are_shown(start_launcher: StartLauncher) -> None:
    launcher = start_launcher({"actor-0": "crash"}, settings={"launch": {"max_restarts": 2}})
    assert launcher.wait() == 1
    assert len(launcher.pids("actor-0")) == 3
    assert "actor-0 died more than 2 times" in launcher.said
    assert "RuntimeError: the bottom fell out" in launcher.said
    summary = launcher.summary()
    assert not summary["ok"]
    assert summary["workers"]["actor-0"] == {
        "role": "actor",
        "tokens": 0,
        "done": 0,
        "restarts": 2,
        "exit_codes": [1, 1, 1],
        "joined": False,
    }
    assert launcher.leftovers() == []


@pytest.mark.parametrize(
    ("words", "finish", "reason"),
    [
        pytest.param({"learner-0": "crash"}, "", "learner-0", marks=pytest.mark.slow),
        ({"learner-0": "leaves"}, "", "learner-0"),
        ({"teacher-0": "useless"}, "", "teacher-0 ended with exit code 4"),
        ({}, "diverged", "diverged"),
    ],
)
def test_a_run_fails_when_the_learner_goes_or_gives_up_or_a_worker_says_that_restarting_is_useless(
    start_launcher: StartLauncher, words: dict[str, str], finish: str, reason: str
) -> None:
    launcher = start_launcher(words)
    if finish:
        launcher.until_ready()
        launcher.finish(finish)
    assert launcher.wait() == 1
    assert reason in launcher.summary()["reason"] and len(launcher.pids("teacher-0")) <= 1
    assert launcher.leftovers() == []


def test_the_run_fails_when_the_buffer_is_killed_and_may_not_come_back(start_launcher: StartLauncher) -> None:
    launcher = start_launcher(settings={"launch": {"max_restarts": 0}})
    launcher.until_ready()
    os.kill(launcher.pids("buffer-0")[0], signal.SIGKILL)
    assert launcher.wait() == 1
    assert "buffer-0" in launcher.summary()["reason"] and "killed by SIGKILL" in launcher.summary()["reason"]
    assert launcher.summary()["ledger"]["source"] == "last_seen"
    assert launcher.leftovers() == []


def test_an_unbalanced_ledger_is_exit_code_3_and_loud(start_launcher: StartLauncher) -> None:
    launcher = start_launcher({"buffer-0": "unbalanced"})
    launcher.until_ready()
    launcher.finish()
    assert launcher.wait() == 3
    assert "THE LEDGER DOES NOT BALANCE" in launcher.said
    assert "off by +5" in launcher.said
    assert launcher.summary()["tokens"]["balanced"] is False
    assert launcher.summary()["exit_code"] == 3


def test_ctrl_c_ends_the_run_in_order(start_launcher: StartLauncher) -> None:
    launcher = start_launcher()
    launcher.until_ready()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 130
    summary = launcher.summary()
    logs = (launcher.said, launcher.log("buffer-0"))
    assert summary["ledger"]["source"] == "final", logs  # the buffer was asked last, and had its time
    assert {tuple(w["exit_codes"]) for w in summary["workers"].values()} == {(143,)}
    assert launcher.leftovers() == []


def test_an_exit_that_was_lost_on_its_way_is_raised_again_and_cleaning_up_is_left_in_peace(
    start_launcher: StartLauncher,
) -> None:
    words = {"actor-0": "loses_sigterm", "actor-1": "swallows_sigterm"}
    launcher = start_launcher(words, settings={"actors": 2, "launch": {"shutdown_grace_s": 500.0}})
    launcher.until_ready()
    for name in words:
        eventually(lambda name=name: (launcher.run_dir / f"{name}.holds").exists(), "it is where an exit gets lost")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait() == 143, launcher.said
    for name, said in (("actor-0", "Exception ignored in"), ("actor-1", "swallowed")):
        assert launcher.summary()["workers"][name]["exit_codes"] == [143]
        assert (launcher.run_dir / f"{name}.cleaned_up").exists(), launcher.log(name)
        assert f"{name} was asked to leave" in launcher.log(name) and said in launcher.log(name)


@pytest.mark.slow
def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(start_launcher: StartLauncher) -> None:
    launcher = start_launcher({"actor-0": "deaf"}, settings={"launch": {"shutdown_grace_s": 1.0}})
    launcher.until_ready()
    launcher.finish()
    assert launcher.wait() == 0, launcher.said
    assert "actor-0 did not leave" in launcher.said
    assert launcher.summary()["workers"]["actor-0"]["exit_codes"] == [-9]
    assert 'fake_roles.py", line' in launcher.log("actor-0")  # where it hung
    assert launcher.leftovers() == []


SLOW_POOL = {"quick": {"count": 1}, "slow": {"count": 1, "drain_s": 300.0}}


@pytest.mark.parametrize(
    ("settings", "teacher"),
    [
        pytest.param({"teacher": {"drain_s": 300.0}}, "teacher-0", id="teacher.drain_s", marks=pytest.mark.slow),
        pytest.param({"teachers": 2, "pools": SLOW_POOL, "teacher": {"drain_s": 0.0}}, "teacher-1", id="of its pool"),
    ],
)
def test_a_teacher_may_drain_for_longer_than_the_grace_and_nobody_else(
    start_launcher: StartLauncher, settings: dict[str, Any], teacher: str
) -> None:
    launcher = start_launcher(
        {teacher: "drains", "actor-0": "deaf"}, settings=settings | {"launch": {"shutdown_grace_s": 0.2}}
    )
    launcher.until_ready()
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait() == 143, launcher.said
    workers = launcher.summary()["workers"]
    assert workers[teacher]["exit_codes"] == [143]
    assert workers["actor-0"]["exit_codes"] == [-9] and "actor-0 did not leave in 0.2 s" in launcher.said
    assert launcher.leftovers() == []


def test_a_worker_that_never_gets_ready_ends_the_run(start_launcher: StartLauncher) -> None:
    launcher = start_launcher({"actor-0": "mute"}, settings={"launch": {"ready_timeout_s": 1.5}})
    assert launcher.wait() == 1
    assert "actor-0 to be ready" in launcher.summary()["reason"]
    assert "actor-0 does: mute" in launcher.summary()["reason"]


@pytest.mark.slow
def test_a_worker_that_stands_still_is_killed_and_started_again(start_launcher: StartLauncher) -> None:
    launcher = start_launcher(
        {"actor-0": "stop_once"},
        settings={"launch": {"silent_kill_s": 1.5}, "buffer": {"heartbeat_s": 0.2, "peer_timeout_s": 0.6}},
    )
    eventually(lambda: len(launcher.pids("actor-0")) == 2, "actor-0 is replaced")
    eventually(lambda: "actor-0 runs but was silent" in launcher.log("launcher"), "it is said why")
    launcher.finish()
    assert launcher.wait() == 0, launcher.said


@pytest.mark.slow
def test_a_restarted_worker_may_take_long_to_connect(start_launcher: StartLauncher) -> None:
    """It loads a model, say: that is no silence, however short `silent_kill_s` is."""
    launcher = start_launcher(
        {"actor-0": "slow_again"},
        settings={"launch": {"silent_kill_s": 1.0}, "buffer": {"heartbeat_s": 0.2, "peer_timeout_s": 0.6}},
    )
    launcher.until_ready()
    os.kill(launcher.pids("actor-0")[0], signal.SIGKILL)
    eventually(lambda: len(launcher.pids("actor-0")) == 2, "actor-0 is replaced")
    time.sleep(5)
    launcher.finish()
    assert launcher.wait() == 0, launcher.said
    assert len(launcher.pids("actor-0")) == 2, launcher.log("launcher")
    assert "was silent" not in launcher.log("launcher")


@pytest.mark.slow
def test_a_restarted_worker_that_never_connects_is_replaced(start_launcher: StartLauncher) -> None:
    launcher = start_launcher(
        {"actor-0": "mute_again"},
        settings={
            "launch": {"silent_kill_s": 1.0, "ready_timeout_s": 10.0},
            "buffer": {"heartbeat_s": 0.2, "peer_timeout_s": 0.6},
        },
    )
    launcher.until_ready()
    os.kill(launcher.pids("actor-0")[0], signal.SIGKILL)
    eventually(lambda: len(launcher.pids("actor-0")) == 3, "actor-0 is replaced twice")
    launcher.finish()
    assert launcher.wait() == 0, launcher.said


@pytest.mark.slow
def test_what_a_spawned_worker_started_goes_with_it(start_launcher: StartLauncher) -> None:
    launcher = start_launcher({"actor-0": "litter"}, settings={"launch": {"start_method": "spawn"}})
    launcher.until_ready()
    (child,) = psutil.Process(launcher.pids("actor-0")[0]).children()
    os.kill(launcher.pids("actor-0")[0], signal.SIGKILL)
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child goes too")
    launcher.finish()
    assert launcher.wait() == 0, launcher.said


@BOTH
def test_sigkill_of_the_launcher_leaves_nobody(start_launcher: StartLauncher, method: str) -> None:
    launcher = start_launcher({"actor-0": "deaf"}, settings={"actors": 2, "launch": {"start_method": method}})
    launcher.until_ready()
    pids = [pid for name in ("buffer-0", "learner-0", "teacher-0", "actor-0", "actor-1") for pid in launcher.pids(name)]
    assert len(pids) == 5
    launcher.process.kill()
    launcher.wait()
    eventually(lambda: launcher.leftovers() == [], "everybody is gone")


def test_an_unsafe_fork_server_makes_the_launcher_spawn(start_launcher: StartLauncher) -> None:
    launcher = start_launcher(settings={"launch": {"start_method": "auto"}}, preload=("starts_a_thread",))
    launcher.until_ready()
    launcher.finish()
    assert launcher.wait() == 0, launcher.said
    assert "spawning instead of forking: the fork server has 2 threads" in launcher.said


def test_fork_as_an_order_is_refused_where_it_is_unsafe(start_launcher: StartLauncher) -> None:
    launcher = start_launcher(settings={"launch": {"start_method": "fork"}}, preload=("starts_a_thread",))
    assert launcher.wait() == 1
    assert "launch.start_method is fork, but the fork server has 2 threads" in launcher.summary()["reason"]
