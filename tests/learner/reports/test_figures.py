"""Figures of rollouts and of workers, from batches and heartbeats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from stillhouse.learner.reports.figures import MAX_TAGS, RolloutFigures, WorkerFigures
from stillhouse.protocol.codec import Array
from stillhouse.protocol.messages import (
    BatchItem,
    Ledger,
    LedgerCounts,
    PeerView,
    Role,
    Snapshot,
    VersionSpan,
    WeightVersion,
)

OLD, NEW = WeightVersion(0, 3), WeightVersion(0, 4)


def item(**changes: Any) -> BatchItem:
    """A finished rollout: a prompt of two tokens, then two turns of the student, two and three tokens, one between."""
    plain: dict[str, Any] = {
        "rollout_id": "train-0-0-1",
        "task_id": 0,
        "sample_index": 0,
        "group_size": 1,
        "tag": "add",
        "teachers": ("math",),
        "end": 8,
        "spans": (VersionSpan(OLD, 2, 4), VersionSpan(NEW, 5, 8)),
        "final": True,
        "finish_reason": "stop",
        "reward": 1.0,
        "n_turns": 2,
    }
    return BatchItem(**plain | changes)


def frames(trained: list[int], mu: float, *q: float) -> list[Array]:
    n = len(trained)
    return [
        np.arange(n, dtype=np.int32),
        np.full(n, mu, np.float32),
        np.array(trained, np.uint8),
        np.array([[value] * n for value in q], np.float32).reshape(len(q), n),
    ]


SEVEN = [0, 0, 1, 1, 0, 1, 1, 1]


def test_rewards_lengths_turns_and_ends() -> None:
    items = [
        item(),
        item(reward=0.0, finish_reason="length", spans=(VersionSpan(OLD, 2, 8),), n_turns=1),
        item(reward=None, spans=(VersionSpan(NEW, 2, 3),), n_turns=6),
        item(final=False, reward=None, finish_reason=None),  # a piece of one that goes on
    ]
    figures = RolloutFigures().update(items, [frame for _ in items for frame in frames(SEVEN, -1.0, -2.0)])
    assert figures["rollouts/ended"] == 3
    assert figures["rollouts/reward_mean"] == 0.5 and figures["rollouts/reward_std"] == 0.5
    assert figures["rollouts/length_mean"] == pytest.approx((5 + 6 + 1) / 3) and figures["rollouts/length_max"] == 6
    assert figures["rollouts/truncated_share"] == pytest.approx(1 / 3)
    assert figures["rollouts/turns_mean"] == 3 and figures["rollouts/unrewarded_share"] == pytest.approx(1 / 3)
    assert not any(name.startswith("rollouts/add/") for name in figures), "one tag: its figures are those of all"


def test_nothing_ended_and_no_reward_are_left_out_not_zero() -> None:
    figures = RolloutFigures().update([item(final=False)], frames(SEVEN, -1.0, -2.0))
    assert {name for name in figures if name.startswith("rollouts/")} == {"rollouts/ended"}
    figures = RolloutFigures().update([item(reward=None)], frames(SEVEN, -1.0, -2.0))
    assert "rollouts/reward_mean" not in figures and figures["rollouts/length_mean"] == 5


def test_tags_have_figures_of_their_own_and_are_bounded() -> None:
    figures = RolloutFigures()
    first = figures.update([item(), item(tag="", reward=0.0)], [*frames(SEVEN, -1, -1), *frames(SEVEN, -1, -1)])
    assert (first["rollouts/add/reward_mean"], first["rollouts/untagged/reward_mean"]) == (1.0, 0.0)
    many = [item(tag=f"t{n}") for n in range(1000)]
    told = figures.update(many, [frame for _ in many for frame in frames(SEVEN, -1, -1)])
    tags = {name.split("/")[1] for name in told if name.count("/") == 2 and name.startswith("rollouts/")}
    assert len(tags) == MAX_TAGS - 2 + 1 and "other" in tags


def test_pools_share_and_divergence_over_what_is_trained() -> None:
    items = [item(teachers=("math", "code")), item(teachers=("code",), top_k=(object(),))]
    arrays = [
        *frames([0, 0, 1, 1, 0, 0, 0, 0], -1.0, -1.5, -3.0),
        *frames([0, 0, 0, 0, 0, 1, 1, 1], -2.0, -2.5),
        np.zeros(4, np.uint8),  # the payload of top-k sets
    ]
    figures = RolloutFigures().update(items, arrays)
    assert figures["teachers/math/token_share"] == 2 / 5 and figures["teachers/code/token_share"] == 1.0
    assert figures["teachers/math/reverse_kl"] == pytest.approx(0.5)
    assert figures["teachers/code/reverse_kl"] == pytest.approx((2 * 2.0 + 3 * 0.5) / 5)
    assert all(math.isfinite(value) for value in figures.values())


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


def test_prefix_figures_are_those_of_teachers_that_have_them() -> None:
    figures = WorkerFigures()
    figures.update(snapshot(peer("teacher", "teacher-0")))
    now = figures.update(snapshot(peer("teacher", "teacher-0", scored_items_total=4.0)))
    assert not any(name.endswith(("_tokens_per_item", "hits_per_item")) for name in now if "context" not in name)
    seen = peer(
        "teacher",
        "teacher-0",
        scored_items_total=8.0,
        computed_tokens_total=60.0,
        prefix_hits_total=3.0,
        prefix_tokens=70.0,
    )
    now = figures.update(snapshot(seen))
    assert (now["teachers/computed_tokens_per_item"], now["teachers/prefix_hits_per_item"]) == (15.0, 0.75)
    assert now["teachers/prefix_tokens"] == 70.0


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
