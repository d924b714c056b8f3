"""`--resume` under a configuration that the checkpoints do not fit is refused before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stillhouse import builtin
from stillhouse.launch.checks.preflight import check
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.run import main
from stillhouse.launch.runfolder import RunFolder
from stillhouse.learner.checkpoints.files import CHECKPOINTS, OPTIMIZER, TRAINER, VALUE_HEAD, write_manifest
from stillhouse.learner.prompts.tasks import TaskStream, load_prompts
from stillhouse.models.tokenizer import load_tokenizer
from stillhouse.protocol.messages import WeightVersion

Resume = Callable[..., int]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(100)))
    return file


@pytest.fixture
def run_dir(tmp_path: Path, prompts: Path) -> Path:
    """A run that left a checkpoint; the task stream's part of that is real."""
    config = check(build(RunConfig, {"seed": 3, "learner": {"tasks": {"prompts": str(prompts)}}})).config
    folder = RunFolder.open(tmp_path / "run", resume=False)
    write_config(config, folder.config_path)
    tasks = config.learner.tasks
    stream = TaskStream(tasks, load_tokenizer(builtin.STUDENT_DIR), load_prompts(tasks), seed=config.seed)
    saved = folder.path / CHECKPOINTS / "step_000004"
    saved.mkdir(parents=True)
    (saved / TRAINER).write_text(json.dumps({"tasks": stream.state()}))
    for name in (OPTIMIZER, "config.json"):
        (saved / name).touch()
    write_manifest(saved, WeightVersion(0, 4))
    folder.finish(130)
    folder.close()
    return folder.path


