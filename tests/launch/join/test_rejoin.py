"""What those who joined do while their run is away."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import builtin
from buffer.config import BufferConfig
from buffer.state import BufferState
from launch.config.files import write_config
from launch.config.run import RunConfig
from launch.config.tree import build
from launch.errors import ConfigError, LaunchError
from launch.join.command import look, parse_join
from launch.join.rejoin import account, same_run, wait_for_run
from launch.join.status import JoinedWorker, JoinSummary
from launch.join.target import RunIsFinished, find_target
from launch.processes.signals import StopRequests
from launch.processes.slots import Ending
from protocol import messages as m
from tests.wire import RUN, ScriptedBuffer, acknowledgement


class Looks:
    """One outcome after the other."""

    def __init__(self, *outcomes: Exception | str) -> None:
        self.outcomes = list(outcomes)

    def __call__(self) -> str:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_a_run_is_looked_for_until_it_is_back_and_no_longer_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.join.rejoin.LOOK_EVERY_S", 0.0)
    away = LaunchError("no answer")
    assert wait_for_run(Looks(away, away, "there"), 1000.0, StopRequests()) == "there"
    monkeypatch.setattr("launch.join.rejoin.LOOK_EVERY_S", 1000.0)
    ending = wait_for_run(Looks(away), 0.05, StopRequests())
    assert ending == Ending(False, "the run did not come back in 0.05 s: no answer", 1)


def test_a_run_that_finished_meanwhile_or_is_no_longer_ours_is_not_waited_for() -> None:
    stops = StopRequests()
    assert wait_for_run(Looks(RunIsFinished("it is over")), 1000.0, stops) == Ending(True, "it is over", 0)
    other = wait_for_run(Looks(ConfigError("actor.engine: got torch, expected sglang")), 1000.0, stops)
    assert isinstance(other, Ending) and other.exit_code == 1 and "got torch" in other.reason


def test_a_signal_ends_the_waiting() -> None:
    with StopRequests() as stops:
        os.kill(os.getpid(), signal.SIGTERM)
        ending = wait_for_run(Looks(LaunchError("no answer")), 1000.0, stops)
    assert ending == Ending(False, "stopped by SIGTERM while the run was away", 143)


def test_a_run_is_known_by_its_name_and_a_launch_by_what_follows() -> None:
    assert same_run("my-run-12ab34cd", "my-run-99999999")
    assert not same_run("my-run-12ab34cd", "my-12ab34cd")


def test_at_an_address_only_the_run_that_was_joined_counts_as_back(tmp_path: Path) -> None:
    models = {"student": str(builtin.STUDENT_DIR), "teacher": str(builtin.TEACHER_DIR)}
    write_config(build(RunConfig, {"models": models}), tmp_path / "config.yaml")
    snapshot = BufferState(BufferConfig(), version=m.WeightVersion(1, 7)).snapshot(0.0)
    with ScriptedBuffer(lambda got: snapshot if isinstance(got, m.SnapshotWanted) else acknowledgement(got)) as peer:
        line = parse_join([peer.address, f"--config={tmp_path / 'config.yaml'}", "--teachers=1"])
        assert line is not None and RUN == "run-1"
        found = look(line, "run-0")
        found.link.close()
        assert (found.link.run_id, found.link.snapshot, found.joining.roles) == (RUN, snapshot, ("teacher",))
        with pytest.raises(LaunchError, match="another run listens there now, run-1"):
            look(line, "another-0")


def test_a_folder_tells_a_finished_run_from_one_that_broke_off(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    for state, expected in (("finished", RunIsFinished), ("stopped", LaunchError), ("failed", LaunchError)):
        record = {"name": "r", "run_id": "r-1", "state": state, "started": "now", "launcher_pid": 1, "exit_code": 0}
        (tmp_path / "run.json").write_text(json.dumps(record))
        with pytest.raises(LaunchError, match="is over") as caught:
            find_target(str(tmp_path))
        assert type(caught.value) is expected


def stay(run_id: str, tokens: int, codes: list[int]) -> JoinSummary:
    worker = JoinedWorker(tokens=tokens, done=tokens // 10, restarts=1, exit_codes=codes)
    return JoinSummary(
        run="r", run_id=run_id, ok=False, reason="", exit_code=1, broke_off=True, wall_s=1.0, ready_s=len(codes),
        workers={"actor-x-0": worker},
    )  # fmt: skip


def test_the_account_counts_each_launch_of_the_run_once() -> None:
    """The buffer of one launch counts on over two stays; one that was lost sight of told nothing the second time."""
    stays = [stay("r-1", 100, [1]), stay("r-2", 30, [1, 1]), stay("r-2", 50, [143]), stay("r-2", 0, [0])]
    told = account(stays, Ending(True, "all done", 0), 9.0)
    worker = told.workers["actor-x-0"]
    assert (worker.tokens, worker.done, worker.restarts, worker.exit_codes) == (150, 15, 4, [1, 1, 1, 143, 0])
    assert not told.broke_off and account(stays, Ending(False, "gone", 1), 9.0).broke_off
    assert (told.ok, told.reason, told.exit_code, told.stays, told.wall_s, told.ready_s) == (
        True, "all done", 0, 4, 9.0, 1,
    )  # fmt: skip


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf"])
def test_a_wait_is_a_number_of_seconds(text: str) -> None:
    with pytest.raises(ConfigError, match="--wait-s: got"):
        parse_join(["run", f"--wait-s={text}"])
