"""GPUs of the nodes reach the workers: each host has as many as its role asks for, by Ray's count, and its workers see
those and no others. The GPUs do not exist: Ray counts what a node declares, and the models are on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import psutil
import pytest

from stillhouse.tools.audit.run import audit
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
cluster = { learner = { cpus = 1, gpus = 1, memory_gib = 1 }, actors = { each = 1, cpus = 1, memory_gib = 1 }, \
teachers = { each = 1, cpus = 1, gpus = 2, memory_gib = 1 } }
"""
VARIABLE = "CUDA_VISIBLE_DEVICES"


def test_each_host_sees_the_gpus_of_its_role_and_no_others(tmp_path: Path) -> None:
    """Also a host that asks for none, on a node that has some, which another program may use."""
    with (
        ray_nodes(LARGE, first=FIRST) as nodes,
        ray_run(tmp_path, SMALL + TOPOLOGY, "--teachers", "2", RAY_ADDRESS=nodes.address) as run,
    ):
        run.until(lambda: len(run.steps()) >= 2, "two steps")
        joins = nodes.joins()
        assert set(joins) == {"actors-0", "teachers-0", "teachers-1"}
        assert nodes.free("GPU") == 6 - 1 - 2 * 2, "one is left"
        assert joins["actors-0"].environ()[VARIABLE] == ""
        shown = [seen_by(joins[f"teachers-{n}"]) for n in range(2)]
        assert [len(gpus) for gpus in shown] == [2, 2], shown
        every = [gpu for gpus in shown for gpu in gpus]
        assert len(set(every)) == 4 and set(every) <= {"0", "1", "2", "3", "4"}, shown
        own = psutil.Process(run.process.pid).children(recursive=True)
        assert {process.environ().get(VARIABLE) for process in own if "learner" in " ".join(process.cmdline())} == {"0"}
        run.stop()
    report = audit(run.folder)
    assert report.clean, str(report)


def seen_by(join: psutil.Process) -> list[str]:
    """GPUs that the join and all its workers see, by their own environment."""
    every = {process.environ().get(VARIABLE, "all") for process in (join, *join.children(recursive=True))}
    assert len(every) == 1, every
    return every.pop().split(",")
