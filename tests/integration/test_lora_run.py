"""A run that trains adapters: actors sample from what the learner trains, and the merged student is left behind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from safetensors.numpy import load_file

from stillhouse.builtin import STUDENT_DIR
from tests.integration.conftest import Launched

LORA = ("--learner.lora.rank=8", "--learner.lora.alpha=16", "--learner.lr=5e-3", "--learner.schedule=constant")


def test_actors_sample_from_the_merged_adapters(launch: Callable[..., Launched]) -> None:
    """Without staleness every importance ratio is 1 if actor and learner have the same weights; at this rate a student
    without its adapters would be far off."""
    run = launch(
        *("--actors=1", "--teachers=1", "--steps=9", "--max-staleness=0", "--learner.warmup_steps=1", *LORA),
        # It ends early, by the evaluation after step 3: what it leaves is the same.
        *("--learner.eval_every=3", "--learner.tasks.eval_sampled=4", "--learner.tasks.eval_greedy=0"),
        *("--learner.until.plateau=1", "--learner.until.min_gain=2"),
    )
    assert run.wait() == 0, run.text()
    for row in run.steps():
        assert abs(row["train/ratio_mean"] - 1.0) < 1e-3 and abs(row["train/ratio_max"] - 1.0) < 1e-2, row["step"]
    checkpoint = run.run_dir / "checkpoints" / f"step_{run.steps()[-1]['step']:06d}"
    assert run.steps()[-1]["step"] < 9
    assert (checkpoint / "adapter_model.safetensors").is_file() and not (checkpoint / "model.safetensors").exists()
    merged = load_file(run.run_dir / "export" / "merged" / "model.safetensors")
    base = load_file(STUDENT_DIR / "model.safetensors")
    assert merged.keys() == base.keys()
    changed = [name for name in base if not np.array_equal(base[name], merged[name])]
    assert len(changed) == 3 * 7 and all(".self_attn." in name or ".mlp." in name for name in changed)
