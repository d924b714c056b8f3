"""Whole runs with an environment that fails: what the user sees of it, and that it harms only its own rollouts."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.conftest import Launched

Launch = Callable[..., Launched]
ENVIRONMENTS = """
import time

from stillhouse.actors.envs.single_turn import SingleTurn


class Failing(SingleTurn):
    async def step(self, action):
        raise KeyError(f"no tool for {action.text}")


class Sleepy(SingleTurn):
    async def reset(self, task):
        self.sleepy = task.seed % 8 == 0
        return await super().reset(task)

    async def step(self, action):
        if self.sleepy:
            time.sleep(3600)
        return await super().step(action)
"""
FEW = ("--actors=1", "--teachers=1", "--learner.eval_every=0", "--launch.status_every_s=0.2")


def environments(folder: Path) -> Path:
    """A user's module, where the command is typed; and a configuration that names what is in it."""
    (folder / "own_environments.py").write_text(ENVIRONMENTS)
    config = folder / "own.toml"
    config.write_text('[actor.environments.sleepy]\nname = "own_environments:Sleepy"\nstep_timeout_s = 1.0\n')
    return config


def test_an_environment_that_always_fails_is_seen_with_its_cause_and_ends_the_run_with_it(
    launch: Launch, tmp_path: Path
) -> None:
    environments(tmp_path)
    run = launch(
        *FEW,
        "--steps=3",
        "--learner.tasks.env=own_environments:Failing",
        "--actor.max_concurrent_rollouts=4",
        "--actor.max_failures_in_a_row=30",
        "--launch.max_restarts=0",
    )
    assert run.wait() == 1, run.text()
    text, summary = run.text(), run.summary()
    assert len(re.findall(r"^a rollout failed \(env_error_KeyError\): actor-0: KeyError: ", text, re.M)) == 1
    lines = [line for line in text.splitlines() if line.startswith("[") and " step 0/3 " in line]
    failing = [line for line in lines if "| FAILED ROLLOUTS " in line]
    assert failing and max(map(len, lines)) < 1500, text
    assert re.search(r"FAILED ROLLOUTS \d+, newest env_error_KeyError: actor-0: KeyError: .*no tool for", failing[-1])
    assert "TooManyFailures: 30 rollouts in a row failed" in text
    assert re.search(r"failed rollouts: \d+, newest env_error_KeyError: actor-0: KeyError: ", summary["reason"])
    failed = summary["failed_rollouts"]
    assert list(failed) == ["env_error_KeyError"] and failed["env_error_KeyError"]["n"] >= 20
    assert len(failed["env_error_KeyError"]["examples"]) == 3
    assert summary["tokens"]["dropped"].keys() <= {"env_error_KeyError", "run_ended", "actor_lost"}


def test_an_environment_that_sometimes_blocks_harms_its_own_rollouts_only(launch: Launch, tmp_path: Path) -> None:
    config = environments(tmp_path)
    run = launch(f"--config={config}", *FEW, "--steps=100000", "--learner.tasks.env=sleepy")
    run.until(lambda: "| FAILED ROLLOUTS " in run.text(), "a failed rollout")
    before = len(run.steps())
    run.until(lambda: len(run.steps()) >= before + 3, "three more steps")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.text()
    summary: dict[str, Any] = run.summary()
    assert summary["steps"] >= before + 3 and summary["workers"]["actor-0"]["restarts"] == 0
    assert list(summary["failed_rollouts"]) == ["env_timeout"]
    told = summary["failed_rollouts"]["env_timeout"]["newest"]
    assert re.fullmatch(r"actor-0: step has blocked its thread for 1 s, at own_environments\.py:19 in step", told), told
