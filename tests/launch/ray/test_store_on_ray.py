"""A run on a real Ray cluster with a store behind the S3 API: its learner's second rank has no folder
of the run, its actor fetches weights from the store, and it goes on in an empty folder.

Access to the store goes with the messages of Ray: the nodes' own environment has none. What is in the store is read by
boto3."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import psutil
import pytest

from stillhouse.tools.audit.run import audit
from tests.launch.ray.nodes import ray_nodes, raylet_of
from tests.launch.ray.ray_run import ray_run
from tests.patience import RUN_PATIENCE_S
from tests.s3_server import BUCKET, KEYS, environment_of, object_names, s3_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray (make ray)"),
]
STEPS_AFTER = 30
TOPOLOGY = """\
steps = 100000
teachers = 1
store = "STORE"
learner = { ranks = 2, hosts = 2, lr = 3e-4, eval_every = 0, checkpoint_every = 3, record = "RECORD" }
weights = { allow_plain_network = true, transport = "folder" }
buffer = { batch_rollouts = 16, peer_timeout_s = 3.0 }
launch = { backend = "ray", status = "plain", threads_per_worker = 1 }
cluster = { learner = { cpus = 1, memory_gib = 1 }, actors = { each = 1, cpus = 1, memory_gib = 1 } }
"""


def test_a_run_with_a_store_behind_the_s3_api(tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/big"
    topology = TOPOLOGY.replace("STORE", url)
    with s3_server() as server, ray_nodes() as nodes:
        access = environment_of(server.url)
        with ray_run(tmp_path, topology, "--actors=2", RAY_ADDRESS=nodes.address, **access) as run:
            run.until(lambda: len(run.steps()) >= 4, "four steps")
            rank = nodes.joins()["ranks-0"]
            assert not any(str(run.folder) in word for word in rank.cmdline()), "it has no folder of the run"
            shown = [word for join in nodes.joins().values() for word in join.cmdline()]
            assert not [word for word in shown if KEYS["AWS_SECRET_ACCESS_KEY"] in word], "no key in a command"
            inherited = psutil.Process(raylet_of(rank)).environ()
            assert not inherited.keys() & KEYS.keys(), "the node itself has no access"
            run.stop()
            stopped_at = len(run.steps())
        names = [name.removeprefix("big/") for name in object_names(server)]
        saved = sorted(
            int(name.split("/")[1].split("_")[1])
            for name in names
            if name.endswith("manifest.json") and name.startswith("checkpoints/")
        )
        assert saved[-1] == stopped_at, "the last checkpoint is there, too"
        assert not [name for name in names if "key" in name], "no keys"
        shutil.rmtree(run.folder)
        steps = stopped_at + STEPS_AFTER
        words = ("--resume", "--actors=2", f"--store={url}", f"--steps={steps}")
        with ray_run(tmp_path, topology, *words, RAY_ADDRESS=nodes.address, **access) as again:
            assert again.process.wait(RUN_PATIENCE_S) == 0, again.text()
    assert "1 teacher, 2 actors, 1 further rank on 3 hosts of Ray" in again.text(), again.text()
    assert [row["step"] for row in again.steps()] == list(range(stopped_at + 1, steps + 1))
    wrote = {name for name, worker in again.summary()["workers"].items() if name.startswith("actor") and worker["done"]}
    assert wrote == {"actor-actors-0-0", "actor-actors-1-0"}
    report = audit(again.folder)
    assert report.clean, str(report)
