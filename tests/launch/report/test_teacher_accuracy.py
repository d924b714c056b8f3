"""The teachers' accuracy in the final table: measured on the run's own evaluation prompts, or absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import pytest
import torch

from stillhouse import builtin
from stillhouse.builtin.addition import read_problems
from stillhouse.builtin.measure import accuracy
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.report import teacher_accuracy
from stillhouse.launch.report.summary_table import teachers_text
from stillhouse.launch.report.teacher_accuracy import (
    TEACHER_EVAL,
    MeasuredTeacher,
    evaluate_teachers,
    longest_s,
    measurable_pools,
    measure_teachers,
    measured_teachers,
)
from stillhouse.launch.runfolder import RunFolder
from stillhouse.models.loading import load_causal_lm
from stillhouse.models.tokenizer import load_tokenizer
from tests.patience import PATIENCE_S

N = 24
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the process that measures: two threads get in each other's way where the other core is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    opened = RunFolder.open(tmp_path / "run", resume=False)
    yield opened
    opened.close()


def eval_file(path: Path, **changed: str) -> Path:
    """The first built-in evaluation problems, with some fields replaced."""
    rows = [json.loads(line) for line in builtin.EVAL_JSONL.read_text().splitlines()[:N]]
    path.write_text("".join(f"{json.dumps(row | changed)}\n" for row in rows), encoding="utf-8")
    return path


def run_config(eval_prompts: Path, tasks: dict[str, Any] | None = None, **others: Any) -> RunConfig:
    plain: dict[str, Any] = {
        "models": {"student": str(builtin.STUDENT_DIR), "teacher": str(builtin.TEACHER_DIR)},
        "learner": {
            "tasks": {
                "prompts": str(builtin.TRAIN_JSONL),
                "eval_prompts": str(eval_prompts),
                "eval_sampled": N,
                **(tasks or {}),
            }
        },
        "actor": {"torch": {"max_context": 256}},
    }
    return build(RunConfig, plain | others)


def test_it_is_the_teachers_accuracy_on_these_prompts(tmp_path: Path) -> None:
    """Against the built-in task's own way to measure it, with other random numbers; and with answers that are wrong."""
    (sets,) = measure_teachers(run_config(eval_file(tmp_path / "right.jsonl"))).values()
    measured = sets[""]
    model = load_causal_lm(builtin.TEACHER_DIR, device="cpu", dtype="float32", attention="sdpa")
    tokenizer = cast(Any, load_tokenizer(builtin.TEACHER_DIR))
    expected = accuracy(model, tokenizer, read_problems(builtin.EVAL_JSONL)[:N], temperature=1.0)
    assert measured.n_sampled == N
    assert sets.keys() == {""} and measured.accuracy_greedy is None
    assert measured.accuracy_sampled == pytest.approx(expected, abs=0.2)
    wrong = measure_teachers(run_config(eval_file(tmp_path / "wrong.jsonl", ground_truth="none of them")))
    assert wrong == {"default": {"": MeasuredTeacher(accuracy_sampled=0.0, n_sampled=N)}}


def test_before_a_run_all_sets_are_answered_also_greedily(tmp_path: Path) -> None:
    """For learner.eval_teacher. Greedy answers are compared with those of transformers on the same prompts."""
    right, wrong = eval_file(tmp_path / "right.jsonl"), eval_file(tmp_path / "wrong.jsonl", ground_truth="none of them")
    plain = msgspec.to_builtins(run_config(right, {"eval_greedy": N}))
    sets = {"wrong": {"prompts": str(wrong), "greedy": 4, "sampled": 0}}
    plain["learner"] |= {"eval_teacher": True, "eval_sets": sets}
    (measured,) = measure_teachers(build(RunConfig, plain)).values()
    model = load_causal_lm(builtin.TEACHER_DIR, device="cpu", dtype="float32", attention="sdpa")
    tokenizer = cast(Any, load_tokenizer(builtin.TEACHER_DIR))
    expected = accuracy(model, tokenizer, read_problems(builtin.EVAL_JSONL)[:N], temperature=0.0)
    assert (measured[""].n_greedy, measured[""].n_sampled) == (N, N)
    assert measured[""].accuracy_greedy == expected
    assert measured["wrong"] == MeasuredTeacher(accuracy_sampled=None, n_sampled=0, accuracy_greedy=0.0, n_greedy=4)


