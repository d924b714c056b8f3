"""Commands of the pages that must run: the project's own, and a run on Ray. Which page has
which command, and what is only checked: tests/launch/test_typed_commands.py."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.integration.conftest import ROOT, Launched
from tests.integration.test_whole_run import assert_balanced
from tests.patience import RUN_PATIENCE_S

pytestmark = pytest.mark.slow
SHORT = ("--learner.eval_every=0", "--buffer.batch_rollouts=64", "--learner.tasks.group_size=8")
"""Batches of the default size: so many that each of 32 actors writes some."""


def test_the_projects_own_command_and_what_reads_its_run(launch: Callable[..., Launched]) -> None:
    """All 41 roles take part; the ready time and the peak memory are printed."""
    run = launch("--actors", "32", "--teachers", "8", "--steps=6", *SHORT)
    assert run.wait() == 0, run.text()
    summary = run.summary()
    assert_balanced(summary)
    workers = summary["workers"]
    idle = [name for name, one in workers.items() if one["role"] in ("actor", "teacher") and not one["tokens"]]
    assert idle == []
    assert {role: sum(one["role"] == role for one in workers.values()) for role in ("actor", "teacher", "learner")} == {
        "actor": 32,
        "teacher": 8,
        "learner": 1,
    }
    printed = [line for line in run.text().splitlines() if "all ready after" in line or "peak memory  " in line]
    assert len(printed) == 2, run.text()
    print(*printed, sep="\n")
    assert 0 < summary["peak_memory_bytes"] < 8 * 2**30
    runs = run.run_dir.parent / "runs"
    runs.mkdir()
    (runs / "latest").symlink_to(run.run_dir)
    for words in (("audit", str(run.run_dir)), ("view", str(run.run_dir)), ("view", "latest")):
        done = subprocess.run(
            [sys.executable, str(ROOT / "launch" / "cluster.py"), *words],
            cwd=run.run_dir.parent,
            capture_output=True,
            encoding="utf-8",
            timeout=RUN_PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray (make ray)")
def test_a_run_on_ray_on_this_machine(launch: Callable[..., Launched]) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"stillhouse (--backend ray --steps 20 .*)", page)
    run = launch(*command.split(), "--steps=2", "--learner.eval_every=0")
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    assert "joined 8 actors" in " ".join(run.text().split())
