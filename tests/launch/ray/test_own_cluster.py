"""A Ray cluster that the launcher starts itself: what it listens on, and what a killed launcher leaves.

Processes and their sockets are read from the system, not from Ray."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Final

import psutil
import pytest

from tests.launch.ray.nodes import ROOT
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray (make ray)"),
]
SMALL: Final = """\
steps = 100000
actors = 1
teachers = 1
learner = { lr = 3e-4, eval_every = 0 }
launch = { backend = "ray", status = "plain", threads_per_worker = 1 }
"""


def test_it_listens_on_loopback_only_and_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    topology = "cluster = { learner = { cpus = 1, memory_gib = 1 }, actors = { each = 1, cpus = 1, memory_gib = 1 } }\n"
    temporary = tmp_path / "tmp"
    temporary.mkdir()  # ours only: Ray's paths of sockets must be short
    with _run(tmp_path, SMALL + topology, TMPDIR=str(temporary), RAY_TMPDIR=gettempdir()) as (run, said):
        _until(run, said, "actor-actors-0-0", "an actor on Ray")
        tree = psutil.Process(run.pid).children(recursive=True)
        names = {process.pid: process.name() for process in tree}
        assert {"raylet", "gcs_server"} <= set(names.values()), names
        listening = [
            (names.get(process.pid, "the launcher"), connection.laddr)
            for process in (psutil.Process(run.pid), *tree)
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening
        assert not [(name, at) for name, at in listening if not _is_loopback(at.ip)]
        assert list(temporary.glob("stillhouse-*"))
        run.kill()
        run.wait()
        # Ray's two agents of a node look for their raylet only now and then, and try to report its end first.
        eventually(lambda: not _alive(tree), lambda: f"{_alive(tree)} to end", 4 * PATIENCE_S)
        eventually(lambda: not list(temporary.glob("stillhouse-*")), "the folder of the host to be removed")


@contextmanager
def _run(folder: Path, topology: str, **variables: str) -> Generator[tuple[subprocess.Popen[bytes], Path]]:
    """A run on a cluster of its own, and the file with its console."""
    file, said = folder / "topology.toml", folder / "console.txt"
    file.write_text(topology)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(ROOT / "launch" / "cluster.py"), "--config", str(file)]
    with said.open("wb") as console:
        run = subprocess.Popen(
            [*command, "--run-dir", str(folder / "run")], env=environment, stdout=console, stderr=subprocess.STDOUT
        )
    try:
        yield run, said
    finally:
        run.kill()
        run.wait()


def _until(run: subprocess.Popen[bytes], said: Path, words: str, what: str) -> str:
    eventually(
        lambda: words in said.read_text() or run.poll() is not None,
        lambda: f"{what}:\n{said.read_text()}",
        RUN_PATIENCE_S,
    )
    assert run.poll() is None, said.read_text()
    return said.read_text()


def _is_loopback(ip: str) -> bool:
    """Also of an IPv4 address as a socket of IPv6 has it: ::ffff:127.0.0.1."""
    return ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback


def _alive(processes: list[psutil.Process]) -> list[str]:
    alive: list[str] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process.name())
    return alive
