"""Whole runs whose versions are memory that the learner shares (weights.transport = ipc), with processes that die in
the middle of a version: the run goes on, and no segment is left."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from stillhouse.sglang_server.servers import DEFAULT_PYTHON
from stillhouse.weights.shared_memory import SEGMENTS
from tests.integration.conftest import ROOT, Launched, alive
from tests.integration.test_sglang_run import family, leader_at, servers
from tests.integration.test_whole_run import assert_balanced
from tests.patience import RUN_PATIENCE_S, eventually
from tests.sim.chaos.traps import Traps

Launch = Callable[..., Launched]
BY_IPC: Final = (
    *("--device=cpu", "--weights.transport=ipc", "--weights.bucket_bytes=65536", "--max-staleness=1"),
    *("--learner.eval_every=0", "--teachers=1"),
)
"""A version of the built-in student has 13 buckets."""
SHARED: Final = "stillhouse.weights.shared_memory:export"
OPENED: Final = "stillhouse.weights.shared_memory:open_memory"
LOADED: Final = "sglang.srt.weight_sync.tensor_bucket:FlattenedTensorBucket.reconstruct_tensors"
"""In the server's scheduler, which has opened a bucket and not yet copied it."""


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traps:
    traps = Traps(tmp_path / "traps", (SHARED, OPENED, LOADED))
    for name, value in traps.environment(str(ROOT)).items():
        monkeypatch.setenv(name, value)
    return traps


def segments(run: Launched) -> list[Path]:
    """Those of every learner that this run had."""
    logs = [log.read_text() for log in (run.run_dir / "logs").glob("learner-*.log")]
    pids = [pid for log in logs for pid in re.findall(r" starts, pid (\d+)", log)]
    return [segment for pid in pids for segment in SEGMENTS.glob(f"torch_{pid}_*")]


def next_learner(run: Launched, former: int) -> int:
    def pid() -> int:
        (learner,) = run.workers("learner")
        return learner.pid

    n = len(run.steps())
    run.until(lambda: len(run.steps()) > n and pid() != former, "a step of the next learner")
    return pid()


def expect_a_good_end(run: Launched, steps: int) -> None:
    assert run.wait() == 0, run.text()
    assert "weights by memory that the learner shares" in run.text()
    summary = run.summary()
    assert_balanced(summary)
    assert summary["steps"] == steps
    assert run.expect_clean_audit().clean
    eventually(lambda: not segments(run), "segments are removed")


def test_actors_and_learners_killed_in_the_middle_of_a_version(launch: Launch, traps: Traps) -> None:
    run = launch(*BY_IPC, "--actors=2", "--steps=14")
    run.until(lambda: len(run.steps()) >= 2, "step 2")
    first = run.workers("learner")[0].pid
    assert segments(run), "the weights are in shared memory"
    assert traps.catch(SHARED, "after", first, n=5, timeout_s=RUN_PATIENCE_S)
    second = next_learner(run, first)
    actor = run.workers("actor")[0].pid
    assert traps.catch(OPENED, "before", actor, timeout_s=RUN_PATIENCE_S)
    actor = run.workers("actor")[1].pid
    assert traps.catch(OPENED, "after", actor, others=[second], timeout_s=RUN_PATIENCE_S)
    expect_a_good_end(run, 14)
    assert {row["epoch"] for row in run.steps()} >= {0, 1, 2}


@pytest.mark.skipif(not DEFAULT_PYTHON.exists(), reason="no .venv-sglang: make sglang-cpu")
def test_a_server_and_then_the_learner_killed_in_the_middle_of_a_version(launch: Launch, traps: Traps) -> None:
    run = launch(*BY_IPC, "--actor.engine=sglang", "--actors=1", "--steps=10")
    run.until(lambda: len(run.steps()) >= 2, "step 2")
    server = leader_at(servers(run, "actor-0")["url"])
    (scheduler,) = [child for child in server.children() if "scheduler" in " ".join(child.cmdline())]
    assert traps.catch(LOADED, "before", scheduler.pid, n=5, timeout_s=RUN_PATIENCE_S)
    n = len(run.steps())
    run.until(lambda: len(run.steps()) > n + 1, "steps with another server")
    assert traps.catch(SHARED, "after", run.workers("learner")[0].pid, timeout_s=RUN_PATIENCE_S)
    processes = family(run)
    expect_a_good_end(run, 10)
    eventually(lambda: not alive(processes), "all processes end")
    assert run.summary()["servers"]["server-actor-0"]["restarts"] == 1
