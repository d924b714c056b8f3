"""A run on a real Ray cluster of three nodes: one of them dies, another comes, the numbers of workers change, and the
record of all batches is audited."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launch.audit.run import audit
from tests.launch.ray.nodes import ROOT, Nodes, ray_nodes
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray (make ray)"),
]
STEPS = 60
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
    run_dir, said = tmp_path / "run", tmp_path / "console.txt"
    with ray_nodes() as nodes, said.open("w") as console:
        run = _start(tmp_path, run_dir, nodes, console, steps=STEPS * 4)
        try:
            _until(run, lambda: _steps(run_dir) >= 5, said, "five steps")
            nodes.order("remove")
            text = _until(run, lambda: "is lost" in said.read_text(), said, "the loss of a node")
            lost = re.findall(r"Ray: (\w+-\d) \(.*is lost", text)
            nodes.order("add")
            _until(run, lambda: said.read_text().count(f"{lost[0]} (") >= 3, said, "the lost host on another node")
            _scale(run_dir, "--actors", "6")
            _until(run, lambda: "actor-actors-2-1" in said.read_text(), said, "two more actors in the run")
            _scale(run_dir, "--actors", "2")
            _until(run, lambda: said.read_text().count("has left") == 2, said, "four actors to leave")
            assert run.wait(RUN_PATIENCE_S) == 0, said.read_text()
        finally:
            run.kill()
            run.wait()
    report = audit(run_dir)
    assert report.clean, str(report)
    summary = json.loads((run_dir / "summary.json").read_text())
    joined = {name for name, worker in summary["workers"].items() if worker.get("joined")}
    assert {name.rpartition("-")[0] for name in joined} >= {"actor-actors-0", "actor-actors-1", "actor-actors-2"}
    for name in joined:
        role, _, index = name.rpartition("-")
        log = run_dir / "joined" / role.partition("-")[2] / "logs" / f"{name}.log"
        assert f"{name} (" in log.read_text(), (role, index)


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    run_dir, said = tmp_path / "run", tmp_path / "console.txt"
    with ray_nodes() as nodes, said.open("w") as console:
        run = _start(tmp_path, run_dir, nodes, console, steps=10_000)
        try:
            _until(run, lambda: _steps(run_dir) >= 3, said, "three steps")
            ours = {process.pid for process in _joins()}
            assert ours
            run.kill()
            run.wait()
            eventually(lambda: not ours & {process.pid for process in _joins()}, lambda: f"{ours} to end", PATIENCE_S)
        finally:
            run.kill()
            run.wait()


def _start(folder: Path, run_dir: Path, nodes: Nodes, console: object, *, steps: int) -> subprocess.Popen[bytes]:
    file = folder / "topology.toml"
    file.write_text(TOPOLOGY.replace("STEPS", str(steps)).replace("RECORD", str(folder / "record")))
    command = [sys.executable, str(ROOT / "launch" / "cluster.py"), "--config", str(file), "--run-dir", str(run_dir)]
    return subprocess.Popen(command, env=nodes.environment, stdout=console, stderr=subprocess.STDOUT)  # type: ignore[arg-type]


def _until(run: subprocess.Popen[bytes], condition: object, said: Path, what: str) -> str:
    assert callable(condition)
    eventually(
        lambda: bool(condition()) or run.poll() is not None, lambda: f"{what}:\n{said.read_text()}", RUN_PATIENCE_S
    )
    assert run.poll() is None, said.read_text()
    return said.read_text()


def _scale(run_dir: Path, *words: str) -> None:
    command = [sys.executable, str(ROOT / "launch" / "cluster.py"), "scale", str(run_dir), *words]
    subprocess.run(command, check=True, timeout=PATIENCE_S)


def _steps(run_dir: Path) -> int:
    """From the metrics alone."""
    file = run_dir / "metrics.jsonl"
    rows = file.read_text().splitlines() if file.is_file() else []
    return sum(json.loads(row)["kind"] == "step" for row in rows if row.endswith("}"))


def _joins() -> list[psutil.Process]:
    """Joins that run on this machine under Ray, and their workers."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        if "launch.ray.joined" in (process.info["cmdline"] or []):
            found += [process, *process.children(recursive=True)]
    return found
