"""Stages as they are read from a file, checked, and compared with those that have begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stillhouse.launch.config.command_line import parse_arguments, resolve_config
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.run import main
from stillhouse.launch.stages.config import Stage, read_stages
from stillhouse.launch.stages.state import StageState

FILE = """
steps = 50
actors = 3
[learner]
lr = 1e-4
[learner.objective]
divergence = "k1"
importance = "truncated"
coef = 0.5
[[stage]]
name = "warmup"
text = "teacher"
steps = 4
learner.lr = 1e-3
[[stage]]
name = "distil"
[[stage]]
name = "reward"
models.teacher = "stage:distil"
learner.objective = { coef = 0.0, advantage = "grpo" }
buffer.release = "rollout"
"""


def read(folder: Path, text: str, *words: str, former: list[StageState] | None = None) -> list[Stage]:
    file = folder / "stages.toml"
    file.write_text(text)
    return read_stages(parse_arguments(["--config", str(file), *words]), former or ())


def state_of(stage: Stage, **more: Any) -> StageState:
    return StageState(
        name=stage.own.name,
        folder="",
        text=stage.own.text,
        epochs=stage.own.epochs,
        config=msgspec.json.decode(msgspec.json.encode(stage.config)),  # as it comes from stages.json
        models_from=stage.models_from,
        steps_given=stage.steps_given,
        flags=stage.flags,
        **more,
    )


def test_a_table_lies_over_what_is_shared_and_flags_over_both(tmp_path: Path) -> None:
    warmup, distil, reward = read(tmp_path, FILE, "--actors", "2")
    assert [one.config.learner.lr for one in (warmup, distil, reward)] == [1e-3, 1e-4, 1e-4]
    assert [one.config.steps for one in (warmup, distil, reward)] == [4, 50, 50]
    assert {one.config.actors for one in (warmup, distil, reward)} == {2}
    # Text is trained by cross-entropy, whatever the student's own tokens are trained by.
    assert warmup.config.learner.objective.divergence.name == "seq_kd"
    assert [one.config.learner.objective.coef for one in (warmup, distil, reward)] == [1.0, 0.5, 0.0]
    assert distil.config.learner.objective.importance.name == "truncated"
    assert reward.config.learner.objective.importance.name == "truncated"
    assert reward.config.learner.objective.advantage.name == "grpo"
    # Each stage goes on with the student of the one before, and may have that of another as its teacher.
    assert (warmup.models_from, distil.models_from) == ({}, {"models.student": "warmup"})
    assert reward.models_from == {"models.student": "distil", "models.teacher": "distil"}
    # What suits the built-in student suits it in every stage.
    assert {one.config.buffer.max_staleness for one in (warmup, distil, reward)} == {1}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (('name = "distil"', 'name = "warmup"'), "several with the name 'warmup'"),
        (('name = "distil"', 'name = "Distil!"'), "expected a name of small letters"),
        (('name = "distil"', 'name = "distil"\nepochs = 2'), "above 1 only with text"),
        (
            ('name = "distil"', 'name = "distil"\nlearner.rate = 1'),
            "stage distil: learner.rate: unknown key",
        ),
        (("stage:distil", "stage:later"), "expected the name of an earlier stage: warmup, distil"),
        (("[learner]", '[learner]\nrecord = "/tmp/x.record"'), "for several stages, expected {run}"),
    ],
)
def test_mistakes(tmp_path: Path, change: tuple[str, str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, FILE.replace(*change))
    assert expected in str(error.value)


def test_a_mistake_in_the_last_stage_is_said_before_the_first_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, rows = tmp_path / "stages.toml", tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    wrong = FILE.replace('"rollout"', '"deadline"').replace('text = "teacher"', 'text = "rows.jsonl"')
    file.write_text(wrong.replace("rows.jsonl", str(rows)))
    run = tmp_path / "run"
    assert main(["--config", str(file), "--run-dir", str(run)]) == 2
    said = capsys.readouterr().err
    assert "stage reward: learner.objective.advantage" in said, said
    assert not run.exists()


def test_other_commands_say_that_they_are_about_one_run(tmp_path: Path) -> None:
    (tmp_path / "stages.toml").write_text(FILE)
    with pytest.raises(ConfigError, match="has stages"):
        resolve_config(parse_arguments(["--config", str(tmp_path / "stages.toml")]))


def test_what_is_done_stays_and_what_comes_may_change(tmp_path: Path) -> None:
    stages = read(tmp_path, FILE, "--steps", "5")
    former = [state_of(stages[0], begun=True, done=True), state_of(stages[1], begun=True), state_of(stages[2])]
    # Flags of the first start are remembered, and flags of a resume are for what is not done.
    again = read_stages(parse_arguments(["--actors", "1"]), former)
    assert [one.config.actors for one in again] == [3, 1, 1]
    assert [one.config.steps for one in again] == [5, 5, 5]
    assert [one.models_from for one in again] == [one.models_from for one in stages]
    faster = FILE.replace("lr = 1e-4", "lr = 2e-4")
    assert [one.config.learner.lr for one in read(tmp_path, faster, former=former)] == [1e-3, 2e-4, 2e-4]
    with pytest.raises(ConfigError, match=r"stage warmup: learner.lr: got 0.002, expected 0.001"):
        read(tmp_path, FILE.replace("lr = 1e-3", "lr = 2e-3"), former=former)
    with pytest.raises(ConfigError, match="expected the stages that have begun as they were"):
        read(tmp_path, FILE.replace('name = "distil"', 'name = "other"'), former=former)