@pytest.fixture
def check_resume(run_dir: Path) -> Resume:
    return lambda *arguments: main(["--resume", "--run-dir", str(run_dir), "--check", *arguments])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_prompts_that_changed_in_their_place_are_refused(
    check_resume: Resume, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path is that of the run: only its contents are others."""
    assert check_resume() == 0
    with prompts.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "0+1="}) + "\n")
    assert check_resume() == 2
    assert f"learner.tasks.prompts: got {prompts} (101 rows), expected {prompts} (100 rows)" in capsys.readouterr().err


def test_other_prompts_are_refused_and_the_run_can_still_go_on(
    run_dir: Path, check_resume: Resume, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run_dir)
    assert main(["--resume", "--run-dir", str(run_dir), "--prompts", str(builtin.TRAIN_JSONL)]) == 2
    printed = capsys.readouterr().err
    assert f"learner.tasks.prompts: got {builtin.TRAIN_JSONL} (8192 rows), expected " in printed
    assert "mine.jsonl (100 rows)" in printed
    assert "resume with the settings that the run was started with, or start a new run; nothing was changed" in printed
    assert contents(run_dir) == before
    assert check_resume() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "4"], "seed: got 4, expected 3, as in the checkpoint"),
        (["--learner.tasks.shuffle", "false"], "learner.tasks.shuffle: got false, expected true"),
        (["--learner.tasks.eval_share", "0.1"], "learner.tasks.eval_share: got values that hold 10 prompts out"),
        (["--eval-prompts", "builtin"], "learner.tasks.eval_prompts: got values that hold 0 prompts out"),
        (["--prompts", "builtin", "--seed", "4"], "seed: got 4"),
        (["--learner.lora.rank", "4"], "learner.lora.rank: got 4, expected 0, as in the checkpoint; resume with"),
        (["--learner.optimizer", "muon"], "learner.optimizer: got muon, expected adamw, as in the checkpoint"),
    ],
)
def test_every_key_that_must_stay_is_named(
    check_resume: Resume, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert check_resume(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("steps", [4, 5])
def test_a_run_that_has_all_its_steps_says_so(
    check_resume: Resume, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    assert check_resume(f"--steps={steps}") == 0
    assert ("step_000004); steps = 4, so nothing is left" in capsys.readouterr().out) == (steps == 4)


def test_what_leaves_the_stream_as_it_was_may_change(
    check_resume: Resume, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another number of steps changes the learning rate, unless that is constant."""
    copy = shutil.copy(prompts, prompts.with_name("moved.jsonl"))
    changes = ("--actors=5", "--learner.tasks.eval_share=0.011", "--learner.tasks.eval_greedy=7")
    for more in (("--steps=9", "--learner.schedule=constant"), ("--steps=200",), ("--steps=9",)):
        assert "and the run had" not in capsys.readouterr().err
        assert check_resume("--prompts", str(copy), *changes, *more) == 0
    assert "steps: got 9, and the run had 200" in capsys.readouterr().err
    assert check_resume("--student", str(builtin.TEACHER_DIR)) == 0
    told = f"models.student: got {builtin.TEACHER_DIR}, and the run had {builtin.STUDENT_DIR}: the weights are the"
    assert told in capsys.readouterr().err


def test_without_a_checkpoint_nothing_has_to_fit_and_it_is_said(
    run_dir: Path, check_resume: Resume, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run_dir / CHECKPOINTS)
    assert check_resume("--prompts", "builtin", "--seed", "4") == 0
    assert "there is no checkpoint yet: the run begins anew, at step 0" in capsys.readouterr().out


@pytest.mark.parametrize("account", ["learner.json", "learner.1.json"])
def test_a_run_whose_checkpoints_were_deleted_is_not_begun_anew(
    run_dir: Path, check_resume: Resume, capsys: pytest.CaptureFixture[str], account: str
) -> None:
    (run_dir / account).write_text('{"checkpoint": "/old/checkpoints/step_000004", "steps": 4}')
    assert check_resume() == 0
    shutil.rmtree(run_dir / CHECKPOINTS)
    before = contents(run_dir)
    assert check_resume() == main(["--resume", "--run-dir", str(run_dir)]) == 2
    printed = capsys.readouterr().err
    assert "the run has written checkpoints, the last of them step_000004: put one back from a copy" in printed
    assert "another --run-dir, without --resume" in printed and contents(run_dir) == before


def newer_damaged(run_dir: Path) -> Path:
    saved = run_dir / CHECKPOINTS / "step_000004"
    newer = shutil.copytree(saved, saved.with_name("step_000008"))
    write_manifest(newer, WeightVersion(0, 8))
    (newer / TRAINER).write_text("{")
    return newer


def test_a_checkpoint_that_cannot_be_read_is_passed_over_and_it_is_said(
    run_dir: Path, check_resume: Resume, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = newer_damaged(run_dir)
    before = contents(run_dir)
    assert check_resume("--seed", "4") == 2
    assert check_resume() == 0
    printed = capsys.readouterr().out
    assert f"checkpoint {newer} is damaged: " in printed and "an older one is used" in printed
    assert "going on from step 4 (" in printed
    assert contents(run_dir) == before


def test_a_run_of_which_no_checkpoint_can_be_read_is_not_begun_anew(
    run_dir: Path, check_resume: Resume, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = newer_damaged(run_dir)
    older = run_dir / CHECKPOINTS / "step_000004"
    (older / TRAINER).unlink()
    before = contents(run_dir)
    assert main(["--resume", "--run-dir", str(run_dir)]) == 2
    printed = capsys.readouterr().err
    assert f"checkpoint {newer} is damaged: " in printed and f"checkpoint {older} is damaged: " in printed
    assert f"no checkpoint in {older.parent} can be used: put one back from a copy" in printed
    assert contents(run_dir) == before


def test_a_configuration_that_was_cut_is_refused_wherever_it_was_cut(
    run_dir: Path, check_resume: Resume, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even in its last line, where a number would only lose its last digits."""
    file = run_dir / "config.yaml"
    whole = file.read_text()
    assert check_resume() == 0
    last = whole.rindex("status_every_s: 5.0") + len("status_every_s: 5")
    for end in (0, 1, len(whole) // 3, 2 * len(whole) // 3, last, len(whole) - len("...\n")):
        file.write_text(whole[:end])
        assert main(["--resume", "--run-dir", str(run_dir)]) == 2, end
        assert str(file) in capsys.readouterr().err
    file.unlink()
    assert main(["--resume", "--run-dir", str(run_dir)]) == 2
    assert "put it back from a copy" in capsys.readouterr().err
    file.write_text(whole)
    assert check_resume() == 0


def test_an_advantage_of_single_tokens_needs_the_value_head_of_the_checkpoint(
    run_dir: Path, check_resume: Resume, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = ("--learner.objective.advantage", "gae", "--buffer.release", "rollout")
    assert check_resume(*rewards) == 2
    printed = capsys.readouterr().err
    assert (
        "learner.objective.advantage: got 'gae', which needs a value head" in printed
        and "nothing was changed" in printed
    )
    saved = run_dir / CHECKPOINTS / "step_000004"
    (saved / VALUE_HEAD).touch()
    write_manifest(saved, WeightVersion(0, 4))
    assert check_resume(*rewards) == 0


def test_the_value_head_is_sought_in_the_branch_that_the_learner_goes_on_with(
    run_dir: Path, check_resume: Resume, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later epoch's checkpoint is newer than one of more steps that was abandoned."""
    saved = run_dir / CHECKPOINTS / "step_000004"
    newer = shutil.copytree(saved, saved.with_name("step_000002_epoch_1"))
    write_manifest(newer, WeightVersion(1, 2))
    (saved / VALUE_HEAD).touch()
    assert check_resume("--learner.objective.advantage", "gae", "--buffer.release", "rollout") == 2
    assert f"{newer} has none" in capsys.readouterr().err
