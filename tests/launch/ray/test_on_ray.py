"""A run on a real Ray cluster of three nodes: one of them dies, another comes, and the record of all
batches is audited."""

from __future__ import annotations

import importlib.util
import json
import re
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from stillhouse.tools.audit.run import audit
from tests.launch.ray.nodes import Nodes, ray_nodes
from tests.launch.ray.ray_run import RayRun, ray_run
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray (make ray)"),
]
TOPOLOGY = """\
steps = STEPS
actors = 4
teachers = 2
learner = { ranks = 2, lr = 3e-4, eval_every = 0, checkpoint_every = 10, record = "RECORD" }
weights = { allow_plain_network = true }
buffer = { batch_rollouts = 16, peer_timeout_s = 3.0 }
launch = { backend = "ray", status = "plain", threads_per_worker = 1 }
cluster = { learner = { cpus = 1, memory_gib = 1 }, actors = { each = 2, cpus = 1, memory_gib = 1 }, \
teachers = { each = 2, cpus = 1, memory_gib = 1 } }
"""


def test_a_run_outlives_a_node_and_takes_a_new_one(tmp_path: Path) -> None:
    with ray_nodes() as nodes, _run(tmp_path, nodes, 240) as run:
        text = run.until(lambda: len(run.steps()) >= 5, "five steps")
        assert ": 240 steps, 4 actors, 2 teachers on 3 hosts of Ray, max staleness" in text, "the headline"
        nodes.order("remove")
        text = run.until("is lost", "the loss of a node")
        lost = re.findall(r"Ray: (\w+-\d) \(.*is lost", text)
        nodes.order("add")
        run.until(lambda: run.text().count(f"{lost[0]} (") >= 3, "the lost host on another node")
        assert run.process.wait(RUN_PATIENCE_S) == 0, run.text()
    assert "raylet" not in run.text().lower(), "what Ray says about the dead node"
    assert "Ray reports: " in (run.folder / "logs" / "launcher.log").read_text()
    report = audit(run.folder)
    assert report.clean, str(report)
    summary = json.loads((run.folder / "summary.json").read_text())
    joined = {name for name, worker in summary["workers"].items() if worker.get("joined")}
    assert {name.rpartition("-")[0] for name in joined} >= {"actor-actors-0", "actor-actors-1"}
    for name in joined:
        role, _, index = name.rpartition("-")
        log = run.folder / "joined" / role.partition("-")[2] / "logs" / f"{name}.log"
        assert f"{name} (" in log.read_text(), (role, index)


def test_a_cluster_that_is_too_small_is_refused_by_the_check_and_waited_for_by_the_start(tmp_path: Path) -> None:
    with ray_nodes({"num_cpus": 1}) as nodes:
        with _run(tmp_path, nodes, 5, "--check") as run:
            assert run.process.wait(PATIENCE_S) == 2, run.text()
            said = f"the Ray cluster at {nodes.address} is too small: all hosts need 4 CPUs, 0 GPUs and 4 GiB, and its"
            assert f"{said} nodes have 3 CPUs" in run.text(), run.text()
        with _run(tmp_path, nodes, 5) as run:
            run.until(" waits for a node with 1 CPU, 0 GPUs and 1 GiB; free are 0 CPUs", "the wait for a node")
            nodes.order("add")
            assert run.process.wait(RUN_PATIENCE_S) == 0, run.text()
        with _run(tmp_path, nodes, 5, "--check", "--gpus", "1") as run:
            assert run.process.wait(PATIENCE_S) == 0, run.text()


def test_a_start_on_this_machine_alone_is_refused_at_once_if_it_is_too_small(tmp_path: Path) -> None:
    with ray_run(tmp_path, TOPOLOGY.replace("STEPS", "5"), "--cluster.actors.gpus", "2") as run:
        assert run.process.wait(RUN_PATIENCE_S) == 2, run.text()
        assert "the Ray cluster that is started on this machine is too small: all hosts need" in run.text()


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with ray_nodes() as nodes, _run(tmp_path, nodes, 10_000) as run:
        run.until(lambda: len(run.steps()) >= 3, "three steps")
        ours = {process.pid for process in _joins()}
        assert ours
        run.process.kill()
        run.process.wait()
        eventually(lambda: not ours & {process.pid for process in _joins()}, lambda: f"{ours} to end", PATIENCE_S)


def _run(folder: Path, nodes: Nodes, steps: int, *words: str) -> AbstractContextManager[RayRun]:
    return ray_run(folder, TOPOLOGY.replace("STEPS", str(steps)), *words, RAY_ADDRESS=nodes.address)


def _joins() -> list[psutil.Process]:
    """Joins that run on this machine under Ray, and their workers."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        if "stillhouse.launch.stages.child" in (process.info["cmdline"] or []):
            found += [process, *process.children(recursive=True)]
    return found
