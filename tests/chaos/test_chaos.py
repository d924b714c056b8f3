"""Thirty faults, and all the promises hold. Three hundred and more by hand: bench/chaos.py, docs/results/chaos-*.md."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chaos.campaign import Plan, run_campaign
from tests.chaos.faults import KINDS, UNUSUAL, Fault

FAULTS = 30
KILLED = ("buffer-0", "learner-0", "actor-1", "teacher-0")
"""Of each role one, for sure; the seed draws the other faults."""


def test_thirty_faults_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    """The ledger, an onlooker on the wire and the learner tell the same: each token trained once, none too stale."""
    plan = Plan(
        faults=FAULTS,
        seed=4,
        kinds=tuple(kind for kind in KINDS if kind not in UNUSUAL),
        surely=tuple(Fault("kill", name) for name in KILLED),
        steps=60,
        gap_s=(0.2, 1.0),
        end_timeout_s=240.0,
        arguments=("--learner.tasks.eval_greedy=32", "--learner.tasks.eval_sampled=64"),
    )
    said: list[str] = []
    verdict = run_campaign(plan, tmp_path / "run", said.append)
    assert not verdict.complaints, "\n".join([*verdict.complaints, *said])
    assert len(verdict.struck) == FAULTS
    killed = [one.fault.target for one in verdict.struck if one.fault.kind == "kill"]
    assert set(KILLED) <= set(killed), "every role dies at least once"
    assert verdict.summary["workers"]["buffer-0"]["restarts"] >= 1
    assert verdict.summary["workers"]["learner-0"]["restarts"] >= 1
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()  # the summary has the last learner's only
    first, *_, last = [row for row in map(json.loads, lines) if row["kind"] == "eval"]
    assert (first["step"], last["step"]) == (0, plan.steps)
    assert last["eval/reverse_kl"] < 0.8 * first["eval/reverse_kl"], "training did not get on"
    assert last["eval/accuracy_greedy"] > first["eval/accuracy_greedy"]
