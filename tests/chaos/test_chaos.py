"""Thirty faults, and all the promises hold. Three hundred and more by hand: bench/chaos.py, docs/results/chaos-*.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.campaign import Plan, run_campaign
from tests.chaos.faults import KINDS, UNUSUAL

FAULTS = 30


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_thirty_faults_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    """The ledger, an onlooker on the wire and the learner tell the same: each token trained once, none too stale."""
    plan = Plan(
        faults=FAULTS,
        seed=4,
        kinds=tuple(kind for kind in KINDS if kind not in UNUSUAL),
        steps=60,
        gap_s=(0.3, 1.5),
        arguments=("--learner.tasks.eval_greedy=32", "--learner.tasks.eval_sampled=64"),
    )
    said: list[str] = []
    verdict = run_campaign(plan, tmp_path / "run", said.append)
    assert not verdict.complaints, "\n".join([*verdict.complaints, *said])
    assert len(verdict.struck) == FAULTS
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()  # the summary has the last learner's only
    first, *_, last = [row for row in map(json.loads, lines) if row["kind"] == "eval"]
    assert (first["step"], last["step"]) == (0, plan.steps)
    assert last["eval/reverse_kl"] < 0.8 * first["eval/reverse_kl"], "training did not get on"
    assert last["eval/accuracy_greedy"] > first["eval/accuracy_greedy"]
