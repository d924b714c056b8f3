"""Killed at a random step and resumed, the whole system has consumed what an undisturbed run consumes.

In the synchronous mode, where what is due in each step is known: the same tasks, tokens and losses, step by step, and
the same ledger."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.integration.conftest import Launched, alive
from tests.patience import PATIENCE_S

STEPS = 8
ARGUMENTS = (
    "--actors=2",
    "--teachers=2",
    f"--steps={STEPS}",
    "--seed=5",
    "--max-staleness=0",
    "--buffer.batch_rollouts=8",
    "--learner.checkpoint_every=2",
    "--learner.eval_every=0",
)


def kept(run: Launched) -> list[dict[str, Any]]:
    """Step lines without those of the branch that was left."""
    rows = run.steps()
    newest = max(row["epoch"] for row in rows)
    again_from = min(row["step"] for row in rows if row["epoch"] == newest)
    return [row for row in rows if row["epoch"] == newest or row["step"] < again_from]


def consumed(summary: dict[str, Any]) -> dict[str, Any]:
    """What became of all that was consumed, in each unit; what a killed launcher had under way is not among it."""
    units = {"tokens": summary["tokens"]} | {unit: summary["ledger"][unit] for unit in ("rollouts", "segments")}
    return {unit: (count["trained"], count["masked"]) for unit, count in units.items()}


PPO = (
    "--learner.objective.coef=0",
    "--learner.objective.advantage=gae",
    "--learner.objective.advantage.value.lr=3e-3",
    "--learner.updates_per_batch=2",
    "--learner.objective.importance=decoupled",
    "--buffer.release=rollout",
)


@pytest.mark.parametrize(
    ("objective", "figures"),
    [((), ("train/loss",)), (PPO, ("train/loss", "train/value_loss", "train/updates_grad_norm"))],
    ids=["distillation", "ppo"],
)
def test_killed_at_a_random_step_and_resumed_it_has_consumed_the_same(
    launch: Callable[..., Launched], objective: tuple[str, ...], figures: tuple[str, ...]
) -> None:
    """And what belongs to the objective alone, a value head, goes on from the checkpoint too."""
    step = 1 + secrets.randbelow(STEPS - 2)  # 1: before the first checkpoint
    arguments = (*ARGUMENTS, *objective)
    undisturbed, killed = launch(*arguments, folder="undisturbed"), launch(*arguments, folder="killed")
    killed.until(lambda: len(killed.steps()) >= step, f"step {step}")
    family = psutil.Process(killed.process.pid).children(recursive=True)
    killed.kill()
    psutil.wait_procs(family, PATIENCE_S)
    assert not alive(family)
    resumed = launch(*arguments, "--resume", folder="killed")
    assert undisturbed.wait() == 0, undisturbed.text()
    assert resumed.wait() == 0, resumed.text()
    assert undisturbed.expect_clean_audit().tokens == resumed.expect_clean_audit().tokens

    ours, expected = kept(resumed), kept(undisturbed)
    assert {row["epoch"] for row in resumed.steps()} == {0, 1}, f"killed at step {step}: nothing was resumed"
    for name in ("step", "tasks_done", "train/tokens", "staleness"):
        assert [row[name] for row in ours] == [row[name] for row in expected], f"{name}, killed at step {step}"
    for name in figures:
        theirs = pytest.approx([row[name] for row in expected], rel=1e-4, abs=1e-5)
        assert [row[name] for row in ours] == theirs, f"{name}, killed at step {step}"
    assert consumed(resumed.summary()) == consumed(undisturbed.summary()), f"killed at step {step}"
