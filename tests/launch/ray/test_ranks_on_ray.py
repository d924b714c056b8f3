"""A learner of two ranks on two nodes of a real Ray cluster, which exchange gradients by gloo. The second node dies,
another comes, and both ranks go on together from the checkpoint."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from stillhouse.tools.audit.run import audit
from tests.launch.ray.nodes import ray_nodes, raylet_of
from tests.launch.ray.ray_run import ray_run
from tests.patience import RUN_PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray (make ray)"),
]
STEPS = 16
TOPOLOGY = f"""\
steps = {STEPS}
actors = 1
teachers = 1
learner = {{ ranks = 2, hosts = 2, lr = 3e-4, eval_every = 0, checkpoint_every = 3, record = "RECORD" }}
weights = {{ allow_plain_network = true }}
buffer = {{ batch_rollouts = 16, peer_timeout_s = 3.0 }}
launch = {{ backend = "ray", status = "plain", threads_per_worker = 1 }}
cluster = {{ learner = {{ cpus = 2, memory_gib = 1 }}, actors = {{ each = 1, cpus = 1, memory_gib = 1 }} }}
"""


def test_ranks_on_two_nodes_train_one_student_and_go_on_together_on_another_node(tmp_path: Path) -> None:
    with ray_nodes() as nodes, ray_run(tmp_path, TOPOLOGY, RAY_ADDRESS=nodes.address) as run:
        run.until(lambda: len(run.steps()) >= 4, "four steps")
        text = run.text()
        assert "1 teacher, 1 actor, 1 further rank on 2 hosts of Ray, max staleness" in text, text
        joins = nodes.joins()
        assert set(joins) == {"ranks-0", "actors-0"}
        there = raylet_of(joins["ranks-0"])
        assert there != raylet_of(joins["actors-0"]), "a host of the learner fills a node"
        nodes.order(f"remove {there}")
        run.until("ranks-0 (1 rank) is lost", "the loss of the node")
        nodes.order("add")
        run.until(lambda: "ranks-0" in nodes.joins(), "the rank on another node")
        assert raylet_of(nodes.joins()["ranks-0"]) not in (there, raylet_of(nodes.joins()["actors-0"]))
        assert run.process.wait(RUN_PATIENCE_S) == 0, run.text()
    summary = run.summary()
    assert summary["steps"] == STEPS and summary["tokens"]["balanced"], summary
    assert len({row["epoch"] for row in run.steps()}) >= 2, "both ranks began a new epoch"
    log = (run.folder / "joined" / "ranks-0" / "logs" / "learner-ranks-0-0.log").read_text()
    assert len(re.findall(r"learner-ranks-0-0 rank 1 of 2 starts", log)) >= 2, log
    report = audit(run.folder)
    assert report.clean, str(report)
