"""A short run of TRL, as bench/race/against_trl.py makes it. Needs make trl."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bench.race.against_trl import SAME
from bench.race.race import PEER
from bench.race.race_runs import TRL_PYTHON, trl
from stillhouse.builtin import STUDENT_DIR

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TRL_PYTHON.exists(), reason="no .venv-trl; make trl installs it"),
]


def test_two_steps_are_timed_and_the_student_that_is_saved_has_moved(tmp_path: Path) -> None:
    given = SAME | {"steps": 2, "rollouts": 8, "threads": 1, "seed": 3, "save_every": 2, "warmup_steps": 0}
    race = trl(tmp_path, given)
    assert race.side == PEER
    assert [point.step for point in race.points] == [1, 2]
    assert 0 < race.points[0].train_s < race.points[1].train_s == race.train_s
    assert race.startup_s > 0
    assert race.cpu_s[PEER] > 0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]
    before = load_file(STUDENT_DIR / "model.safetensors")
    after = load_file(tmp_path / "checkpoints" / "step_000002" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)
    assert len((tmp_path / "times.jsonl").read_text().splitlines()) == 1 + 2
    assert json.loads((tmp_path / "settings.json").read_text())["rollouts"] == 8
