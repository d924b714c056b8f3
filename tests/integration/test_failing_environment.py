"""Whole runs with an environment that fails: what the user sees of it, and that it harms only its own rollouts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

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
    assert (
        len(re.findall(r"^a rollout failed \(env_error_KeyError\): actor-0: KeyError: .*no tool for", text, re.M)) == 1
    )
    lines = [line for line in text.splitlines() if line.startswith("[") and " step 0/3 " in line]
    failing = [line for line in lines if "| FAILED ROLLOUTS " in line]
    assert failing and max(map(len, lines)) < 1500, text
    assert re.search(r"FAILED ROLLOUTS \d+, newest env_error_KeyError: actor-0: KeyE", failing[-1])
    assert "TooManyFailures: 30 rollouts in a row failed" in text and "rollouts_running.py" not in text
    assert re.search(r"failed rollouts: \d+, newest env_error_KeyError: actor-0: KeyError: ", summary["reason"])
    failed = summary["failed_rollouts"]
    assert list(failed) == ["env_error_KeyError"] and failed["env_error_KeyError"]["n"] >= 20
    assert len(failed["env_error_KeyError"]["examples"]) == 3
    assert summary["tokens"]["dropped"].keys() <= {"env_error_KeyError", "run_ended", "actor_lost"}
