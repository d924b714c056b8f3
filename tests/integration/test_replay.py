"""Record and replay of real runs, with teacher-written rollouts mixed in: the replay makes the very same updates."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stillhouse.replay import command as replay
from tests.integration.conftest import ROOT, SMALL, Launched
from tests.patience import RUN_PATIENCE_S


def lines(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "step"]


def write(*words: str) -> None:
    """In a process of its own: a launcher ends all that it finds below itself, the tests' own helpers too."""
    done = subprocess.run(
        [sys.executable, "-m", "stillhouse.launch.cluster", "write", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_replay_makes_the_updates_of_the_run_bit_for_bit(
    launch: Callable[..., Launched], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run has rollouts in it that the teacher wrote, so that it needs all of: written file, mixing, recording."""
    written, recorded = tmp_path / "teacher.record", tmp_path / "run.record"
    small = [*SMALL, "--actors=1", "--launch.status=off"]
    write(str(written), f"--run-dir={tmp_path / 'writing'}", "--steps=3", *small)
    run = launch(
        "--actors=1", "--steps=5", "--learner.eval_every=0", "--record", str(recorded), "--offline", str(written),
        "--lambda=0.6",
    )  # fmt: skip
    assert run.wait() == 0, run.text()
    summary = run.summary()
    theirs, own = summary["tokens_trained_offline"], summary["tokens"]["trained"]
    assert summary["tokens"]["balanced"] and summary["ok"]
    assert abs(theirs - own * 0.4 / 0.6) <= 96 / 2  # half of the longest rollout
    assert theirs == sum(row["train/offline_tokens"] for row in lines(run.run_dir)) > 0

    again = tmp_path / "again"
    assert replay.main([str(recorded), f"--run-dir={again}"]) == 0
    weights = Path("checkpoints") / "step_000005" / "model.safetensors"
    assert (again / weights).read_bytes() == (run.run_dir / weights).read_bytes()
    for ours, recorded_row in zip(lines(again), lines(run.run_dir), strict=True):
        for name, value in recorded_row.items():
            if name.startswith("train/") and name != "train/step_s":
                assert ours[name] == value, name

    other = tmp_path / "other"
    assert replay.main([str(recorded), f"--run-dir={other}", "--learner.lr=1e-3"]) == 0
    assert (other / weights).read_bytes() != (run.run_dir / weights).read_bytes()

    off_policy = tmp_path / "off_policy"
    flags = ["--epochs=5", "--order=shuffled", "--learner.eval_every=15", "--learner.warmup_steps=0"]
    flags += ["--learner.tasks.eval_greedy=8", "--learner.tasks.eval_sampled=8"]
    assert replay.main([str(written), f"--run-dir={off_policy}", *flags]) == 0
    account = json.loads((off_policy / "replay.json").read_text())
    assert (account["steps"], account["writer"], account["exit_code"]) == (15, "teacher", 0)
    assert [point["step"] for point in account["eval"]] == [0, 15]
    assert all(0 <= point["accuracy_sampled"] <= 1 and point["reverse_kl"] > 0 for point in account["eval"])
    logprobs = [row["train/logprob"] for row in lines(off_policy)]
    assert sum(logprobs[-3:]) > sum(logprobs[:3])  # the last epoch finds the same three batches likelier
    assert "divergence seq_kd, importance none" in capfd.readouterr().out


def test_the_teachers_text_with_its_top_k_sets_is_distilled_off_policy(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """One file: for its logits, for plain cross-entropy by the recipe, and beside the student's own text."""
    written, recipes = tmp_path / "teacher.record", ROOT / "examples" / "recipes"
    words = [*SMALL, "--actors=1", "--launch.status=off", "--teacher.top_k=256", "--steps=2"]
    write(str(written), f"--run-dir={tmp_path / 'writing'}", *words)

    means: dict[str, list[float]] = {}
    for name, flags in {
        "logit": ["--learner.objective.divergence=forward_kl", "--learner.eval_every=0", "--learner.warmup_steps=0"],
        "seq_kd": [f"--config={recipes / 'seq_kd.toml'}", "--learner.eval_every=0", "--learner.warmup_steps=0"],
    }.items():
        assert replay.main([str(written), f"--run-dir={tmp_path / name}", "--epochs=5", *flags]) == 0
        means[name] = [row["train/divergence"] for row in lines(tmp_path / name)]
    assert all(0 < value < 5 for value in means["logit"]) and sum(means["logit"][-2:]) < sum(means["logit"][:2])
    assert set(means["seq_kd"]) == {-1.0}

    run = launch(
        "--actors=1", "--config", str(recipes / "off_policy.toml"), "--steps=2", "--learner.eval_every=0",
        "--offline", str(written), "--learner.offline.divergence=forward_kl",
    )  # fmt: skip
    assert run.wait() == 0, run.text()
    rows = lines(run.run_dir)
    assert len(rows) == 2 and all(row["train/offline_tokens"] > 0 and row["train/grad_norm"] > 0 for row in rows)
