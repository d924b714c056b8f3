"""Stages in one file: killed in each and resumed, every stage is trained as if nothing had happened, by the audit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from stillhouse.builtin import STUDENT_DIR
from stillhouse.tools.audit.run import main as audit
from stillhouse.tools.audit.stages import audit_stages
from stillhouse.tools.export.command import export
from tests.integration.conftest import ROOT, alive
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, Limit

SHARED = """
actors = 1
[buffer]
batch_rollouts = 8
[learner]
eval_every = 0
checkpoint_every = 2
record = "{run}"
[learner.tasks]
eval_greedy = 8
eval_sampled = 8
[launch]
status = "plain"
"""
THREE = f"""{SHARED}
[[stage]]
name = "warmup"
text = "teacher"
epochs = 2
steps = 4
[[stage]]
name = "distil"
steps = 8
[[stage]]
name = "reward"
steps = 8
learner.objective = {{ coef = 0.0, advantage = "grpo" }}
buffer.release = "rollout"
"""


@contextmanager
def started(run: Path, *words: str) -> Generator[subprocess.Popen[bytes]]:
    with run.with_suffix(".out").open("ab") as output:
        command = [sys.executable, str(ROOT / "launch" / "cluster.py"), f"--run-dir={run}", *words]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ})
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE_S)


def finish(run: Path, *words: str) -> str:
    with started(run, *words) as process:
        assert process.wait(3 * RUN_PATIENCE_S) == 0, run.with_suffix(".out").read_text()
    return run.with_suffix(".out").read_text()


def steps_of(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return [row["step"] for row in rows if row["kind"] == "step"]


def kill_at(process: subprocess.Popen[bytes], run: Path, folder: Path, step: int) -> None:
    """SIGKILL of the launcher after this step of a stage. Everything below it ends too."""
    limit = Limit(3 * RUN_PATIENCE_S)
    while step not in steps_of(folder):
        assert process.poll() is None and not limit.passed, run.with_suffix(".out").read_text()
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)
    psutil.wait_procs(family, PATIENCE_S)
    assert family and not alive(family)


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def test_killed_in_each_of_three_stages_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, file = tmp_path / "run", tmp_path / "three.toml"
    file.write_text(THREE)
    for n, (folder, words) in enumerate(
        {"1-warmup": ["--config", str(file)], "2-distil": ["--resume"], "3-reward": ["--resume"]}.items()
    ):
        with started(run, *words) as process:
            kill_at(process, run, run / "stages" / folder, 3 + n)
    finish(run, "--resume")

    account = summary(run)
    assert account["ok"]
    assert [(one["name"], one["state"], one["steps"]) for one in account["stages"]] == [
        *(("warmup", "done", 8), ("distil", "done", 8), ("reward", "done", 8)),
    ]
    report = audit_stages(run)
    assert report.clean, str(report)
    assert list(report.stages) == ["warmup, its text", "warmup", "distil", "reward"]
    assert all(max(steps_of(run / "stages" / one)) == 8 for one in ("1-warmup", "2-distil", "3-reward"))
    assert any(steps_of(run / "stages" / "3-reward").count(step) > 1 for step in range(1, 9)) or report.clean
    assert audit([str(run)]) == 0 and "all stages: clean" in capsys.readouterr().out
    to = tmp_path / "student"
    export(str(run), str(to))
    weights = run / account["stages"][-1]["student"] / "model.safetensors"
    assert (to / "model.safetensors").read_bytes() == weights.read_bytes()
    assert weights.read_bytes() != (STUDENT_DIR / "model.safetensors").read_bytes()

    # What the audit is there to find: another student than the one handed over, and a step trained twice.
    state = json.loads((run / "stages.json").read_text())
    manifest = run / state["stages"][0]["checkpoint"] / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b" ")
    metrics = run / "stages" / "1-warmup" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:
        row["train/tokens"] = row.get("train/tokens", 0) + (row["kind"] == "step" and row["step"] == 8)
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wrong = audit_stages(run)
    assert "is not the one that it began with" in str(wrong) and "more often than the record" in str(wrong)
    assert audit([str(run)]) == 4


def test_pairs_by_adapters_and_then_distillation_from_the_first_stage(tmp_path: Path) -> None:
    """SFT on given rows with LoRA; its merged student is the next stage's teacher."""
    run, file, rows = tmp_path / "run", tmp_path / "two.toml", tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"{n}+1=", "response": f"1+{n}+0={n + 1} #{n + 1}"} for n in range(2, 9)] * 6
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    file.write_text(f"""{SHARED}
[[stage]]
name = "pairs"
text = "{rows}"
learner.lora.rank = 2
[[stage]]
name = "distil"
steps = 2
models = {{ student = "builtin", teacher = "stage:pairs" }}
""")
    printed = finish(run, "--config", str(file))
    account = summary(run)
    assert [(one["name"], one["steps"]) for one in account["stages"]] == [("pairs", 6), ("distil", 2)]
    assert account["stages"][1]["models"] == {"models.teacher": "stages/1-pairs-student"}
    assert audit_stages(run).clean
    assert "stage 2 of 2, distil" in printed
    again = finish(run, "--resume")  # nothing is left to do
    assert again.count("stage 1 of 2") == 1 and summary(run)["ok"]
