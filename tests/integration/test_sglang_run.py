"""Whole runs whose students and teachers are on real SGLang servers: started by the launcher, or running already."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import psutil
import pytest

from stillhouse.builtin import STUDENT_DIR, TEACHER_DIR
from stillhouse.sglang_server.servers import DEFAULT_PYTHON, Servers, answers
from tests.integration.conftest import Launched, alive
from tests.integration.test_whole_run import assert_balanced
from tests.patience import RUN_PATIENCE_S, Limit

pytestmark = [
    pytest.mark.skipif(not DEFAULT_PYTHON.exists(), reason="no .venv-sglang: make sglang-cpu"),
]
Launch = Callable[..., Launched]
ON_SGLANG: Final = ("--actor.engine=sglang", "--teacher.engine=sglang", "--device=cpu", "--learner.eval_every=0")


def family(run: Launched) -> list[psutil.Process]:
    return psutil.Process(run.process.pid).children(recursive=True)


def of_server(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """SGLang's own processes among these."""
    return [process for process in processes if "sglang" in " ".join(process.cmdline())]


def servers(run: Launched, worker: str) -> dict[str, str]:
    """What the worker has written down about its server."""
    return json.loads((run.run_dir / "servers" / f"{worker}.json").read_text())


def leader_at(url: str) -> psutil.Process:
    """The process that listens there."""
    port = int(url.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN and tuple(connection.laddr)[1:] == (port,)
        if listens and connection.pid:
            return psutil.Process(connection.pid)
    raise AssertionError(f"nobody listens at {url}")


def test_a_run_on_servers_ends_well_and_leaves_neither_process_nor_key(launch: Launch) -> None:
    run = launch(*ON_SGLANG, "--actors=2", "--teachers=1", "--steps=4", "--max-staleness=1")
    run.until(lambda: len(run.steps()) >= 1, "a step")
    processes = family(run)
    assert len(of_server(processes)) >= 9  # three servers, each with scheduler and detokenizer
    (actor, _) = run.workers("actor")
    key = actor.environ()["STILLHOUSE_SERVER_KEY"]
    assert not [word for process in processes for word in process.cmdline() if key in word]
    libraries = {Path(entry.path).name for entry in actor.memory_maps()}
    assert not [name for name in libraries if name.startswith("libtorch")]
    assert run.wait() == 0, run.text()
    assert not alive(processes)
    summary = run.summary()
    assert_balanced(summary)
    assert summary["steps"] == 4 and summary["staleness"]["max"] <= 1
    workers = {name: worker["tokens"] for name, worker in summary["workers"].items() if worker["role"] != "buffer"}
    assert all(workers.values()), workers
    assert summary["servers"].keys() == {"server-actor-0", "server-actor-1", "server-teacher-0"}
    assert summary["versions_published"] >= 1
    assert run.text().count("server of actor-0, actor-1") == 1  # alike: printed once
    assert not [file for file in run.run_dir.rglob("*") if file.is_file() and key.encode() in file.read_bytes()]
    assert key not in run.text()


def test_a_server_killed_in_the_middle_is_renewed_and_the_run_finishes(launch: Launch) -> None:
    run = launch(*ON_SGLANG, "--actors=2", "--teachers=1", "--steps=12", "--max-staleness=2")
    run.until(lambda: len(run.steps()) >= 2, "step 2")
    victim = leader_at(servers(run, "actor-0")["url"])
    victim.send_signal(signal.SIGKILL)
    assert run.wait() == 0, run.text()
    summary = run.summary()
    assert_balanced(summary)
    assert summary["steps"] == 12
    assert summary["servers"]["server-actor-0"]["restarts"] == 1
    assert summary["workers"]["actor-0"]["restarts"] >= 1
    assert summary["workers"]["actor-1"]["restarts"] == 0  # its server may have lost a race for a port at its start


def test_a_killed_launcher_leaves_no_server(launch: Launch) -> None:
    run = launch(*ON_SGLANG, "--actors=1", "--teachers=1", "--steps=500")
    run.until(lambda: len(run.steps()) >= 1, "a step")
    processes = family(run)
    assert len(of_server(processes)) >= 6
    run.kill()
    limit = Limit()
    while alive(processes) and not limit.passed:
        time.sleep(0.1)
    assert not alive(processes)


def test_a_run_uses_running_servers_and_leaves_them_running(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_MY_SERVERS", "the-key")
    key = ("--api-key", "the-key")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with Servers(tmp_path / "servers", environment=environment) as started:
        student = started.start("student", STUDENT_DIR, key)
        teacher = started.start("teacher", TEACHER_DIR, key)
        started.wait_ready([student, teacher], RUN_PATIENCE_S)
        arguments = (
            *ON_SGLANG,
            f"--actor.urls={student.url}",
            f"--teacher.urls={teacher.url}",
            "--actor.sglang.api_key_env=KEY_OF_MY_SERVERS",
            "--teacher.sglang.api_key_env=KEY_OF_MY_SERVERS",
        )
        checked = launch(*arguments, "--check", folder="checked")
        assert checked.wait() == 0, checked.text()
        assert (
            "server of actor-0, teacher-0 (weights default):" in checked.text()
            and "versions of tokens   spans" in checked.text()
        )
        for folder in ("first", "second"):  # the second one finds the weights that the first one left
            run = launch(*arguments, "--steps=3", folder=folder)
            assert run.wait() == 0, run.text()
            assert_balanced(run.summary())
            assert run.summary()["actors"] == 1 and run.summary()["servers"] == {}
        assert answers("127.0.0.1", student.port, "the-key") and answers("127.0.0.1", teacher.port, "the-key")