def test_a_stage_takes_what_an_earlier_one_measured_if_all_is_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages differ in their student, its rate and their training prompts."""
    asked: list[Path] = []
    figures = {"default": {"": MeasuredTeacher(accuracy_sampled=0.9, n_sampled=N)}}

    def measured(_: RunConfig, folder: RunFolder, *__: object) -> object:
        asked.append(folder.path)
        return figures

    monkeypatch.setattr("stillhouse.launch.report.teacher_accuracy._measured_teachers", measured)
    config = run_config(eval_file(tmp_path / "eval.jsonl"), {})
    replace = msgspec.structs.replace
    learner = replace(config.learner, eval_teacher=True)
    config = replace(config, learner=learner)
    other_tasks = replace(learner.tasks, prompts=str(tmp_path / "other.jsonl"))
    same = replace(config, learner=replace(learner, lr=0.5, tasks=other_tasks))
    longer = replace(config, learner=replace(learner, tasks=replace(learner.tasks, max_new_tokens=7)))
    other = replace(config, models=replace(config.models, teacher=str(builtin.STUDENT_DIR)))
    chain = tmp_path / "stages"
    for name, one in {"1-a": config, "2-b": same, "3-c": longer, "4-d": other, "5-e": replace(config, seed=5)}.items():
        with RunFolder.open(chain / name, resume=False) as folder:
            write_config(one, folder.config_path)
            evaluate_teachers(one, folder, lambda _: None)
    assert [path.name for path in asked] == ["1-a", "3-c", "4-d", "5-e"]
    assert (chain / "2-b" / TEACHER_EVAL).read_bytes() == (chain / "1-a" / TEACHER_EVAL).read_bytes()
    with RunFolder.open(tmp_path / "alone", resume=False) as folder:
        evaluate_teachers(config, folder, lambda _: None)
    assert asked[-1].name == "alone"


def test_each_pool_is_measured_on_the_prompts_that_it_grades(tmp_path: Path) -> None:
    """The student as a second teacher: each writes for its own tag."""
    rows = [json.loads(line) for line in builtin.EVAL_JSONL.read_text().splitlines()[:N]]
    file = tmp_path / "eval.jsonl"
    file.write_text("".join(f"{json.dumps(row | {'tag': 'ab'[i % 3 == 0]})}\n" for i, row in enumerate(rows)))
    pools = {"strong": {"model": str(builtin.TEACHER_DIR)}, "weak": {"model": str(builtin.STUDENT_DIR)}}
    config = run_config(file, {"routes": {"strong": ["a"], "weak": ["b"]}}, pools=pools, teachers=2)
    measured = {pool: sets[""] for pool, sets in measure_teachers(config).items()}
    assert {pool: one.n_sampled for pool, one in measured.items()} == {"strong": 16, "weak": 8}
    assert (measured["strong"].accuracy_sampled or 0) > 0.75 > (measured["weak"].accuracy_sampled or 0)


@pytest.mark.parametrize(
    "plain",
    [
        {"learner": {"eval_every": 0}},
        {"learner": {"tasks": {"eval_sampled": 0}}},
        {"learner": {"tasks": {"routes": {}}, "objective": {"coef": 0.0, "advantage": "grpo"}}, "teachers": 0},
        {"learner": {"ema": {"decay": 0.9}}},
        {"learner": {"frozen": True}},
        {"teacher": {"engine": "sglang"}},
        {"actor": {"engine": "sglang"}},
        {"teachers": 0},
    ],
)
def test_what_cannot_be_measured_is_absent(plain: dict[str, Any], folder: RunFolder) -> None:
    config = build(RunConfig, plain)
    assert measurable_pools(config) == ()
    said: list[str] = []
    assert measured_teachers(config, folder, 60.0, said.append) == {}
    assert said == []


def test_a_measurement_that_takes_too_long_is_ended_and_told(folder: RunFolder, tmp_path: Path) -> None:
    write_config(run_config(eval_file(tmp_path / "eval.jsonl")), folder.config_path)
    said: list[str] = []
    assert measured_teachers(build(RunConfig, {}), folder, 0.05, said.append) == {}
    assert said[-1] == "the teacher's accuracy was not measured: it took longer than 0 s"
    assert not [
        child
        for child in psutil.Process(os.getpid()).children()
        if "stillhouse.launch.report.teacher_accuracy" in child.cmdline()
    ]


def test_a_measurement_whose_launcher_is_gone_ends_before_it_imports_torch(folder: RunFolder, tmp_path: Path) -> None:
    write_config(run_config(eval_file(tmp_path / "eval.jsonl")), folder.config_path)
    command = [
        sys.executable,
        "-v",
        "-m",
        "stillhouse.launch.report.teacher_accuracy",
        str(folder.path),
        "1",
    ]  # -v: names each import
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert "import 'stillhouse.protocol.children'" in done.stderr and "import 'torch'" not in done.stderr


def test_a_measurement_that_fails_says_where_its_log_is(folder: RunFolder, tmp_path: Path) -> None:
    write_config(run_config(tmp_path / "nowhere.jsonl"), folder.config_path)
    said: list[str] = []
    assert measured_teachers(build(RunConfig, {}), folder, PATIENCE_S, said.append) == {}
    log = folder.logs / teacher_accuracy.LOG_FILE
    assert said[-1] == f"the teacher's accuracy was not measured: it failed, see {log}"
    assert "nowhere.jsonl" in log.read_text()


def test_it_may_take_a_tenth_of_the_run_but_at_least_a_minute() -> None:
    assert [longest_s(wall_s) for wall_s in (5.0, 600.0, 6000.0)] == [60.0, 60.0, 600.0]


def test_one_pool_needs_no_name_in_the_table() -> None:
    one, other = (MeasuredTeacher(accuracy_sampled=x, n_sampled=n) for x, n in ((0.9685, 256), (0.5, 8)))
    assert teachers_text({"default": one}) == "0.969 (of 256)"
    assert teachers_text({"math": one, "text": other}) == "math 0.969 (of 256), text 0.500 (of 8)"
