"""The warmed parent: what it shares with its children, and when it refuses to fork."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launcher_process import StartLauncher

from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.processes import forkserver, local
from stillhouse.launch.workers.launch_plan import LaunchPlan
from stillhouse.launch.workers.start_role import WorkFolder


def test_forked_workers_share_the_warmed_parents_memory(start_launcher: StartLauncher) -> None:
    launcher = start_launcher(settings={"actors": 8, "teachers": 2}, preload=("torch", "fake_roles"))
    launcher.until_ready()
    launcher.finish()
    assert launcher.wait() == 0, launcher.said
    assert launcher.summary()["peak_memory_bytes"] < 1 << 30  # 13 processes; torch alone takes some 200 MiB in each


FORK_THAT_IS_TERMINATED_AT_ONCE = """
import os, signal, socket, sys, time
from stillhouse.protocol.fork_server import ForkServer
fork = os.fork
def forked():
    pid = fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return pid
os.fork = forked
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ForkServer(socket.socket(fileno=int(sys.argv[1])), lambda message: time.sleep(20)).serve()
"""


def test_a_child_that_is_terminated_before_it_has_begun_leaves() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", FORK_THAT_IS_TERMINATED_AT_ONCE, str(theirs.fileno())]
        server = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        ours.settimeout(60)
        ours.sendall(b'{"type": "Fork", "name": "a", "incarnation": "b"}\n')
        with ours.makefile() as lines:
            exited = next(message for line in lines if (message := json.loads(line))["type"] == "Exited")
    assert server.wait(60) == 0
    assert exited["code"] == -signal.SIGTERM


def test_a_fork_server_is_not_killed_for_the_time_in_which_the_launcher_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + asleep_s)
    monkeypatch.setattr(local, "time", clock)
    (tmp_path / "logs").mkdir()
    write_config(RunConfig(), tmp_path / "config.yaml")
    plan, events = LaunchPlan(config=RunConfig(), began_s=0.0), list[object]()
    backend = local.LocalProcesses(plan, WorkFolder(tmp_path))
    try:
        backend.prepare()
        for _ in range(4):  # the first look at a process never finds it idle, nor one while it starts
            looked_s = time.monotonic()
            while time.monotonic() < looked_s + 3:
                events += backend.poll(0.2)
            asleep_s += 200.0
            events += backend.poll(0)
    finally:
        backend.close()
    assert events == []


def test_a_process_with_threads_refuses_to_fork() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert "threads, expected 1" in (forkserver.refusal() or "")
    finally:
        done.set()
        thread.join()


FORK_BESIDE_PYARROW = """
import os, pathlib, pyarrow
from stillhouse.launch.processes.forkserver import refusal
pool = pyarrow.jemalloc_memory_pool()
kept = [pyarrow.array(range(10_000), memory_pool=pool) for _ in range(20)]
names = [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()]
print(sorted(names)[0], len(names), refusal(), flush=True)
pid = os.fork()
if pid == 0:
    for size in range(1, 3000, 7):
        kept.append(pyarrow.array(range(size), memory_pool=pool))
        kept.pop(0)
    os._exit(sum(len(one) for one in kept) % 251)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_thread_of_pyarrow_does_not_prevent_a_fork_and_its_memory_works_in_the_child() -> None:
    """Without this, workers are spawned in every environment where transformers finds scikit-learn and pandas."""
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-c", FORK_BESIDE_PYARROW], env=environment, capture_output=True, text=True, timeout=60
    )
    expected = sum(range(1, 3000, 7)[-20:]) % 251
    assert done.stdout.splitlines() == ["jemalloc_bg_thd 2 None", str(expected)], done.stderr


def test_a_process_with_a_cuda_context_refuses_to_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert forkserver.refusal() == "a CUDA context exists in the fork server"
