"""A run on a real Ray cluster whose two pools of teachers have hosts of their own. A resumed run needs the
topology again."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from stillhouse.tools.audit.run import audit
from tests.launch.ray.nodes import ray_nodes
from tests.launch.ray.ray_run import RayRun, ray_run
from tests.patience import RUN_PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray (make ray)"),
]
STEPS_AFTER = 20
TOPOLOGY = """\
steps = 100000
actors = 1
pools = { plain = { count = 1 }, whole = { count = 2, top_k = 32 } }
learner = { lr = 3e-4, eval_every = 0, record = "RECORD", tasks = { routes = { plain = [], whole = [] } }, \
objective = { divergence = "k1", teacher_divergences = { whole = { name = "jsd", beta = 0.3 } } } }
buffer = { batch_rollouts = 16, peer_timeout_s = 3.0 }
launch = { backend = "ray", status = "plain", threads_per_worker = 1 }
cluster = { learner = { cpus = 1, memory_gib = 1 }, teachers = { each = 1, cpus = 1, memory_gib = 1 } }
"""


def test_pools_on_hosts_of_their_own_score_and_each_has_its_number_of_teachers(tmp_path: Path) -> None:
    with ray_nodes() as nodes:
        with ray_run(tmp_path, TOPOLOGY, RAY_ADDRESS=nodes.address) as run:
            text = run.until("joined 3 teachers", "three teachers")
            assert "1 actor, 3 teachers on 3 hosts of Ray, max staleness" in text, text
            assert set(nodes.joins()) == {"teachers-plain-0", "teachers-whole-0", "teachers-whole-1"}
            run.until(lambda: len(run.steps()) >= 2, "two steps")
            run.stop()
        words = ("--resume", f"--steps={len(run.steps()) + STEPS_AFTER}")
        with ray_run(tmp_path, "", *words, RAY_ADDRESS=nodes.address) as nameless:
            assert nameless.process.wait(RUN_PATIENCE_S) == 2 and "name the numbers again" in nameless.text()
        with ray_run(tmp_path, TOPOLOGY, *words, RAY_ADDRESS=nodes.address) as again:
            assert again.process.wait(RUN_PATIENCE_S) == 0, again.text()
    _expect_both_pools(again)
    report = audit(again.folder)
    assert report.clean, str(report)


def _expect_both_pools(run: RayRun) -> None:
    for row in run.steps():
        assert row["teachers/plain/token_share"] == row["teachers/whole/token_share"] == 1.0, row
    scored = {name: one["tokens"] for name, one in run.summary()["workers"].items() if one["role"] == "teacher"}
    assert (
        scored.keys() == {f"teacher-teachers-{host}-0" for host in ("plain-0", "whole-0", "whole-1")}
        and min(scored.values()) > 0
    )
