"""The student as its own teacher: on its moving average, with the solution in front of the prompt."""

from __future__ import annotations

import json
from collections.abc import Callable

from stillhouse.builtin import STUDENT_DIR
from tests.integration.conftest import Launched


def test_teachers_grade_with_the_average_and_the_solution(launch: Callable[..., Launched]) -> None:
    """Without either the loss of a student that is its own teacher is 0: what is there is the solution's doing."""
    run = launch(
        *("--actors=1", "--teachers=1", "--steps=4", "--learner.eval_every=0", "--max-staleness=1"),
        *(f"--models.teacher={STUDENT_DIR}", "--learner.ema.decay=0.5", "--learner.ema.every=2"),
        *("--learner.tasks.privileged={ground_truth} ", "--learner.tasks.max_teacher_prompt_tokens=64"),
    )
    assert run.wait() == 0, run.text()
    rows = run.steps()
    assert all(row["train/reverse_kl"] > 0.1 for row in rows) and rows[-1]["weights/ema_step"] == 4
    assert run.summary()["tokens"]["balanced"]
    log = (run.run_dir / "logs" / "teacher-0.log").read_text()
    assert "scoring with the average of version 0.0" in log and "scoring with the average of version 0.2" in log
    checkpoint = run.run_dir / "checkpoints" / "step_000004"
    assert (checkpoint / "ema.safetensors").is_file()
    assert "ema.safetensors" in json.loads((checkpoint / "manifest.json").read_text())["files"]
