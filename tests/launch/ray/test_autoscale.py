"""Decisions of the autoscaler, from rows of metrics as a learner writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.config.cluster import ClusterConfig, RoleHostsConfig
from launch.ray.autoscale import EVERY_S, Autoscaler, last_row
from launch.ray.hosts import Wanted

CLUSTER = ClusterConfig(actors=RoleHostsConfig(each=4, most=12), teachers=RoleHostsConfig(each=2, most=5))
WANTED = Wanted(actors=8, teachers=4)


def decide(folder: Path, cluster: ClusterConfig = CLUSTER, wanted: Wanted = WANTED, **figures: float) -> Wanted | None:
    row = {"kind": "step", "step": 9, **{name.replace("__", "/"): value for name, value in figures.items()}}
    (folder / "metrics.jsonl").write_text(f"{json.dumps(row)}\n" + '{"kind": "eval"}\n{"kind": "st')
    decided = Autoscaler(cluster, folder, 0.0).decide(wanted, EVERY_S)
    return decided.wanted if decided is not None else None


def test_a_host_is_added_to_the_role_that_the_learner_waits_for(tmp_path: Path) -> None:
    assert decide(tmp_path, bound__actors=0.4, bound__speedup=1.5) == Wanted(actors=12, teachers=4)
    assert decide(tmp_path, bound__teachers=0.4, bound__speedup=1.5) == Wanted(actors=8, teachers=5)


@pytest.mark.parametrize("figures", [{"bound__actors": 0.1}, {"bound__actors": 0.4, "bound__speedup": 1.0}, {}])
def test_nothing_is_added_that_would_not_help(tmp_path: Path, figures: dict[str, float]) -> None:
    assert decide(tmp_path, CLUSTER, WANTED, **({"bound__speedup": 1.5} | figures)) is None


def test_the_limit_holds_and_a_role_without_one_is_left_alone(tmp_path: Path) -> None:
    full = Wanted(actors=12, teachers=5)
    assert decide(tmp_path, wanted=full, bound__actors=0.9, bound__speedup=2.0) is None
    alone = ClusterConfig(actors=RoleHostsConfig(each=4), teachers=RoleHostsConfig(each=2, most=5))
    assert decide(tmp_path, alone, bound__actors=0.9, bound__speedup=2.0) is None


def test_teachers_leave_when_the_others_would_do(tmp_path: Path) -> None:
    assert decide(tmp_path, efficiency__teacher_wait=0.8) == Wanted(actors=8, teachers=2)
    assert decide(tmp_path, efficiency__teacher_wait=0.6) is None  # two would work for 80 %
    assert decide(tmp_path, wanted=Wanted(actors=8, teachers=2), efficiency__teacher_wait=0.99) is None


def test_decisions_are_apart(tmp_path: Path) -> None:
    decide(tmp_path, bound__actors=0.4, bound__speedup=1.5)
    scaler = Autoscaler(CLUSTER, tmp_path, 0.0)
    assert scaler.decide(WANTED, EVERY_S - 1) is None
    assert scaler.decide(WANTED, EVERY_S) is not None
    assert scaler.decide(WANTED, 2 * EVERY_S - 1) is None
    assert scaler.decide(WANTED, 2 * EVERY_S) is not None


def test_without_metrics_nothing_is_decided(tmp_path: Path) -> None:
    assert last_row(tmp_path / "metrics.jsonl") is None
    assert Autoscaler(CLUSTER, tmp_path, 0.0).decide(WANTED, EVERY_S) is None
