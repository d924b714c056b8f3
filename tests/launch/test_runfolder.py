"""Run folders: who may use one, and what is kept of what was there before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stillhouse.buffer.journal.database import Database, StoreUnwritable
from stillhouse.launch.errors import ConfigError, LaunchError
from stillhouse.launch.runfolder import RunFolder, read_record, resumes
from stillhouse.protocol.atomic_file import not_a_link
from stillhouse.protocol.keys import ClientKeys, run_client_keys
from stillhouse.recording.append_file import AppendFile, Unwritten


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_without_a_folder_gets_one_by_the_time_and_latest_points_to_it() -> None:
    first = RunFolder.open(None, resume=False)
    second = RunFolder.open(None, resume=False)
    assert first.path != second.path
    assert Path("runs/latest").resolve() == second.path
    assert second.logs.is_dir()
    assert second.record.run_id != first.record.run_id
    first.close()
    second.close()


def test_resume_or_start_goes_on_where_a_run_is_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert not resumes(tmp_path / "empty", "") and not resumes(None, "big")
    for name in ("runs/big", "other"):
        RunFolder.open(Path(name), resume=False).close()
    assert resumes(None, "big") and resumes(tmp_path / "other", "big")
    with pytest.raises(ConfigError, match="--resume-or-start: which run"):
        resumes(None, "")


def test_a_folder_in_use_is_refused_and_the_user_is_named(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", resume=False)
    for resume in (False, True):
        with pytest.raises(LaunchError, match=f"in use by another launcher .pid {os.getpid()}"):
            RunFolder.open(tmp_path / "run", resume=resume)
    folder.close()


@pytest.mark.parametrize("plant", ["link", "dangling link", "other name", "plain file"])
def test_what_somebody_else_called_lock_is_left_alone(tmp_path: Path, plant: str) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    run.mkdir()
    (run / "other").touch()
    if plant != "dangling link":
        precious.write_text("precious")
    match plant:
        case "other name":
            (run / "lock").hardlink_to(precious)
        case "plain file":
            (run / "lock").write_text("precious")
        case _:
            (run / "lock").symlink_to(precious)
    with pytest.raises(LaunchError):
        RunFolder.open(run, resume=False)
    kept = run / "lock" if plant == "plain file" else precious
    assert not kept.exists() if plant == "dangling link" else kept.read_text() == "precious"


@pytest.mark.parametrize("file", ["logs/launcher.log", "metrics.jsonl", "journal/owner", "latest"])
def test_nothing_is_written_through_a_link_at_a_path_that_others_can_foresee(tmp_path: Path, file: str) -> None:
    """In the folder of somebody else, which a user resumes."""
    RunFolder.open(tmp_path / "run", resume=False).close()
    precious, planted = tmp_path / "precious", tmp_path / "run" / file
    precious.write_bytes(b"precious")
    planted.parent.mkdir(exist_ok=True)
    planted.symlink_to(precious)
    folder = RunFolder.open(tmp_path / "run", resume=True)
    with pytest.raises((OSError, StoreUnwritable), match="symbolic links"):
        match file:
            case "logs/launcher.log":
                folder.log_launcher()
            case "metrics.jsonl":
                rows = Unwritten()
                AppendFile(planted, rows).append(b"row\n", rows=1)
                assert rows.rows_total == 1
                raise OSError("counted; symbolic links")
            case "journal/owner":
                Database(planted.parent, sync="process")
            case _:
                open(planted, "wb", opener=not_a_link).close()
    assert precious.read_bytes() == b"precious"
    folder.close()


@pytest.mark.parametrize("state", ["finished", "failed", "running"])
def test_a_folder_that_holds_a_run_is_only_used_again_by_resume(tmp_path: Path, state: str) -> None:
    folder = RunFolder.open(tmp_path / "run", resume=False)
    if state != "running":  # "running": as after SIGKILL of the launcher
        folder.finish(0 if state == "finished" else 1)
    folder.close()
    with pytest.raises(LaunchError, match=f"holds a run already .*{state}.*--resume"):
        RunFolder.open(tmp_path / "run", resume=False)
    again = RunFolder.open(tmp_path / "run", resume=True)
    assert again.record.launches == 2
    assert again.record.run_id != folder.record.run_id  # stray workers of the former launch are refused
    again.close()


def test_resume_keeps_the_results_of_the_launch_before_under_its_number(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", resume=False)
    (folder.path / "summary.json").write_text("first")
    folder.close()
    folder = RunFolder.open(tmp_path / "run", resume=True)
    assert not (folder.path / "summary.json").exists()
    assert (folder.path / "summary.1.json").read_text() == "first"
    folder.close()


def test_resume_without_a_path_takes_the_newest_run() -> None:
    with pytest.raises(LaunchError, match="--resume: runs/latest does not exist"):
        RunFolder.open(None, resume=True)
    RunFolder.open(None, resume=False, name="a").close()
    RunFolder.open(None, resume=False, name="b").close()
    folder = RunFolder.open(None, resume=True)
    assert folder.path.name == "b"
    folder.close()


def test_latest_is_the_run_that_it_points_to_and_no_name_of_another() -> None:
    for path, name in ((None, "latest"), (Path("runs/latest"), "")):
        with pytest.raises(LaunchError, match="runs/latest is the link to the newest run"):
            RunFolder.open(path, resume=False, name=name)
    RunFolder.open(None, resume=False, name="a").close()
    with pytest.raises(LaunchError, match="runs/a holds a run already"):
        RunFolder.open(Path("runs/latest"), resume=False)
    folder = RunFolder.open(Path("runs/latest"), resume=True)
    assert folder.path == Path("runs/latest").resolve() == Path("runs/a").absolute()
    folder.close()


def test_resume_where_no_run_is_says_so_and_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="holds no run"):
        RunFolder.open(tmp_path / "nothing", resume=True)
    assert not (tmp_path / "nothing").exists()


def test_a_folder_full_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter-1.tex").write_text("x")
    with pytest.raises(LaunchError, match=r"neither empty nor a run folder \(it holds chapter-1.tex\)"):
        RunFolder.open(tmp_path / "thesis", resume=False)
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter-1.tex"]


def test_the_end_is_recorded(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", resume=False)
    folder.finish(130)
    folder.close()
    record = read_record(tmp_path / "run")
    assert record is not None
    assert (record.state, record.exit_code, record.launcher_pid) == ("stopped", 130, os.getpid())


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", resume=False)
    folder.log_path("actor-0").write_text("".join(f"line {i}\n" for i in range(5000)))
    assert folder.log_tail("actor-0", lines=2) == "    line 4998\n    line 4999"
    assert folder.log_tail("actor-0", lines=1).strip() == "line 4999"
    assert folder.log_tail("actor-1") == "    (no log)"
    folder.close()


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("ERROR stillhouse.learner.worker: no room", "12:00:00.000 a ERROR stillhouse.learner.worker: no room"),
        ("ERROR stillhouse.a: raised\nTraceback\nValueError: bad", "ValueError: bad"),
        ("ERROR stillhouse.a: of an earlier launch\nINFO stillhouse.a: actor-0 (e4) starts, pid 7", ""),
        ("INFO stillhouse.a: all is well", ""),
    ],
)
def test_the_last_error_of_a_log_is_found_behind_remarks(tmp_path: Path, lines: str, error: str) -> None:
    folder = RunFolder.open(tmp_path / "run", resume=False)
    said = [f"12:00:00.000 a {line}" if "stillhouse." in line else line for line in lines.split("\n")]
    said.append("12:00:00.000 a INFO stillhouse.launch.workers.main_process: a ends with exit code 4")
    folder.log_path("actor-0").write_text("\n".join(said) + "\n")
    assert (folder.last_error("actor-0"), folder.last_error("actor-1")) == (error, "")
    folder.close()


def test_keys_are_made_once_kept_over_launches_and_out_of_sight_while_links_are_plain(tmp_path: Path) -> None:
    path = tmp_path / "run"
    seen: list[ClientKeys | None] = []
    for resume, encrypted in ((False, True), (True, True), (True, False), (True, True)):
        folder = RunFolder.open(path, resume=resume)
        folder.keep_keys(["actor-0"], encrypted=encrypted)
        seen.append(run_client_keys(path, "actor", "actor-0"))
        folder.close()
    assert seen[0] is not None
    assert seen == [seen[0], seen[0], None, seen[0]]
