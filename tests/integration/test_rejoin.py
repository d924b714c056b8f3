"""A run ends otherwise than well, and is resumed: those who joined it leave, or wait for it and come back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil

from protocol.ports import free_port
from tests.integration.conftest import Launched, alive
from tests.integration.joined import Join
from tests.patience import PATIENCE_S

Launch = Callable[..., Launched]
WITHOUT_WORKERS = ("--actors=0", "--teachers=0", "--learner.eval_every=0", "--learner.checkpoint_every=2")


def test_those_who_wait_come_back_with_every_resume_and_end_with_the_run(launch: Launch, join: Join) -> None:
    settings = (*WITHOUT_WORKERS, f"--buffer.bind=tcp://127.0.0.1:{free_port()}")
    run = launch(*settings, "--steps=1000")
    run.until((run.run_dir / "buffer.json").exists, "a buffer")
    joined = join(run.run_dir, "stayer", "--actors=1", "--teachers=1", "--wait-s=300")
    joined.until(lambda: len(run.steps()) >= 3, "steps with those who joined")
    run.kill()  # its buffer dies with it, and says nothing

    resumed = launch(*settings, "--steps=1000", "--resume")
    joined.until(lambda: any(row["epoch"] == 1 for row in resumed.steps()), "steps of the second launch")
    joined.until_there(2)
    os.kill(resumed.process.pid, signal.SIGINT)
    assert resumed.wait() == 130
    joined.until(lambda: joined.text().count("it is waited for") == 2, "they wait again")

    last_step = max(row["step"] for row in resumed.steps())
    again = launch(*settings, f"--steps={last_step + 2}", "--resume")
    assert again.wait() == 0, again.text() + joined.text()
    assert joined.process.wait(PATIENCE_S) == 0, joined.text()
    told, summary = joined.summary(), again.summary()
    assert told["ok"] and not told["broke_off"] and told["stays"] == 3
    assert summary["tokens"]["balanced"] and summary["steps"] == last_step + 2
    for name in ("actor-stayer-0", "teacher-stayer-0"):
        assert told["workers"][name]["exit_codes"][-1] == 0
        assert told["workers"][name]["tokens"] > summary["workers"][name]["tokens"] > 0, "of all launches, of the last"


def test_the_others_leave_with_the_run_and_waiting_can_be_stopped(launch: Launch, join: Join) -> None:
    run = launch(*WITHOUT_WORKERS, "--steps=3")
    run.until((run.run_dir / "buffer.json").exists, "a buffer")
    leaver = join(run.run_dir, "leaver", "--teachers=1")
    patient = join(run.run_dir, "patient", "--teachers=1", "--wait-s=3600")
    leaver.until_there()
    patient.until_there()
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130
    assert leaver.process.wait(PATIENCE_S) == 1, leaver.text()
    assert leaver.summary()["broke_off"] and leaver.summary()["stays"] == 1
    patient.until(lambda: "it is waited for" in patient.text(), "it waits")
    left = psutil.Process(patient.process.pid).children(recursive=True)
    assert not alive(left), "its workers leave; what waits is the launcher"
    patient.process.terminate()
    assert patient.process.wait(PATIENCE_S) == 143, patient.text()
    assert "stopped by SIGTERM while the run was away" in patient.summary()["reason"]
