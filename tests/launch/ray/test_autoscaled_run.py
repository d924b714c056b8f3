"""A real run on Ray whose teacher is the limit: the run says so, a host with a teacher is added, and steps come faster.
The teacher sleeps for each item, so that its speed does not depend on the machine. The record is audited."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from stillhouse.tools.audit.run import audit
from tests.integration import slow_teacher
from tests.launch.ray.nodes import ROOT, ray_nodes
from tests.launch.ray.ray_run import SMALL, ray_run
from tests.patience import RUN_PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray (make ray)"),
]
ITEM_S = 0.3
"""16 rollouts take 4.8 s of one teacher, and everything else of a step far less."""
STEPS_AFTER = 12
TOPOLOGY = """\
buffer = { batch_rollouts = 16, max_staleness = 1 }
actor = { segment_tokens = 256 }
cluster = { learner = { cpus = 1, memory_gib = 1 }, teachers = { each = 1, most = 2, cpus = 1, memory_gib = 1 } }
"""


def test_a_run_that_waits_for_its_slow_teacher_gets_another_one_and_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = f'teacher = {{ engine = "{slow_teacher.__name__}:PROVIDER" }}\n'
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv(slow_teacher.ITEM_S, str(ITEM_S))  # for the nodes, too
    topology = SMALL + TOPOLOGY + engine
    with ray_nodes() as nodes, ray_run(tmp_path, topology, RAY_ADDRESS=nodes.address) as run:
        text = run.until("joined the run: teacher-teachers-1-0", "a second teacher")
        assert "teacher-bound" in text, text
        assert "autoscaling: added teachers: the learner waits" in text, text
        joined = len(run.steps())
        run.until(lambda: len(run.steps()) >= joined + STEPS_AFTER, "more steps")
        run.process.terminate()
        assert run.process.wait(RUN_PATIENCE_S) == 143, run.text()
    steps = run.steps()
    before, after = steps[:joined], steps[joined + 2 :]
    assert before[-1]["bound/teachers"] > 0.5, "the figures say why"
    gained = step_s(before) / step_s(after)
    print(f"steps come {gained:.2f} times as fast with the second teacher")
    assert gained > 1.4
    assert {row["teachers/alive"] for row in (before[-3], after[-1])} == {1, 2}
    counted = {"scaling/added_teachers_total": 1}
    assert {tag: n for tag, n in after[0].items() if tag.startswith("scaling/")} == counted
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["scaling"]["added_teachers"] == 1
    assert "\nautoscaling  " in run.text(), "a row of the final table"
    scored = {name: worker["tokens"] for name, worker in summary["workers"].items() if name.startswith("teacher")}
    assert scored.keys() == {"teacher-teachers-0-0", "teacher-teachers-1-0"} and min(scored.values()) > 0, scored
    report = audit(run.folder)
    assert report.clean, str(report)


def step_s(steps: list[dict[str, Any]]) -> float:
    """Mean time of a step; they come by twos, as two batches are scored together."""
    return (steps[-1]["unix_s"] - steps[0]["unix_s"]) / (len(steps) - 1)
