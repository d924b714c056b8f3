"""A run from Python, without a run: what becomes of the settings, what is imported, what errors say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stillhouse import Run, RunFailed
from stillhouse.launch.config.command_line import parse_arguments, resolve_config
from stillhouse.launch.errors import ConfigError, LaunchError
from stillhouse.tools.notebook import flags_of
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """runs/ is made in the working folder."""
    monkeypatch.chdir(tmp_path)
    yield


def test_settings_mean_what_they_mean_on_the_command_line() -> None:
    flags = flags_of(
        {
            "learner": {"tasks": {"group_size": 4}, "betas": [0.9, 0.95], "frozen": True},
            "learner.lr": 1e-3,
            "max_staleness": 2,
            "divergence": "k2",
            "teacher.seed": None,
        }
    )
    assert flags["buffer.max_staleness"] == "2" and flags["teacher.seed"] == "none"
    flags.pop("teacher.seed")
    config = resolve_config(parse_arguments([f"--{key}={text}" for key, text in flags.items()]))
    assert (config.learner.tasks.group_size, config.learner.betas, config.learner.frozen) == (4, (0.9, 0.95), True)
    assert (config.learner.lr, config.buffer.max_staleness) == (1e-3, 2)
    assert config.learner.objective.divergence.name == "k2"


def test_a_key_and_its_short_name_may_not_both_be_given() -> None:
    with pytest.raises(ConfigError, match=r"buffer\.max_staleness: got two values"):
        flags_of({"max_staleness": 1, "buffer": {"max_staleness": 2}})


def test_importing_the_package_imports_none_of_the_large_ones() -> None:
    """Each module of the launcher imports the package first."""
    code = (
        "import sys, stillhouse; assert not {'stillhouse.tools.notebook', 'msgspec'} & set(sys.modules); "
        "from stillhouse import Run; print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_wrong_key_is_an_error_that_names_the_right_one() -> None:
    with pytest.raises(RunFailed, match="--stps: unknown key; did you mean steps"):
        Run(stps=3).start(PATIENCE_S)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"nothing is no run: got a folder without run\.json"):
        Run.open("nothing")
    with pytest.raises(LaunchError, match="does not exist"):
        Run(resume=True)


def write_record(folder: Path, state: str, pid: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = {"name": folder.name, "run_id": "x", "state": state, "started": "", "launcher_pid": pid}
    (folder / "run.json").write_text(json.dumps(record))


def test_a_run_whose_launcher_is_gone_counts_as_killed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    write_record(Path("runs/one"), "running", os.getpid())
    write_record(Path("runs/two"), "running", gone.pid)
    write_record(Path("runs/three"), "stopped", gone.pid)
    assert [Run.open(name).state for name in ("one", "two", "three")] == ["running", "killed", "stopped"]
    assert Run(name="four").state == "not started"


def test_rows_are_watched_whole_and_once_while_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(Path("runs/one"), "running", os.getpid())
    run = Run.open("one")
    file = Path("runs/one/metrics.jsonl")
    written = threading.Event()

    def write() -> None:
        for step in range(3):
            line = json.dumps({"kind": "resume" if step == 1 else "step", "step": step}) + "\n"
            for part in (line[:7], line[7:]):
                with file.open("a", encoding="utf-8") as stream:
                    stream.write(part)
                time.sleep(0.05)
        written.set()

    monkeypatch.setattr(Run, "running", property(lambda _: not written.is_set()))
    thread = threading.Thread(target=write)
    thread.start()
    rows: list[dict[str, Any]] = list(run.watch(every_s=0.01))
    thread.join()
    assert [row["step"] for row in rows] == [0, 2]


def test_rollouts_of_a_run_without_a_record_are_an_error_that_says_how_to_record() -> None:
    write_record(Path("runs/one"), "finished", 1)
    Path("runs/one/config.yaml").write_text("learner:\n  record: ''\n", encoding="utf-8")
    with pytest.raises(LaunchError, match="was not recorded"):
        Run.open("one").rollouts()


def test_evaluating_a_run_without_a_checkpoint_is_an_error() -> None:
    write_record(Path("runs/one"), "finished", 1)
    with pytest.raises(LaunchError, match="no checkpoint to evaluate"):
        Run.open("one").evaluate()
