"""Figures from heartbeats: differences of running totals, over workers that come, go and begin anew."""

from __future__ import annotations

import pytest

from learner.reports.worker_figures import WorkerFigures
from protocol.messages import Ledger, LedgerCounts, PeerView, Role, Snapshot, WeightVersion

NONE = LedgerCounts(0, 0, {}, {}, 0, 0)
V = WeightVersion(0, 1)


def snapshot(*peers: PeerView) -> Snapshot:
    return Snapshot(0.0, "running", "", V, V, Ledger(NONE, NONE, NONE, {}, NONE), {}, {}, 4, peers)


def peer(role: Role, name: str, alive: bool = True, **stats: float) -> PeerView:
    return PeerView(role, name, alive, None, 0.0, stats, 0, 0, 0)


def test_means_are_of_what_was_added_since_the_step_before() -> None:
    figures = WorkerFigures()
    figures.update(snapshot(peer("actor", "actor-0", generation_s_total=100.0, generations_total=10.0)))
    now = figures.update(
        snapshot(
            peer("actor", "actor-0", generation_s_total=103.0, generations_total=11.0),
            peer("actor", "actor-1", generation_s_total=1.0, generations_total=1.0),  # it has come since
        )
    )
    assert now["actors/generation_s"] == pytest.approx((3.0 + 1.0) / 2)


def test_a_worker_that_began_anew_counts_from_zero() -> None:
    figures = WorkerFigures()
    figures.update(snapshot(peer("teacher", "teacher-0", score_s_total=50.0, scored_items_total=10.0)))
    now = figures.update(snapshot(peer("teacher", "teacher-0", score_s_total=4.0, scored_items_total=2.0)))
    assert now["teachers/score_s"] == 2.0


def test_nothing_done_has_no_mean() -> None:
    figures = WorkerFigures()
    same = snapshot(peer("actor", "actor-0", generation_s_total=5.0, generations_total=1.0, busy_fraction=0.5))
    figures.update(same)
    now = figures.update(same)
    assert "actors/generation_s" not in now and now["actors/busy_fraction"] == 0.5


def test_only_who_is_there_counts_among_the_busy() -> None:
    now = WorkerFigures().update(
        snapshot(
            peer("actor", "actor-0", running=3.0, busy_fraction=1.0),
            peer("actor", "actor-1", running=2.0, busy_fraction=0.5),
            peer("actor", "actor-2", alive=False, running=9.0, busy_fraction=0.0),
        )
    )
    assert (now["actors/alive"], now["actors/running"], now["actors/busy_fraction"]) == (2.0, 5.0, 0.75)
    assert now["teachers/alive"] == 0.0 and "teachers/busy_fraction" not in now


def test_what_environments_report_is_per_finished_rollout() -> None:
    figures = WorkerFigures()
    stats = {"env_calculator_calls_total": 6.0, "rollouts_finished_total": 4.0}
    now = figures.update(snapshot(peer("actor", "actor-0", True, **stats)))
    assert now["env/calculator_calls_per_rollout"] == 1.5
