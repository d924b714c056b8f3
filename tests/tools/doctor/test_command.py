"""`stillhouse doctor` as a command: what it prints, its exit code, and checks that hang or crash."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from stillhouse import builtin
from stillhouse.launch.checks.finding import Finding
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.runfolder import RunRecord
from stillhouse.tools.doctor import command
from stillhouse.tools.doctor.command import DoctorReport, main, split_own
from stillhouse.tools.doctor.examiner import examine
from stillhouse.tools.doctor.messages import ExaminerMessage, Orders
from stillhouse.tools.doctor.table import CHECKS
from tests.patience import SLOWNESS
from tests.tools.doctor.conftest import ENGINES

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def findable_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture
def examined_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In this process, which has imported torch."""

    def examined(arguments: Sequence[str], only: tuple[str, ...], timeout_s: float, _: object) -> list[Finding]:
        said: list[ExaminerMessage] = []
        orders = Orders(arguments=tuple(arguments), only=only, done=(), timeout_s=timeout_s, scratch=str(tmp_path))
        examine(orders, said.append)
        return [one for one in said if isinstance(one, Finding)]

    monkeypatch.setattr(command, "examined", examined)


def test_all_checks_of_the_built_in_run_pass(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In another process, as a user sees them, each exactly once. Of its prompts, the first: all are read."""
    prompts = tmp_path_factory.mktemp("prompts") / "first.jsonl"
    prompts.write_text("".join(builtin.TRAIN_JSONL.read_text().splitlines(keepends=True)[:200]))
    report, before = tmp_path / "report.json", set(psutil.Process().children(recursive=True))
    assert main([f"--json={report}", "--device=cpu", f"--run-dir={tmp_path / 'run'}", f"--prompts={prompts}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = msgspec.json.decode(report.read_bytes(), type=DoctorReport)
    assert found.ok and list(dict.fromkeys(one.check for one in found.findings)) == [check.name for check in CHECKS]
    assert lines[:-1] == [finding.line() for finding in found.findings]
    assert lines[-1].startswith("0 failed, ") and lines[-1].endswith("nothing was left running")
    assert not (tmp_path / "run").exists() and [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.slow
def test_a_check_that_hangs_costs_itself_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The teacher never answers; what needs its scores fails, each at its deadline, and the rest goes on."""
    before = set(psutil.Process().children(recursive=True))
    arguments = ["--device=cpu", f"--teacher.engine={ENGINES}:HANGS", "--only=off-by-one,weights-taken"]
    limit_s = round(20 * SLOWNESS)
    assert main([*arguments, f"--timeout-s={limit_s}"]) == 1
    out = capsys.readouterr().out
    assert f"FAILED   off by one: the check did not end within {limit_s} s" in out
    assert "ok       weights taken (actor)" in out
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.slow
def test_a_check_that_crashes_costs_itself_alone(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device=cpu", f"--teacher.engine={ENGINES}:CRASHES", "--only=known-text,disk"]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "FAILED   known text: the check was killed by SIGKILL" in out and "ok       disk: " in out


@pytest.mark.usefixtures("examined_here")
def test_a_check_that_raises_says_what(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student's folder that only breaks when its weights are read."""
    (tmp_path / "broken_engine.py").write_text(
        "from stillhouse.engines.torch.provider import TorchProvider\n"
        "class Broken(TorchProvider):\n"
        "    def student(self, ctx):\n"
        "        raise KeyError('no such layer')\n"
        "BROKEN = Broken()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code = main(["--device=cpu", "--actor.engine=broken_engine:BROKEN", "--only=off-by-one,temperature,disk"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert any("FAILED   off by one: KeyError: 'no such layer' (at broken_engine.py:4)" in line for line in lines)
    assert any("skipped  temperature: " in line and "failed, see above" in line for line in lines)
    assert sum(line.startswith("ok       disk: ") for line in lines) == 1


@pytest.mark.usefixtures("examined_here")
def test_a_refused_configuration_still_gets_the_other_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device=cpu", "--teacher=no/such/folder", "--only=configuration,disk,known-text"]) == 1
    out = capsys.readouterr().out
    assert "FAILED   configuration (models.teacher): no folder 'no/such/folder'" in out
    assert "ok       disk: " in out and "skipped  known text: the configuration is refused, see above" in out


@pytest.mark.usefixtures("examined_here")
@pytest.mark.parametrize(
    ("flag", "files", "message"),
    [
        ("", ["run.json"], "holds a run already (r, started now, stopped)"),
        ("", ["notes.txt"], "is neither empty nor a run folder (it holds notes.txt)"),
        ("--resume", [], "holds no run (no run.json in it)"),
        ("--resume", ["run.json", "checkpoints/step_000004/manifest.json"], "no checkpoint in"),
    ],
)
def test_a_run_folder_that_a_start_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, files: list[str], message: str
) -> None:
    run = tmp_path / "run"
    for file in files:
        (run / file).parent.mkdir(parents=True, exist_ok=True)
        record = RunRecord(name="r", run_id="r-1", state="stopped", started="now", launcher_pid=1)
        (run / file).write_bytes(msgspec.json.encode(record))
    if flag:
        run.mkdir(exist_ok=True)
        write_config(msgspec.structs.replace(RunConfig(), device="cpu"), run / "config.yaml")
    words = [f"--run-dir={run}", "--device=cpu", *([flag] if flag else [])]
    assert main([*words, "--only=configuration,disk"]) == 1
    out = capsys.readouterr().out
    assert "FAILED   configuration" in out and message in out and "ok       disk: " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only=dsik"], "--only: got dsik, expected names of checks: configuration, memory"),
        (["--timeout-s=soon"], "--timeout-s: got 'soon', expected seconds above 0"),
        (["--json"], "--json: needs a value"),
        (["--learner.lrr=1"], "did you mean"),
        (["--check"], "expected the keys of a run"),
        (["disk"], "'disk': unexpected"),
    ],
)
def test_mistakes_are_refused(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_the_help_names_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(check.name.replace(" ", "-") in text for check in CHECKS)


def test_own_flags_and_those_of_the_run() -> None:
    own, left = split_own(["--json", "a.json", "--actors", "2", "--only=disk", "--timeout_s", "5"])
    assert own == {"json": "a.json", "only": "disk", "timeout_s": "5"} and left == ["--actors", "2"]


def test_a_line_says_what_to_do_only_where_something_is_to_be_done() -> None:
    finding = Finding(check="disk", status="ok", measured="9 MB/s", normal="10", advice="buy one")
    assert finding.line() == "ok       disk: 9 MB/s; normal: 10"
    failed = msgspec.structs.replace(finding, status="failed", subject="speed")
    assert failed.line() == "FAILED   disk (speed): 9 MB/s; normal: 10; do: buy one"
    assert json.loads(msgspec.json.encode(finding))["status"] == "ok"
