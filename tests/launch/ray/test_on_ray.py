"""A run on a real Ray cluster of three nodes: one of them dies, another comes, the numbers of workers change, and the
record of all batches is audited."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from stillhouse.tools.audit.run import audit
from tests.launch.ray.nodes import ROOT, Nodes, ray_nodes
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


def test_a_run_outlives_a_node_takes_a_new_one_and_changes_its_size(tmp_path: Path) -> None:
    with ray_nodes() as nodes, _run(tmp_path, nodes, steps=240) as run:
        text = run.until(lambda: len(run.steps()) >= 5, "five steps")
        assert ": 240 steps, 4 actors, 2 teachers on 3 hosts of Ray, max staleness" in text, "the headline"
        nodes.order("remove")
        text = run.until("is lost", "the loss of a node")
        lost = re.findall(r"Ray: (\w+-\d) \(.*is lost", text)
        nodes.order("add")
        run.until(lambda: run.text().count(f"{lost[0]} (") >= 3, "the lost host on another node")
        _scale(run.folder, "--actors", "6")
        run.until("actor-actors-2-1", "two more actors in the run")
        _scale(run.folder, "--actors", "2")
        run.until(lambda: run.text().count("has left") == 2, "four actors to leave")
        assert run.process.wait(RUN_PATIENCE_S) == 0, run.text()
    assert "raylet" not in run.text().lower(), "what Ray says about the dead node"
    assert "Ray reports: " in (run.folder / "logs" / "launcher.log").read_text()
    report = audit(run.folder)
    assert report.clean, str(report)
    summary = json.loads((run.folder / "summary.json").read_text())
    joined = {name for name, worker in summary["workers"].items() if worker.get("joined")}
    assert {name.rpartition("-")[0] for name in joined} >= {"actor-actors-0", "actor-actors-1", "actor-actors-2"}
    for name in joined:
        role, _, index = name.rpartition("-")
        log = run.folder / "joined" / role.partition("-")[2] / "logs" / f"{name}.log"
        assert f"{name} (" in log.read_text(), (role, index)


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with ray_nodes() as nodes, _run(tmp_path, nodes, steps=10_000) as run:
        run.until(lambda: len(run.steps()) >= 3, "three steps")
        ours = {process.pid for process in _joins()}
        assert ours
        run.process.kill()
        run.process.wait()
        eventually(lambda: not ours & {process.pid for process in _joins()}, lambda: f"{ours} to end", PATIENCE_S)


def _run(folder: Path, nodes: Nodes, *, steps: int) -> AbstractContextManager[RayRun]:
    return ray_run(folder, TOPOLOGY.replace("STEPS", str(steps)), RAY_ADDRESS=nodes.address)


def _scale(run_dir: Path, *words: str) -> None:
    command = [sys.executable, str(ROOT / "launch" / "cluster.py"), "scale", str(run_dir), *words]
    subprocess.run(command, check=True, timeout=PATIENCE_S)


def _joins() -> list[psutil.Process]:
    """Joins that run on this machine under Ray, and their workers."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        if "stillhouse.launch.ray.joined" in (process.info["cmdline"] or []):
            found += [process, *process.children(recursive=True)]
    return found
