"""A rendered task of SkyPilot: every node has its part, and SkyPilot's own parser reads it, where it is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.launch.render.test_slurm import render

TOPOLOGY = """\
actors = 5
teachers = 2
weights = { allow_plain_network = true }
cluster = { learner = { gpus = 4 }, actors = { each = 2, gpus = 1, cpus = 32 }, teachers = { each = 2 } }
"""
NODES = 5


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "topology.toml").write_text(TOPOLOGY)
    words = ("skypilot", "--name", "big", "--volume", "runs", "--accelerator", "H100")
    return render(*words, "--config", str(tmp_path / "topology.toml"), "--steps", "40")


def test_every_node_has_the_resources_of_the_largest_group(task: str) -> None:
    described = yaml.safe_load(task)
    assert described["num_nodes"] == NODES
    assert described["resources"] == {"cpus": "32+", "memory": "32+", "accelerators": {"H100": 4}}


def test_each_node_starts_its_part(task: str, tmp_path: Path) -> None:
    """The script runs with a `stillhouse` that says how it was called, and a join that ends at once."""
    script = yaml.safe_load(task)["run"].replace("/runs/", f"{tmp_path}/")
    (tmp_path / "bin").mkdir()
    called = tmp_path / "bin" / "stillhouse"
    called.write_text('#!/bin/bash\necho "$@"\n')
    called.chmod(0o755)
    said: list[str] = []
    (tmp_path / "big").mkdir()
    for rank in range(NODES):
        environment = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
        environment["PATH"] = f"{called.parent}:/usr/bin:/bin"
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.strip())
        (tmp_path / "big" / "run.json").touch()
    run, *joins = said
    assert (
        "--buffer.bind tcp://10.0.0.1:5555 --weights.host 10.0.0.1 --steps 40 --backend local --actors 0 --teachers 0"
        in run
    )
    assert [join.removeprefix(f"join {tmp_path}/big ").rpartition(" --name-prefix ")[0] for join in joins] == [
        "--teachers 2",
        "--actors 2",
        "--actors 2",
        "--actors 1",
    ]
    assert len(set(joins)) == len(joins), "each node names its workers"


def test_skypilot_reads_it(task: str, tmp_path: Path) -> None:
    sky = pytest.importorskip("sky")
    (tmp_path / "task.yaml").write_text(task)
    read = sky.Task.from_yaml(str(tmp_path / "task.yaml"))
    assert read.num_nodes == NODES
