"""GPUs of the nodes reach the workers: each host has as many as its role asks for, by Ray's count, and its workers see
those and no others. The GPUs do not exist: Ray counts what a node declares, and the models are on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import psutil
import pytest

from launch.audit.run import audit
from tests.launch.ray.nodes import ray_nodes
from tests.launch.ray.ray_run import SMALL, ray_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray (make ray)"),
]
FIRST = {"num_cpus": 2, "num_gpus": 1}
LARGE = {"num_cpus": 4, "num_gpus": 5}
TOPOLOGY = """\
device = "cpu"
cluster = { learner = { cpus = 1, gpus = 1, memory_gib = 1 }, actors = { each = 1, cpus = 1, gpus = 1, memory_gib = 1 \
}, teachers = { each = 1, cpus = 1, gpus = 2, memory_gib = 1 } }
"""
VARIABLE = "CUDA_VISIBLE_DEVICES"


def test_each_host_has_the_gpus_of_its_role_and_no_two_share_one(tmp_path: Path) -> None:
    with (
        ray_nodes(LARGE, first=FIRST) as nodes,
        ray_run(tmp_path, SMALL + TOPOLOGY, "--actors", "2", RAY_ADDRESS=nodes.address) as run,
    ):
        run.until(lambda: len(run.steps()) >= 2, "two steps")
        joins = nodes.joins()
        assert set(joins) == {"actors-0", "actors-1", "teachers-0"}
        assert nodes.free("GPU") == 6 - 1 - 2 * 1 - 2, "one is left"
        shown = {name: seen_by(join) for name, join in joins.items()}
        assert [len(shown[name]) for name in ("actors-0", "actors-1", "teachers-0")] == [1, 1, 2], shown
        every = [gpu for gpus in shown.values() for gpu in gpus]
        assert len(set(every)) == len(every) and set(every) <= {"0", "1", "2", "3", "4"}, shown
        own = psutil.Process(run.process.pid).children(recursive=True)
        assert {process.environ().get(VARIABLE) for process in own if "learner" in " ".join(process.cmdline())} == {"0"}
        run.stop()
    report = audit(run.folder)
    assert report.clean, str(report)


def test_a_host_that_asks_for_no_gpu_sees_none(tmp_path: Path) -> None:
    """On a node that has some, which another program may use."""
    topology = TOPOLOGY.replace("gpus = 1", "gpus = 0")
    with ray_nodes(LARGE, first=FIRST) as nodes, ray_run(tmp_path, SMALL + topology, RAY_ADDRESS=nodes.address) as run:
        run.until(lambda: len(run.steps()) >= 1, "a step")
        joins = nodes.joins()
        assert joins["actors-0"].environ()[VARIABLE] == ""
        assert len(seen_by(joins["teachers-0"])) == 2
        assert nodes.free("GPU") == 4
        run.stop()


def seen_by(join: psutil.Process) -> list[str]:
    """GPUs that the join and all its workers see, by their own environment."""
    every = {process.environ().get(VARIABLE, "all") for process in (join, *join.children(recursive=True))}
    assert len(every) == 1, every
    return every.pop().split(",")
