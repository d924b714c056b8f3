"""What a run reserves on a real Ray cluster before it starts: where its hosts land, what is said while there is no
room, and what is refused. The GPUs of the nodes do not exist: Ray counts what a node declares."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.ray.nodes import PLAIN, ROOT, Nodes, ray_nodes
from tests.launch.ray.ray_run import SMALL, ray_run
from tests.patience import PATIENCE_S, RUN_PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray (make ray)"),
]
GPUS = {"num_cpus": 4, "num_gpus": 2}
RESERVES = """
import json, sys
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.ray.cluster import RayCluster
from stillhouse.launch.topology import host_groups

groups = host_groups(build(RunConfig, json.loads(sys.argv[1])))
cluster = RayCluster.connect()
cluster.reserve(groups, 60.0, print)
import ray
from ray.util.placement_group import placement_group_table
at = {node["NodeID"]: node["Resources"].get("GPU", 0) for node in ray.nodes()}
nodes = {}
for table in placement_group_table().values():
    for bundle, node in table["bundles_to_node_id"].items():
        nodes.setdefault(node, []).append(table["bundles"][bundle])
print(json.dumps({"here": ray.get_runtime_context().get_node_id(), "nodes": nodes, "gpus": at}))
cluster.reservation.release("actors-0")
import time
for _ in range(100):
    if ray.available_resources().get("GPU", 0) == 2:
        break
    time.sleep(0.1)
print(json.dumps(ray.available_resources()))
"""


def reserved(nodes: Nodes, topology: dict[str, Any]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", RESERVES, json.dumps(topology)],
        env={**os.environ, "RAY_ADDRESS": nodes.address},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_hosts_land_where_they_fit_one_beside_the_other_and_are_given_back_one_by_one() -> None:
    learner = {"cpus": 1, "memory_gib": 1}
    topology = {
        "actors": 4,
        "teachers": 2,
        "learner": {"ranks": 2, "hosts": 2},
        "weights": {"allow_plain_network": True},
        "cluster": {
            "learner": learner,
            "actors": {"each": 2, "cpus": 2, "gpus": 2, "memory_gib": 1},
            "teachers": {"each": 1, "cpus": 1, "memory_gib": 1},
        },
    }
    with ray_nodes(GPUS, GPUS) as nodes:
        before, after = reserved(nodes, topology)
    here = before["here"]
    assert before["gpus"][here] == 0
    assert [bundle["CPU"] for bundle in before["nodes"][here]].count(1.0) >= 2, "the learner's hosts are together"
    with_gpus = {node: [one for one in bundles if one.get("GPU")] for node, bundles in before["nodes"].items()}
    assert sorted(len(bundles) for bundles in with_gpus.values()) == [0, 1, 1], "a host of actors on each GPU node"
    assert all(one["GPU"] == 2 and one["CPU"] == 2 for bundles in with_gpus.values() for one in bundles)
    placed = [one for bundles in before["nodes"].values() for one in bundles]
    assert len(placed) == 6, "the run, its further host, two hosts of teachers, two of actors"
    assert after["GPU"] == 2, "what one host had is free again"


CHECKED = """\
steps = 5
actors = 2
launch = { backend = "ray", status = "plain", ready_timeout_s = LIMIT }
cluster = { learner = { cpus = 1, memory_gib = 1 }, actors = { each = 1, cpus = 2, gpus = 2, memory_gib = 1 } }
"""


def test_a_cluster_that_is_too_small_is_refused_by_the_check_and_after_a_wait_by_the_start(tmp_path: Path) -> None:
    topology = CHECKED.replace("LIMIT", "8")
    with ray_nodes(GPUS) as nodes:
        with ray_run(tmp_path, topology, "--check", RAY_ADDRESS=nodes.address) as run:
            assert run.process.wait(PATIENCE_S) == 2, run.text()
            said = (
                f"the Ray cluster at {nodes.address} is too small: it has no room for 1 of 2 hosts of actors (2 CPUs, "
                "2 GPUs and 1 GiB each). It has 1 node with 2 CPUs, 0 GPUs and 4 GiB, 1 node with 4 CPUs, 2 GPUs and "
                "4 GiB; add nodes"
            )
            assert said in run.text(), run.text()
        with ray_run(tmp_path, topology, RAY_ADDRESS=nodes.address) as run:
            assert run.process.wait(PATIENCE_S) == 2, run.text()
            waits, refused = run.text().splitlines()
            assert "Ray: waiting for 1 of 2 hosts of actors (2 CPUs, 2 GPUs and 1 GiB each); the cluster has" in waits
            assert "too few even when nothing else runs. At most 8 s (launch.ready_timeout_s)" in waits
            assert "had no room for 1 of 2 hosts of actors" in refused and "within 8 s" in refused
            assert not run.folder.exists(), "nothing was started"
        nodes.order("add")
        with ray_run(tmp_path, topology, "--check", RAY_ADDRESS=nodes.address) as run:
            assert run.process.wait(PATIENCE_S) == 0, run.text()
            assert "3 hosts of this run fit" in run.text() and "(this node): the run itself" in run.text()


def test_a_run_that_waits_for_a_node_starts_when_it_comes(tmp_path: Path) -> None:
    hosts = "cluster = { learner = { cpus = 1, memory_gib = 1 }, actors = { each = 1, cpus = 2, memory_gib = 1 } }\n"
    with ray_nodes(PLAIN) as nodes, ray_run(tmp_path, SMALL + hosts, "--actors", "2", RAY_ADDRESS=nodes.address) as run:
        run.until("Ray: waiting for 1 of 2 hosts of actors (2 CPUs, 0 GPUs and 1 GiB each)", "the wait for a node")
        assert not run.folder.exists(), "nothing is started before all have room"
        nodes.order("add")
        run.until(lambda: len(run.steps()) >= 2, "steps")
        assert run.text().count("waiting for") == 1


def test_a_start_on_this_machine_alone_is_refused_at_once_if_it_is_too_small(tmp_path: Path) -> None:
    topology = CHECKED.replace("LIMIT", "600")
    with ray_run(tmp_path, topology) as run:
        assert run.process.wait(RUN_PATIENCE_S) == 2, run.text()
        assert "the Ray cluster that is started on this machine is too small: it has no room for" in run.text()
    with ray_run(tmp_path, topology.replace("cpus = 2,", "cpus = 1,"), "--check", "--gpus", "2") as run:
        assert run.process.wait(RUN_PATIENCE_S) == 2, run.text()
        assert "1 of 2 hosts of actors (1 CPU, 2 GPUs" in run.text(), "two pretended GPUs are enough for one"
