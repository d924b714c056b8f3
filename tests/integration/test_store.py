"""Whole runs with a store: one goes on in an empty folder, and one whose store goes away trains on."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.integration.conftest import Launched
from tests.s3_server import BUCKET, Gate, Server, environment_of, objects, s3_server

pytestmark = pytest.mark.slow
SETTINGS = ("--learner.eval_every=0", "--learner.checkpoint_every=2", "--actors=1", "--learner.keep_checkpoints=2")
URL = f"s3://{BUCKET}/big"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with s3_server() as made:
        for name, value in environment_of(made.url).items():
            monkeypatch.setenv(name, value)
        yield made


def steps_in_store(server: Server) -> list[int]:
    """Steps of the checkpoints with a manifest."""
    names = [name.split("/") for name in objects(server) if name.endswith("/manifest.json")]
    return sorted(int(parts[2].split("_")[1]) for parts in names)


def test_a_run_goes_on_in_an_empty_folder(launch: Callable[..., Launched], server: Server) -> None:
    run = launch("--steps=9", *SETTINGS, f"--store={URL}")
    run.until(lambda: len(run.steps()) >= 4, "four steps")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.text()
    stopped_at = len(run.steps())
    assert steps_in_store(server)[-1] == stopped_at, "the last checkpoint is there, too"
    assert len(steps_in_store(server)) <= 2, "older ones are deleted"
    secret = [name for name in objects(server) if "key" in name or "journal" in name]
    assert not secret, secret

    again = launch("--steps=9", *SETTINGS, f"--store={URL}", folder="again")
    assert again.process.wait(60) == 2 and "has checkpoints of a run" in again.text(), again.text()
    shutil.rmtree(again.run_dir, ignore_errors=True)

    elsewhere = run.run_dir.with_name("elsewhere")
    elsewhere.mkdir()
    shutil.move(run.record, elsewhere / "run.record")  # a file of the user's, as the prompts are
    shutil.rmtree(run.run_dir)
    there = launch("--resume", f"--store={URL}", folder="elsewhere/run")
    assert there.wait() == 0, there.text()
    assert f"going on from step {stopped_at}" in there.text()
    assert there.summary()["steps"] == 9 and there.summary()["tokens"]["balanced"]
    assert [row["step"] for row in there.steps()] == list(range(stopped_at + 1, 10))
    assert steps_in_store(server)[-1] == 9
    there.expect_clean_audit()


def test_a_store_that_goes_away_costs_no_step_and_is_counted(
    launch: Callable[..., Launched], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Gate(server) as gate:
        monkeypatch.setenv("AWS_ENDPOINT_URL", gate.url)
        run = launch("--steps=8", *SETTINGS, f"--store={URL}")
        run.until(lambda: bool(steps_in_store(server)), "a checkpoint in the store")
        gate.shut_after_bytes = 100_000
        run.until(lambda: "could not be written" in (run.run_dir / "logs" / "learner-0.log").read_text(), "the failure")
        left = run.wait()
    log = (run.run_dir / "logs" / "learner-0.log").read_text()
    assert "no answer from" in log or "could not be written" in log
    assert run.summary()["steps"] == 8 and run.summary()["tokens"]["balanced"], run.text()
    assert left in (0, 1), run.text()
    saved = sorted((run.run_dir / "checkpoints").glob("step_*"))
    assert saved[-1].name == "step_000008", "the run's folder has what the store lacks"
    run.expect_clean_audit()


def test_a_store_out_of_reach_is_refused_before_anything_starts(
    launch: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    pytest.importorskip("s3fs")
    run = launch("--steps=8", *SETTINGS, f"--store={URL}")
    assert run.process.wait(120) == 2
    assert "store: s3://runs/big" in run.text() and "no answer from http://127.0.0.1:9" in run.text()
    assert not run.run_dir.exists()
