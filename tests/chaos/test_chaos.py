"""Over fifty faults in four runs, and all the promises hold. Three hundred by hand: bench/faults/chaos.py --runs 10,
and docs/results/reliability.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.patience import RUN_PATIENCE_S
from tests.sim.chaos.campaign import run_campaign
from tests.sim.chaos.faults import KINDS, UNUSUAL, Fault
from tests.sim.chaos.plan import Plan


class Case(NamedTuple):
    """One run."""

    seed: int
    faults: int
    bound: int
    release: str
    group: int
    batch: int
    surely: tuple[Fault, ...]
    """The seed draws the other faults."""


KILLED = tuple(Fault("kill", name) for name in ("buffer-0", "learner-0", "actor-1", "teacher-0"))
"""Of each role one."""
SAVED = Fault(
    "trap",
    "learner-0",
    others=("launcher",),
    point="stillhouse.learner.checkpoints.checkpoint:write_checkpoint",
    side="after",
)
"""The whole run dies when a checkpoint is there."""
TRAINED = Fault("trap", "learner-0", others=("buffer-0",), point="stillhouse.recording.writer:BatchRecorder.add")
"""The learner dies when the buffer knows of a trained batch and the record does not, and the buffer with it."""
CASES = (
    Case(4, 14, 1, "deadline", 4, 18, (*KILLED, SAVED)),
    Case(5, 13, 0, "rollout", 4, 16, (Fault("interrupt", "run"), TRAINED, SAVED)),
    Case(6, 13, 4, "segment", 8, 20, (Fault("relaunch", "run"), TRAINED, Fault("interrupt", "run"))),
    Case(7, 14, 2, "deadline", 4, 16, (*KILLED, TRAINED, Fault("relaunch", "run"))),
)


def test_the_cases_have_over_fifty_faults_and_every_bound_and_policy() -> None:
    assert sum(case.faults for case in CASES) == 54
    assert {case.bound for case in CASES} == {0, 1, 2, 4}
    assert {case.release for case in CASES} == {"rollout", "segment", "deadline"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.release}-bound-{case.bound}")
def test_faults_lose_nothing_and_leave_nothing(tmp_path: Path, case: Case) -> None:
    """The ledger, an onlooker on the wire, the learner and the audit of the record tell the same: each token trained
    once, none too stale, no sample skipped."""
    plan = Plan(
        faults=case.faults,
        seed=case.seed,
        kinds=tuple(kind for kind in KINDS if kind not in UNUSUAL),
        surely=case.surely,
        steps=36,
        max_staleness=case.bound,
        gap_s=(0.2, 1.0),
        end_timeout_s=RUN_PATIENCE_S,
        arguments=(
            "--learner.tasks.eval_greedy=32",
            "--learner.tasks.eval_sampled=64",
            f"--learner.tasks.group_size={case.group}",
            "--learner.checkpoint_every=3",
            f"--buffer.batch_rollouts={case.batch}",
            f"--buffer.release={case.release}",
        ),
    )
    said: list[str] = []
    verdict = run_campaign(plan, tmp_path / "run", said.append)
    assert not verdict.complaints, "\n".join([*verdict.complaints, *said])
    assert len(verdict.struck) >= case.faults - 2, "on a busy machine the run may end before the last of them"
    struck = [one.fault for one in verdict.struck]
    assert set(case.surely) <= set(struck), "what was to strike for sure did"
    assert verdict.report is not None and verdict.report.steps_kept == plan.steps
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()  # the summary has the last learner's only
    first, *_, last = [row for row in map(json.loads, lines) if row["kind"] == "eval"]
    assert (first["step"], last["step"]) == (0, plan.steps)
    assert last["eval/reverse_kl"] < first["eval/reverse_kl"], "training did not get on"
