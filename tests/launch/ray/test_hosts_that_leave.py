"""A real run on Ray with more teachers than it needs gives them back: one that the autoscaler removes, one that the
user sends away, and one that hangs and is killed. The run's actor sleeps, so that it is the limit on any machine.

What is there is read from the processes of this machine and from Ray's own count of what is free."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import psutil
import pytest

from stillhouse.tools.audit.run import audit
from tests.integration import slow_actor
from tests.launch.ray.nodes import ROOT, Nodes, alive, ray_nodes
from tests.launch.ray.ray_run import SMALL, RayRun, ray_run
from tests.patience import PATIENCE_S, eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray (make ray)"),
]
STEP_S = 0.05
STEPS_AFTER = 4
TOPOLOGY = f"""\
teacher = {{ drain_s = 2.0 }}
buffer = {{ batch_rollouts = 16, max_staleness = 1, peer_timeout_s = 3.0 }}
actor = {{ segment_tokens = 256, engine = "{slow_actor.__name__}:PROVIDER" }}
cluster = {{ learner = {{ cpus = 1, memory_gib = 1 }}, teachers = {{ each = 1, most = 4, cpus = 1, memory_gib = 1 }} }}
"""
FEWER = 'launch = { backend = "ray", status = "plain", threads_per_worker = 1, shutdown_grace_s = 2.0 }'


def test_a_run_that_does_not_wait_for_its_teachers_gives_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv(slow_actor.STEP_S, str(STEP_S))
    *lines, _ = SMALL.splitlines()
    topology = "\n".join([*lines, FEWER, TOPOLOGY])
    with ray_nodes() as nodes, ray_run(tmp_path, topology, "--teachers", "4", RAY_ADDRESS=nodes.address) as run:
        text = run.until("joined 4 teachers", "four teachers")
        assert "1 actor, 4 teachers on 4 hosts of Ray, max staleness" in text, text
        assert set(nodes.joins()) == {f"teachers-{n}" for n in range(4)}
        assert nodes.free("CPU") == 1, "six, without the run's own and four teachers'"

        text = run.until("teachers-3 (1 teacher) has left", "the teacher that the autoscaler removes")
        assert "Ray: autoscaling: removed teachers: teachers wait" in text and "; 3 would do" in text, text
        _expect(nodes, 3)

        frozen = _freeze(nodes.joins()["teachers-2"])
        run.scale("--teachers", "1")  # soon after a decision, so that the next one sees a single teacher
        run.until("teachers-1 (1 teacher) has left", "the teacher that the user sends away")
        run.until("Ray: teachers-2 (1 teacher) was asked to leave 32 s ago and is still there; Ray kills it", "its end")
        eventually(lambda: not any(map(alive, frozen)), lambda: f"{frozen} to end", PATIENCE_S)
        _expect(nodes, 1)
        removed_at = len(run.steps())
        run.until(lambda: len(run.steps()) >= removed_at + STEPS_AFTER, "more steps")
        run.stop()
    _expect_counts(run)
    report = audit(run.folder)
    assert report.clean, str(report)


def _freeze(join: psutil.Process) -> list[psutil.Process]:
    """The join, its workers, and the actor of Ray whose child it is."""
    actor = join.parent()
    assert actor is not None and actor.name().startswith("ray::"), actor
    processes = [actor, join, *join.children(recursive=True)]
    for process in processes:
        process.suspend()
    return processes


def _expect(nodes: Nodes, teachers: int) -> None:
    """So many hosts, and what the others had is free again."""
    eventually(lambda: len(nodes.joins()) == teachers, lambda: f"{nodes.joins()}", PATIENCE_S)
    eventually(lambda: nodes.free("CPU") == 5 - teachers, lambda: f"{nodes.order('free')}", PATIENCE_S)


def _expect_counts(run: RayRun) -> None:
    summary, steps = run.summary(), run.steps()
    counts = {what: n for what, n in summary["scaling"].items() if what not in ("kept", "no_figures")}
    assert counts == {"hosts_left": 2, "hosts_killed": 1, "removed_teachers": 1}
    assert {tag: n for tag, n in steps[-1].items() if tag.startswith("scaling/hosts")} == {
        "scaling/hosts_left_total": 2,
        "scaling/hosts_killed_total": 1,
    }
    assert "\nhosts of Ray  " in run.text() and "\nautoscaling  " in run.text(), "rows of the final table"
    there = [row["teachers/alive"] for row in steps]
    assert there[-1] == 1 and max(there) == 4, there
    after = there[there.index(4) :]
    assert sorted(after, reverse=True) == after, "none was added"
