"""Inference servers beside their workers: started, renewed together, ended, and their key kept. The servers are those
of fake_sglang, started as on GPUs: a process each."""

from __future__ import annotations

import os
import signal
import stat
import sys
from typing import Any

import psutil
from launcher_process import Launcher, StartLauncher

from tests.patience import PATIENCE_S, eventually


def settings(behave: str = "serve", **launch: Any) -> dict[str, Any]:
    """One actor and one teacher, each with a server; that of the actor behaves so. Servers that are given an address
    for ranks need no torch to bind one."""
    server = {"python": sys.executable, "device": "cpu", "args": ["--dist-init-addr", "127.0.0.1:1"]}
    return {
        "actor": {
            "engine": "sglang",
            "server": server | {"args": [*server["args"], "--behave", behave], "start_timeout_s": PATIENCE_S},
        },
        "teacher": {"engine": "sglang", "server": server},
        "launch": launch,
    }


def server_pids(launcher: Launcher, worker: str) -> list[int]:
    """Of all processes that this worker's server has had, oldest first."""
    lines = launcher.log(f"server-{worker}").splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("pid ")]


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def all_gone(launcher: Launcher) -> bool:
    pids = [pid for worker in ("actor-0", "teacher-0") for pid in server_pids(launcher, worker)]
    return launcher.leftovers() == [] and not any(map(alive, pids))


def test_servers_start_and_end_with_the_run_and_their_key_is_in_no_command_line_log_or_file(
    start_launcher: StartLauncher,
) -> None:
    """And a worker that dies by itself finds its server again."""
    launcher = start_launcher({"actor-0": "crash_once"}, settings=settings(), warm=False)
    launcher.until_ready()
    for worker in ("actor-0", "teacher-0"):
        assert "answers: True" in launcher.log(worker)  # the worker was started when its server answered, with its key
    key = psutil.Process(launcher.pids("teacher-0")[-1]).environ()["STILLHOUSE_SERVER_KEY"]
    assert len(key) > 30
    family = psutil.Process(launcher.process.pid).children(recursive=True)
    assert not any(key in word for process in family for word in process.cmdline())
    summary = launcher.summary_when_finished()
    assert summary["servers"].keys() == {"server-actor-0", "server-teacher-0"}
    assert all(server["exit_codes"] == [-signal.SIGTERM] for server in summary["servers"].values())
    assert summary["workers"]["actor-0"]["exit_codes"] == [1, 0] and len(server_pids(launcher, "actor-0")) == 1
    assert all_gone(launcher)
    assert "'api_key': '(hidden)'" in launcher.log("server-teacher-0")
    files = [file for file in launcher.run_dir.rglob("*") if file.is_file()]
    assert not [file for file in files if key.encode() in file.read_bytes()]
    assert key not in launcher.said
    log = launcher.run_dir / "logs" / "server-actor-0.log"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_dead_server_is_renewed_with_its_worker_and_a_worker_that_lost_its_server_gets_a_new_one(
    start_launcher: StartLauncher,
) -> None:
    launcher = start_launcher({"teacher-0": "loses_server_once"}, settings=settings())
    launcher.until_ready()
    eventually(lambda: launcher.log("teacher-0").count("answers: True") == 2, "teacher-0 is on the new server")
    (first,) = server_pids(launcher, "actor-0")
    os.kill(first, signal.SIGKILL)
    eventually(lambda: len(launcher.pids("actor-0")) == 2, "actor-0 is started again")
    eventually(lambda: launcher.log("actor-0").count("answers: True") == 2, "on a living server")
    summary = launcher.summary_when_finished()
    assert len(server_pids(launcher, "teacher-0")) == len(server_pids(launcher, "actor-0")) == 2
    assert summary["workers"]["teacher-0"]["exit_codes"] == [5, 0]
    for worker in ("actor-0", "teacher-0"):
        assert summary["servers"][f"server-{worker}"]["exit_codes"] == [-signal.SIGKILL, -signal.SIGTERM]
        assert summary["servers"][f"server-{worker}"]["restarts"] == summary["workers"][worker]["restarts"] == 1
    assert "server-actor-0 was killed by SIGKILL; it is started again" in launcher.said
    assert all_gone(launcher)


def test_a_server_that_cannot_start_ends_the_run_with_its_last_words(start_launcher: StartLauncher) -> None:
    launcher = start_launcher(settings=settings("crash"))
    assert launcher.wait() == 1
    assert len(server_pids(launcher, "actor-0")) == 2
    assert "server-actor-0 never answered, 2 times" in launcher.summary()["reason"]
    assert "RuntimeError: no such attention backend" in launcher.said
    assert launcher.pids("actor-0") == []
    assert all_gone(launcher)


def test_a_server_that_takes_too_long_to_start_is_killed(start_launcher: StartLauncher) -> None:
    mute = settings("mute")
    mute["actor"]["server"]["start_timeout_s"] = 1.5
    launcher = start_launcher(settings=mute)
    assert launcher.wait() == 1
    assert "did not answer within 2 s (server.start_timeout_s)" in launcher.said
    assert launcher.summary()["servers"]["server-actor-0"]["exit_codes"] == [-signal.SIGKILL] * 2
    assert all_gone(launcher)


def test_ctrl_c_ends_servers_that_still_load(start_launcher: StartLauncher) -> None:
    launcher = start_launcher(settings=settings("mute"))
    eventually(lambda: bool(server_pids(launcher, "actor-0")), "the server is on its way")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 130
    assert launcher.summary()["ready_s"] is None
    assert all_gone(launcher)


def test_the_second_ctrl_c_kills_servers_at_once(start_launcher: StartLauncher) -> None:
    launcher = start_launcher({"actor-0": "deaf"}, settings=settings("deaf", shutdown_grace_s=500.0))
    launcher.until_ready()
    launcher.process.send_signal(signal.SIGINT)
    eventually(lambda: "was asked to leave" in launcher.log("learner-0"), "the first stage")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 130
    assert all_gone(launcher)


def test_sigkill_of_the_launcher_leaves_no_server(start_launcher: StartLauncher) -> None:
    """Neither one that serves, the teacher's, nor one that still loads."""
    launcher = start_launcher(settings=settings("mute"))
    eventually(lambda: all(server_pids(launcher, worker) for worker in ("actor-0", "teacher-0")), "servers are there")
    launcher.process.kill()
    launcher.wait()
    eventually(lambda: all_gone(launcher), "everybody is gone")
