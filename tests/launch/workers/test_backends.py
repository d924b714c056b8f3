"""Workers by another backend than this machine's own, and what crosses to it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import msgspec
import psutil
import pytest
from launcher_process import HERE, ROOT, Launcher, StartLauncher

from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.workers.start_role import StartRole
from stillhouse.protocol.context import ExitCode
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, eventually


@pytest.fixture
def elsewhere(start_launcher: StartLauncher, monkeypatch: pytest.MonkeyPatch) -> StartLauncher:
    """A launcher whose workers are those of tests.subprocess_backend."""
    monkeypatch.setenv("TEST_BACKEND", "subprocess")
    return start_launcher


def workers(launcher: Launcher) -> list[psutil.Process]:
    return [psutil.Process(launcher.pids(name)[-1]) for name in ("buffer-0", "learner-0", "teacher-0", "actor-0")]


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_a_run_on_another_backend_restarts_a_killed_actor_and_its_workers_leave_when_they_are_asked_to(
    elsewhere: StartLauncher,
) -> None:
    launcher = elsewhere()
    launcher.until_ready()
    assert {Path(process.cwd()) for process in workers(launcher)} == {Path("/")}
    os.kill(launcher.pids("actor-0")[0], signal.SIGKILL)
    eventually(lambda: len(launcher.pids("actor-0")) == 2, "actor-0 starts again")
    eventually(lambda: launcher.log("actor-0").count("actor-0 does") == 2, "the new one works")
    processes = workers(launcher)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 130, launcher.said
    ends = {name: (w["restarts"], w["exit_codes"]) for name, w in launcher.summary()["workers"].items()}
    asked = {name: (0, [ExitCode.TERMINATED]) for name in ("buffer-0", "learner-0", "teacher-0")}
    assert ends == asked | {"actor-0": (1, [-signal.SIGKILL, ExitCode.TERMINATED])}
    assert gone(processes)


@pytest.mark.slow
def test_its_workers_do_not_outlive_a_launcher_that_is_killed(elsewhere: StartLauncher) -> None:
    launcher = elsewhere({"actor-0": "deaf"})
    launcher.until_ready()
    processes = workers(launcher)
    launcher.process.kill()
    launcher.wait()
    eventually(lambda: gone(processes), "everybody is gone")


ON_IT = """
import sys
from stillhouse.launch.{module} import main
from tests.subprocess_backend import SubprocessBackend
sys.exit(main(sys.argv[1:], SubprocessBackend))
"""


@pytest.mark.slow
def test_a_run_and_a_join_with_real_roles_on_another_backend(tmp_path: Path) -> None:
    """The run has no actor of its own: it ends only if the one that joins works, with the run's keys."""
    run_dir = tmp_path / "run"
    small = ("--buffer.batch_rollouts=8", "--learner.tasks.group_size=4", "--learner.eval_every=0", "--steps=2")
    commands = {
        "run": (f"--run-dir={run_dir}", "--actors=0", "--teachers=1", "--buffer.encrypt=on", *small),
        "join.command": (str(run_dir), "--actors=1", "--name-prefix=late"),
    }
    with contextlib.ExitStack() as stack:
        launchers: dict[str, subprocess.Popen[bytes]] = {}
        for module, arguments in commands.items():
            output = stack.enter_context((tmp_path / f"{module}.out").open("wb"))
            command = [sys.executable, "-c", ON_IT.format(module=module), *arguments]
            launchers[module] = stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            )
            stack.callback(launchers[module].kill)
            eventually(lambda: (run_dir / "run.json").exists(), "a run folder")
        codes = {module: process.wait(RUN_PATIENCE_S) for module, process in launchers.items()}
    assert codes == {"run": 0, "join.command": 0}, [file.read_text() for file in tmp_path.glob("*.out")]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["tokens"]["balanced"] and summary["tokens"]["trained"] > 0
    assert summary["workers"]["actor-late-0"]["joined"] and summary["workers"]["actor-late-0"]["tokens"] > 0
    for folder in (run_dir, run_dir / "joined" / "late"):
        assert not (folder / "logs" / "forkserver.log").exists(), "this machine's own backend was used"


def test_what_crosses_to_a_backend_has_no_process_descriptor_or_path_in_it() -> None:
    for name, kind in get_type_hints(StartRole).items():
        assert not set(name.split("_")) & {"pid", "fd", "path", "dir", "file", "folder"}, name
        assert kind in (str, int, bool, float) or name == "role", f"{name}: {kind}"


def test_a_role_starts_from_json_where_the_run_folder_has_another_name(tmp_path: Path) -> None:
    """From another folder, on a copy of the run folder; the one that it was made for is gone."""
    here, there, cwd = tmp_path / "here", tmp_path / "there" / "run", tmp_path / "cwd"
    (here / "logs").mkdir(parents=True)
    cwd.mkdir()
    write_config(build(RunConfig, {"actors": 3}), here / "config.yaml")
    start = StartRole(
        entry="fake_roles:tell",
        role="actor",
        index=1,
        name="actor-1",
        incarnation="i-1",
        run_id="r-1",
        buffer_address="tcp://127.0.0.1:1",
        resume=True,
        threads=2,
    )
    line = msgspec.json.encode(start)
    assert msgspec.json.decode(line, type=StartRole) == start
    assert str(tmp_path).encode() not in line
    shutil.copytree(here, there)
    shutil.rmtree(here)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "stillhouse.launch.workers.roles", str(there)],
        stdin=subprocess.PIPE,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(HERE), str(ROOT)))},
    ) as process:
        assert process.stdin is not None
        process.stdin.write(line + b"\n")
        process.stdin.flush()
        code = process.wait(PATIENCE_S)
    log = (there / "logs" / "actor-1.log").read_text()
    assert code == 0, log
    assert "threads 2, told 2" in log
    assert "actor-1 i-1 r-1 tcp://127.0.0.1:1 resume=True actors=3" in log and str(there) in log
