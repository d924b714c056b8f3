"""A Ray cluster that the launcher starts itself: what it listens on, and what a killed launcher leaves.

Processes and their sockets are read from the system, not from Ray."""

from __future__ import annotations

import importlib.util
import ipaddress
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

import psutil
import pytest

from tests.launch.ray.ray_run import SMALL, ray_run
from tests.patience import PATIENCE_S, eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray (make ray)"),
]


def test_it_listens_on_loopback_only_and_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    topology = "cluster = { learner = { cpus = 1, memory_gib = 1 }, actors = { each = 1, cpus = 1, memory_gib = 1 } }\n"
    temporary = tmp_path / "tmp"
    temporary.mkdir()  # ours only: Ray's paths of sockets must be short
    with ray_run(tmp_path, SMALL + topology, TMPDIR=str(temporary), RAY_TMPDIR=gettempdir()) as run:
        run.until("actor-actors-0-0", "an actor on Ray")
        tree = psutil.Process(run.process.pid).children(recursive=True)
        names = {process.pid: process.name() for process in tree}
        assert {"raylet", "gcs_server"} <= set(names.values()), names
        listening = [
            (names.get(process.pid, "the launcher"), connection.laddr)
            for process in (psutil.Process(run.process.pid), *tree)
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening
        assert not [(name, at) for name, at in listening if not _is_loopback(at.ip)]
        assert list(temporary.glob("stillhouse-*"))
        run.process.kill()
        run.process.wait()
        # Ray's two agents of a node look for their raylet only now and then, and try to report its end first.
        eventually(lambda: not _alive(tree), lambda: f"{_alive(tree)} to end", 4 * PATIENCE_S)
        eventually(lambda: not list(temporary.glob("stillhouse-*")), "the folder of the host to be removed")


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
