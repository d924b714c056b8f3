"""Faults of a run whose workers are spread over three hosts, 50 ms apart and with 1 % loss: all the promises hold.
More by hand: bench/faults/chaos.py --hosts 3, and docs/results/reliability.md."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.hosts.network import NotPermitted
from tests.patience import RUN_PATIENCE_S
from tests.sim.chaos.campaign import run_campaign
from tests.sim.chaos.faults import KINDS, UNUSUAL, Fault, partition
from tests.sim.chaos.limits import HOME
from tests.sim.chaos.plan import Plan

SURELY: Final = (
    partition("far1", "buffer.peer_timeout_s", "before"),
    Fault("kill", "actor-far1-0"),
    partition("far2", "buffer.peer_timeout_s", "after"),
    Fault("relaunch", "far1"),
    Fault("interrupt", "far2"),
    partition(HOME, "weights.broadcast_timeout_s", "after"),
    Fault("relaunch", "run"),
    Fault("kill", "teacher-far2-0"),
)
"""The seed draws the other faults."""


def test_faults_over_slow_links_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    plan = Plan(
        faults=11,
        seed=3,
        kinds=tuple(kind for kind in KINDS if kind not in UNUSUAL),
        surely=SURELY,
        hosts=3,
        delay_ms=50.0,
        loss=0.01,
        steps=90,
        gap_s=(0.5, 2.0),
        end_timeout_s=RUN_PATIENCE_S,
        arguments=("--learner.tasks.eval_greedy=32", "--learner.tasks.eval_sampled=64"),
    )
    said: list[str] = []
    try:
        verdict = run_campaign(plan, tmp_path / "run", said.append)
    except NotPermitted as reason:
        pytest.skip(f"no network namespaces here: {reason}")
    assert not verdict.complaints, "\n".join([*verdict.complaints, *said])
    assert set(SURELY) <= {one.fault for one in verdict.struck}, "what was to strike for sure did"
    assert verdict.report is not None and verdict.report.steps_kept == plan.steps
    workers = verdict.summary["workers"]
    assert all(workers[f"{role}-far{n}-0"]["tokens"] for role in ("actor", "teacher") for n in (1, 2)), workers
