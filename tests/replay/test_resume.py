"""A replay that is gone on with: the outcome of an undisturbed one, bit for bit, or a refusal that changes nothing."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import stillhouse.learner.sources
from stillhouse.learner.reports.metrics import read_metrics
from stillhouse.learner.steps import StepDone
from stillhouse.replay import command as replay
from stillhouse.replay import run as replaying
from stillhouse.replay import training
from tests.replay.test_command import recorded

STEPS = 6
FLAGS = ("--epochs=2", "--order=shuffled", "--learner.checkpoint_every=2", "--learner.keep_checkpoints=9")
EVALUATED = (
    *("--learner.eval_every=2", "--learner.tasks.eval_greedy=0", "--learner.tasks.eval_sampled=2"),
    "--learner.tasks.max_new_tokens=8",
)
VALUES = (
    *("--learner.objective.advantage=gae", "--learner.objective.importance=ppo", "--buffer.release=rollout"),
    "--learner.updates_per_batch=2",
)
After = Callable[..., None]


def power_cut(*_: Any) -> None:
    raise RuntimeError("power cut")


def signal_came(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def run(file: Path, folder: Path, *flags: str) -> int:
    return replay.main([str(file), f"--run-dir={folder}", *flags])


def run_until(monkeypatch: pytest.MonkeyPatch, step: int, end: After, file: Path, folder: Path, *flags: str) -> None:
    """A replay that ends in the middle, when this step was made."""

    announce = training.Replay.announce

    def after_step(replay: training.Replay, done: StepDone) -> None:
        if done.version.step == step:
            end()
        announce(replay, done)

    with monkeypatch.context() as patched:
        patched.setattr(training.Replay, "announce", after_step)
        try:
            assert run(file, folder, *flags) == 130
        except RuntimeError as error:
            assert str(error) == "power cut"


def outcome(folder: Path) -> tuple[Any, ...]:
    """All but times: weights and moments, figures, account; and by itself the reverse KL of evaluations, which is
    approximate: the engine writes together what is there, and rounding depends on what that is."""
    last = folder / "checkpoints" / f"step_{STEPS:06d}"
    weights = {file.name: file.read_bytes() for file in last.glob("*.safetensors")}
    rows = [
        {
            name: value
            for name, value in row.items()
            if name.startswith(("train/", "eval/", "replay/")) and name != "train/step_s"
        }
        | {"kind": row["kind"], "step": row["step"]}
        for row in read_metrics(folder)
    ]
    account = json.loads((folder / "replay.json").read_text())
    evaluations = [row for row in rows if row["kind"] == "eval"]
    reverse_kls = [row.pop("eval/reverse_kl") for row in evaluations] + [p.pop("reverse_kl") for p in account["eval"]]
    return weights, rows, {name: value for name, value in account.items() if name != "wall_s"}, reverse_kls


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """(file, folder) of a replay to its end with these flags."""
    file = recorded(tmp_path_factory.mktemp("recorded") / "r")

    @cache
    def made(*flags: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("whole") / "run"
        assert run(file, folder, *flags) == 0
        return file, folder

    return made


@pytest.mark.parametrize(
    ("step", "end", "flags"),
    [(1, power_cut, ()), (3, signal_came, ()), (5, power_cut, EVALUATED), (5, power_cut, VALUES)],
    ids=["before the first checkpoint", "signal", "with evaluations", "with a value head"],
)
def test_it_ends_as_an_undisturbed_one(
    step: int,
    end: After,
    flags: tuple[str, ...],
    undisturbed: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (file, whole), halves = undisturbed(*FLAGS, *flags), tmp_path / "halves"
    run_until(monkeypatch, step, end, file, halves, *FLAGS, *flags)
    assert not (halves / "checkpoints" / f"step_{STEPS:06d}").exists()
    moved = Path(shutil.copy(file, tmp_path / "moved"))
    assert run(moved, halves, "--resume", "--learner.checkpoint_every=1") == 0
    ours, wanted = outcome(halves), outcome(whole)
    assert ours[2].pop("file") == str(moved) and wanted[2].pop("file") == str(file)
    assert ours[:3] == wanted[:3] and ours[3] == pytest.approx(wanted[3], abs=1e-4)
    assert len([row for row in ours[1] if row["kind"] == "step"]) == STEPS
    assert [point["step"] for point in ours[2]["eval"]] == ([0, 2, 4, 6] if flags is EVALUATED else [])
    assert len(ours[0]) == (3 if flags is VALUES else 2)
    assert run(moved, halves, "--resume") == 0  # at its end there is nothing left to do
    assert outcome(halves)[:2] == wanted[:2]


@pytest.fixture
def begun(tmp_path: Path, undisturbed: Callable[..., tuple[Path, Path]]) -> tuple[Path, Path]:
    """(file, folder) of a replay of three steps: the folder is a copy."""
    file, folder = undisturbed()
    return file, Path(shutil.copytree(folder, tmp_path / "run"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ("--learner.objective.divergence=k3",),
            "learner.objective.divergence: got {'name': 'k3', 'kl_student': 'current'}, expected {'name': 'k1', ",
        ),
        (("--learner.lr=0.5", "--steps=9"), "learner.lr: got 0.5, expected 0.001"),
        (("--learner.eval_every=1",), "learner.eval_every: got 1, expected 0"),
        (("--epochs=2",), "--epochs: got 2, expected 1, as when the replay was started"),
        (("--order=shuffled",), "--order: got shuffled, expected recorded"),
    ],
)
def test_another_objective_or_order_is_refused(
    begun: tuple[Path, Path], flags: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = begun
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert run(file, folder, "--resume", *flags) == 2
    assert expected in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_replay_whose_checkpoints_were_deleted_is_not_begun_anew(
    begun: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*begun, "--resume") == 0  # to its end, so that replay.json names the last one
    shutil.rmtree(begun[1] / "checkpoints")
    assert run(*begun, "--resume") == 2
    assert "the last of them step_" in capsys.readouterr().err


def test_what_is_said_again_and_is_the_same_is_no_difference(begun: tuple[Path, Path]) -> None:
    same = ("--epochs=1", "--order=recorded", "--learner.objective.divergence=k1", "--student=builtin")
    assert run(*begun, "--resume", *same, "--learner.keep_checkpoints=1") == 0


def test_another_file_is_refused(begun: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One with more batches of the same run, too: the schedule was made for those there were."""
    for other in (recorded(tmp_path / "longer", n=4), recorded(tmp_path / "other", writer="teacher")):
        assert run(other, begun[1], "--resume") == 2
        told = capsys.readouterr().err
        assert f"got {other}" in told and f"expected {begun[0]} as it was then (3 batches of the run run)" in told


def test_a_runs_folder_is_no_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = recorded(tmp_path / "r"), tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    assert run(file, folder, "--resume") == 2
    assert "To resume a run, use stillhouse --resume" in capsys.readouterr().err


def test_slow_steps_are_not_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a step that takes long nor those between two regular lines."""
    monkeypatch.setattr(replaying, "SILENT_S", 0.05)
    step = stillhouse.learner.sources.recorded_batch

    def slow(*words: Any) -> Any:
        time.sleep(0.15)
        return step(*words)

    monkeypatch.setattr("stillhouse.learner.sources.recorded_batch", slow)
    assert run(recorded(tmp_path / "r"), tmp_path / "run", *FLAGS) == 0
    said = capsys.readouterr().out
    assert re.search(r"step 0/\d+ is done; working for \d+ s since", said)
    assert all(f"step {n}/{STEPS}, epoch" in said for n in range(1, STEPS + 1))
