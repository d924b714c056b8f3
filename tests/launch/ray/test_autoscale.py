"""Decisions of the autoscaler, from rows of metrics as a learner writes them; a real run is in test_autoscaled_run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stillhouse.launch.config.cluster import ClusterConfig, RoleHostsConfig
from stillhouse.launch.ray.autoscale import EVERY_S, Autoscaler, Decision, last_row
from stillhouse.launch.ray.wanted import Wanted
from stillhouse.learner.reports.scaling import Outcome

CLUSTER = ClusterConfig(actors=RoleHostsConfig(each=4, most=12), teachers=RoleHostsConfig(each=2, most=5))
WANTED = Wanted(actors=8, teachers=4)


def write_row(folder: Path, *, step: int, **figures: float) -> None:
    there = {"actors/alive": 12, "teachers/alive": 5}
    row = {"kind": "step", "epoch": 0, "step": step, **there}
    row |= {name.replace("__", "/"): value for name, value in figures.items()}
    (folder / "metrics.jsonl").write_text(f"{json.dumps(row)}\n" + '{"kind": "eval"}\n{"kind": "st')


def decide(folder: Path, cluster: ClusterConfig = CLUSTER, wanted: Wanted = WANTED, **figures: float) -> Decision:
    write_row(folder, step=9, **figures)
    decided = Autoscaler(cluster, folder, 0.0).decide(wanted, EVERY_S)
    assert decided is not None
    return decided


def test_a_host_is_added_to_the_role_that_the_learner_waits_for(tmp_path: Path) -> None:
    actors = decide(tmp_path, bound__actors=0.4, bound__speedup=1.5)
    assert (actors.outcome, actors.wanted) == ("added_actors", Wanted(actors=12, teachers=4))
    teachers = decide(tmp_path, bound__teachers=0.4, bound__speedup=1.5)
    assert (teachers.outcome, teachers.wanted) == ("added_teachers", Wanted(actors=8, teachers=5))
    assert teachers.why == "the learner waits 40% of its time for teachers, and more would give 1.5 times"


@pytest.mark.parametrize(
    ("figures", "outcome"),
    [
        ({"bound__actors": 0.1}, "kept"),
        ({}, "kept"),
        ({"bound__actors": 0.4, "bound__speedup": 1.0}, "refused_little_gain"),
        ({"bound__actors": 0.4, "bound__speedup": 1.5, "actors__alive": 7}, "refused_not_there"),
    ],
)
def test_nothing_is_added_that_would_not_help(tmp_path: Path, figures: dict[str, float], outcome: Outcome) -> None:
    decided = decide(tmp_path, CLUSTER, WANTED, **figures)
    assert (decided.outcome, decided.wanted) == (outcome, WANTED)


def test_what_cannot_be_predicted_is_not_added(tmp_path: Path) -> None:
    assert decide(tmp_path, bound__actors=0.4).outcome == "refused_little_gain"


def test_the_limit_holds_and_a_role_without_one_is_left_alone(tmp_path: Path) -> None:
    full = Wanted(actors=12, teachers=5)
    decided = decide(tmp_path, wanted=full, bound__actors=0.9, bound__speedup=2.0)
    assert (decided.outcome, decided.wanted) == ("refused_most", full)
    assert "cluster.actors.most is 12" in decided.why
    alone = ClusterConfig(actors=RoleHostsConfig(each=4), teachers=RoleHostsConfig(each=2, most=5))
    assert decide(tmp_path, alone, bound__actors=0.9, bound__speedup=2.0).outcome == "kept"


def test_teachers_leave_by_whole_hosts_when_the_others_would_do(tmp_path: Path) -> None:
    removed = decide(tmp_path, efficiency__teacher_wait=0.8)
    assert (removed.outcome, removed.wanted) == ("removed_teachers", Wanted(actors=8, teachers=2))
    five = decide(tmp_path, wanted=Wanted(actors=8, teachers=5), efficiency__teacher_wait=0.8)
    assert five.wanted == Wanted(actors=8, teachers=4), "the last host has one"
    assert decide(tmp_path, efficiency__teacher_wait=0.6).outcome == "kept"  # two would work for 80 %
    assert decide(tmp_path, wanted=Wanted(actors=8, teachers=2), efficiency__teacher_wait=0.99).outcome == "kept"
    assert decide(tmp_path, efficiency__teacher_wait=0.8, teachers__alive=3).outcome == "kept"


def test_each_shard_of_the_buffer_keeps_a_teacher(tmp_path: Path) -> None:
    write_row(tmp_path, step=9, efficiency__teacher_wait=0.9)
    for fewest, kept in ((2, 2), (3, 4)):
        decided = Autoscaler(CLUSTER, tmp_path, 0.0, fewest=fewest).decide(WANTED, EVERY_S)
        assert decided is not None and decided.wanted.teachers == kept


def test_decisions_are_apart_and_each_sees_newer_figures_than_the_one_before(tmp_path: Path) -> None:
    write_row(tmp_path, step=9, bound__actors=0.4, bound__speedup=1.5)
    scaler = Autoscaler(CLUSTER, tmp_path, 0.0)
    assert scaler.decide(WANTED, EVERY_S - 1) is None
    first = scaler.decide(WANTED, EVERY_S)
    assert first is not None and first.outcome == "added_actors"
    assert scaler.decide(WANTED, 2 * EVERY_S - 1) is None
    second = scaler.decide(WANTED, 2 * EVERY_S)
    assert second is not None and second.outcome == "no_figures", "no step since"
    write_row(tmp_path, step=10, bound__actors=0.4, bound__speedup=1.5)
    third = scaler.decide(WANTED, 3 * EVERY_S)
    assert third is not None and third.outcome == "added_actors"


def test_without_metrics_nothing_is_changed(tmp_path: Path) -> None:
    assert last_row(tmp_path / "metrics.jsonl") is None
    decided = Autoscaler(CLUSTER, tmp_path, 0.0).decide(WANTED, EVERY_S)
    assert decided is not None and (decided.outcome, decided.wanted) == ("no_figures", WANTED)


def test_a_run_without_limits_decides_nothing(tmp_path: Path) -> None:
    write_row(tmp_path, step=9, bound__actors=0.4, bound__speedup=1.5)
    assert Autoscaler(ClusterConfig(), tmp_path, 0.0).decide(WANTED, EVERY_S) is None


def test_a_line_that_a_full_disk_cut_off_is_passed_over(tmp_path: Path) -> None:
    """What was written next stands behind its beginning."""
    row = json.dumps({"kind": "step", "step": 8})
    (tmp_path / "metrics.jsonl").write_text(f'{row}\n{{"kind": "step", "st{row}\n{{"kind": "step", \n')
    assert last_row(tmp_path / "metrics.jsonl") == {"kind": "step", "step": 8}
