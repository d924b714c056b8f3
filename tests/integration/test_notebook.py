"""Whole runs from Python: watched to their end, stopped in order, left by a killed parent, and the example notebook."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stillhouse import Run, RunFailed
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "actors": 1,
    "learner.lr": 2e-4,
    "buffer.batch_rollouts": 16,
    "actor.segment_tokens": 16,
    "learner.tasks": {"group_size": 4, "eval_greedy": 8, "eval_sampled": 8},
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield


def test_a_run_is_watched_to_its_end_then_evaluated_and_its_rollouts_are_opened() -> None:
    pytest.importorskip("datasets")
    run = Run(SMALL, steps=4, name="first", record=True).start(PATIENCE_S)
    assert run.running and run.state == "running"
    rows = list(run.watch(every_s=0.1))
    assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 2, 3, 4]
    summary = run.wait()
    assert (summary.state, summary.steps, run.state, run.running) == ("finished", 4, "finished", False)
    again = Run.open("first")
    assert list(again.watch()) == rows and [row["step"] for row in again.metrics()] == [row["step"] for row in rows]

    table: Any = again.rollouts()
    # Counted by the buffer, whose ledger shares no code with the record's reader.
    assert sum(table["trained_tokens"]) == summary.tokens.trained > 0
    assert len(set(table["rollout_id"])) == len(table)
    for row in table:
        n = len(row["token_ids"])
        assert len(row["sampled"]) == len(row["student_logprobs"]) == n
        assert [value is not None for value in row["student_logprobs"]] == row["sampled"]
        assert sum(row["sampled"]) == row["sampled_tokens"] > 0
        assert [len(logprobs) for logprobs in row["teacher_logprobs"]] == [n] * len(row["teachers"])
    assert all("user" in row["prompt"] and row["response"] for row in table)

    last = [row for row in rows if row["kind"] == "eval"][-1]
    figures = again.evaluate()
    for name in ("accuracy_greedy", "accuracy_sampled", "mean_length_greedy", "mean_length_sampled", "n_sampled"):
        assert figures[name] == pytest.approx(last[f"eval/{name}"]), name
    more = again.evaluate({"learner.tasks.eval_sampled": 12})
    assert (more["n_sampled"], more["missing"]) == (12, 0)


def test_stopping_a_run_leaves_a_checkpoint_from_which_it_goes_on() -> None:
    with Run(SMALL, steps=1000, name="long") as run:
        for row in run.watch(every_s=0.1):
            if row["kind"] == "step" and row["step"] >= 2:
                break
        assert run.running, "leaving the loop does not stop the run"
    summary = run.stop()
    assert summary is not None and summary.state == "stopped" and summary.checkpoint is not None
    assert run.wait().steps == summary.steps
    resumed = Run(steps=summary.steps + 1, name="long", resume=True).start(PATIENCE_S)
    assert [row["step"] for row in resumed.watch() if row["kind"] == "step"] == [summary.steps + 1]


def test_a_run_that_fails_says_why() -> None:
    broken = Path("broken.py")
    broken.write_text("async def play(ctx, task):\n    raise RuntimeError('the judge is not here')\n", encoding="utf-8")
    environment = {"learner.tasks.env": "broken:play", "actor.max_failures_in_a_row": 2, "launch.max_restarts": 0}
    os.environ["PYTHONPATH"] = str(Path.cwd())
    try:
        run = Run(SMALL | {"learner.tasks": {"group_size": 4}} | environment, steps=3, name="bad").start(PATIENCE_S)
        with pytest.raises(RunFailed, match="the judge is not here"):
            list(run.watch())
    finally:
        del os.environ["PYTHONPATH"]
    assert run.state == "failed"


def test_a_run_whose_notebook_is_killed_stops_in_order_and_leaves_no_process() -> None:
    code = (
        "import os, json, sys; from stillhouse import Run\n"
        "run = Run(json.loads(sys.argv[1]), steps=1000, name='left').start()\n"
        "for row in run.watch(every_s=0.1):\n"
        "    if row['kind'] == 'step': os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", code, json.dumps(SMALL)], env=environment)
    assert parent.wait(RUN_PATIENCE_S) == -signal.SIGKILL
    left = Run.open("left")
    launcher = json.loads((left.path / "run.json").read_text())["launcher_pid"]
    with_it = [process.pid for process in psutil.Process(launcher).children(recursive=True)]
    assert with_it
    eventually(lambda: not psutil.pid_exists(launcher), "the launcher to end", RUN_PATIENCE_S)
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in with_it), "its processes to end")
    summary = left.wait()
    assert (left.state, summary.state) == ("stopped", "stopped") and summary.checkpoint is not None


def test_the_example_notebook_runs_in_a_real_kernel(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    file = shutil.copy(ROOT / "examples" / "notebook.ipynb", tmp_path)
    book: Any = nbformat.read(file, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "the example is committed without outputs"
    client = nbclient.NotebookClient(
        book, timeout=int(RUN_PATIENCE_S), kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    said = ["".join(part.get("text", "") for part in cell.outputs) for cell in book.cells if cell.cell_type == "code"]
    assert "step 8: reverse KL" in said[1] and "evaluation at step 8: accuracy" in said[1]
    assert said[2].startswith("finished 8 ")
    (figures,) = book.cells[-1].outputs
    assert "'n_sampled': 128" in figures["data"]["text/plain"]
