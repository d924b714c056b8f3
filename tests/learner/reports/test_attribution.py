"""What limits a run: named rightly where the service times say what it is, and predicted rightly, by simulating the run
again with what was advised (tests.sim.pipeline)."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from stillhouse.learner.reports import work_window
from stillhouse.learner.reports.attribution import BoundVerdict, attribute
from stillhouse.learner.reports.work_window import Work, WorkWindow
from tests.sim.pipeline import Pipeline, Shape

SECONDS = 150.0


def seen(shape: Shape) -> tuple[BoundVerdict, float, Work]:
    """The verdict over the last minute, the real steps per second, and what the verdict was made from."""
    run = Pipeline(shape).run(SECONDS)
    window = WorkWindow(60.0)
    for snapshot in run.snapshots:
        window.update(snapshot, cpu=0.5)
    work = window.work()
    verdict = attribute(work)
    assert verdict is not None and work is not None
    assert sum(verdict.shares.values()) == pytest.approx(1.0)
    return verdict, run.steps_per_s, work


def followed(shape: Shape, verdict: BoundVerdict) -> Shape:
    """The run with what was advised."""
    if verdict.stage == "learner":
        return replace(shape, train_s=shape.train_s / 2)
    if verdict.stage == "staleness":
        return replace(shape, max_staleness=shape.max_staleness + verdict.more)
    count = shape.teachers if verdict.stage == "teachers" else shape.actors
    return replace(shape, **{verdict.stage: count + verdict.more})  # pyright: ignore


@pytest.mark.parametrize(
    ("shape", "stage"),
    [
        (Shape(score_s=0.05, train_s=0.2, write_s=0.005), "teachers"),
        (Shape(score_s=0.2, teachers=3, train_s=0.3), "teachers"),
        (Shape(write_s=0.05, train_s=0.2), "actors"),
        (Shape(write_s=0.1, actors=2, score_s=0.02, train_s=0.2), "actors"),
        (Shape(train_s=1.0), "learner"),
        (Shape(environment_s=2.0), "environments"),
        (Shape(environment_s=1.0, slots=8), "environments"),
        (Shape(max_staleness=0, write_s=0.02, score_s=0.02, train_s=0.3), "staleness"),
        (Shape(max_staleness=0, write_s=0.02, score_s=0.005, train_s=0.3), "staleness"),
    ],
)
def test_the_stage_is_the_one_that_the_service_times_make_the_limit(shape: Shape, stage: str) -> None:
    verdict, rate, _ = seen(shape)
    assert verdict.stage == stage, verdict.text
    if verdict.speedup is None:
        assert stage in ("environments", "unknown")
        return
    real = seen(followed(shape, verdict))[1] / rate
    assert verdict.speedup == pytest.approx(real, rel=0.25), verdict.text


def test_of_many_random_runs_the_limit_is_never_wrong_and_the_prediction_within_a_quarter() -> None:
    """The truth: the role with the least capacity, where it is clear; and the run simulated once more."""
    rng = random.Random(1)
    named, checked = 0, 0
    for _ in range(10):
        shape = Shape(
            actors=rng.randint(1, 4),
            write_s=10 ** rng.uniform(-2.5, -0.7),
            teachers=rng.randint(1, 4),
            score_s=10 ** rng.uniform(-2.5, -0.7),
            train_s=10 ** rng.uniform(-1, 0.5),
            max_staleness=rng.randint(1, 3),
            environment_s=rng.choice([0.0, 0.0, 0.1, 1.0]),
        )
        verdict, rate, _ = seen(shape)
        capacity = {
            "actors": shape.actors / shape.write_s,
            "teachers": shape.teachers / shape.score_s,
            "learner": shape.batch / shape.train_s,
        }
        least, next_one = sorted(capacity.values())[:2]
        if verdict.stage in capacity and next_one > 1.25 * least:
            assert capacity[verdict.stage] == least, (verdict.text, shape)
            named += 1
        if verdict.speedup is not None and verdict.speedup > 1:
            real = seen(followed(shape, verdict))[1] / rate
            assert verdict.speedup == pytest.approx(real, rel=0.27), (verdict.text, real, shape)
            checked += 1
    assert named > 3 and checked > 3


def work(**changes: object) -> Work:
    plain = seen(Shape(score_s=0.05, train_s=0.2, write_s=0.005))[2]
    return replace(plain, **changes)  # pyright: ignore


def test_too_little_says_nothing() -> None:
    assert attribute(None) is None
    assert attribute(work(steps=2)) is None
    assert attribute(work(learner={})) is None
    assert WorkWindow(60.0).work() is None


def test_the_sentence_has_the_share_the_number_and_the_times() -> None:
    assert attribute(work()).text == "teacher-bound 75%: two more teachers would give about 2.9 times"  # pyright: ignore
    full = attribute(work(cpu=0.97))
    assert full is not None and "the CPU here is 97% busy, so more processes here may give nothing" in full.text


def on_two_cores(**seconds: float) -> dict[str, object]:
    """A minute in which two processors were full; `seconds`: of a processor by role."""
    return {
        "seconds": 60.0,
        "cpu": 0.97,
        "processors": 2,
        "cpu_s": {"learner": 0.0, "actor": 0.0, "teacher": 0.0} | seconds,
    }


@pytest.mark.parametrize(("actors_busy", "teachers_busy"), [(0.6, 0.6), (0.95, 0.5), (0.5, 0.95)])
def test_roles_that_share_full_processors_are_bound_by_them(actors_busy: float, teachers_busy: float) -> None:
    shared = on_two_cores(learner=49.2, actor=39.6, teacher=24.0)
    seen = work(actors_busy=actors_busy, teachers_busy=teachers_busy, actors=2, teachers=1, **shared)
    verdict = attribute(seen)
    assert verdict is not None and verdict.stage == "cpu"
    assert "2 of 2 cores are 97% busy (learner 41%, actors 33%, teachers 20%): more cores" in verdict.text
    assert verdict.short == verdict.text and verdict.gauges()["bound/cpu"] == pytest.approx(0.75, abs=0.02)
    assert sum(verdict.shares.values()) == pytest.approx(1.0)
    in_environments = replace(seen, teachers_busy=0.2, busiest_teacher=0.2, actors_busy=0.2, in_environment=0.9)
    assert [attribute(replace(in_environments, cpu=cpu)).stage for cpu in (0.97, 0.85)] == ["cpu", "environments"]  # pyright: ignore
    idle = attribute(replace(seen, cpu=0.85))
    assert idle is not None and idle.stage != "cpu"


def test_a_role_that_is_busy_without_a_processor_is_the_limit_on_a_full_machine_too() -> None:
    sleeps = work(teachers_busy=1.0, teachers=1, actors=2, **on_two_cores(learner=60.0, actor=50.0, teacher=1.0))
    verdict = attribute(sleeps)
    assert verdict is not None and verdict.stage == "teachers"


@pytest.mark.parametrize(
    "seconds",
    [{"learner": 10.0, "actor": 6.0, "teacher": 4.0}, {"learner": 60.0, "actor": 60.0, "teacher": 60.0}],
    ids=["others fill it", "on several machines"],
)
def test_processors_that_the_run_does_not_fill_are_not_its_limit(seconds: dict[str, float]) -> None:
    quiet = {"teachers_busy": 0.6, "busiest_teacher": 0.6, "actors": 2, "teachers": 1}
    verdict = attribute(work(actors_busy=0.6, **quiet, **on_two_cores(**seconds)))
    assert verdict is not None and verdict.stage == "unknown"


def test_a_quota_that_the_run_uses_up_is_its_limit_on_an_idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with two processors of many. Nobody sees its use but its own workers."""
    run = Pipeline(Shape(score_s=0.05, train_s=0.2, write_s=0.005)).run(SECONDS)
    shares = {"learner": 0.8, "actor": 0.5, "teacher": 0.65}

    def seen(has_quota: bool) -> BoundVerdict:
        monkeypatch.setattr(work_window, "has_quota", lambda: has_quota)
        monkeypatch.setattr(work_window, "usable_cores", lambda: 2.0)
        window = WorkWindow(60.0)
        for snapshot in run.snapshots:
            n = {role: sum(peer.role == role for peer in snapshot.peers) for role in shares}
            peers = tuple(
                msgspec.structs.replace(
                    peer, stats={**peer.stats, "cpu_s_total": shares[peer.role] * snapshot.time_s / n[peer.role]}
                )
                for peer in snapshot.peers
            )
            window.update(msgspec.structs.replace(snapshot, peers=peers), cpu=0.1)
        verdict = attribute(window.work())
        assert verdict is not None
        return verdict

    assert seen(False).stage == "teachers"
    bound = seen(True)
    assert bound.stage == "cpu" and "2 of 2 cores are 98% busy (learner 40%" in bound.text, bound.text


def test_a_batch_that_takes_longer_than_the_window_is_no_idle_teacher() -> None:
    """Nothing is reported until it is done: the teacher's totals stand still."""
    verdict = attribute(work(teachers_busy=0.0, scored_tokens=0.0, always_unscored=True, busiest_teacher=0.0))
    assert verdict is not None and verdict.stage == "teachers" and verdict.speedup is None


def test_one_busy_pool_of_several_gets_no_number() -> None:
    verdict = attribute(work(teachers_busy=0.5, busiest_teacher=1.0))
    assert verdict is not None and verdict.stage == "teachers" and "their pool" in verdict.text and not verdict.more


@pytest.mark.parametrize("stage", ["weights", "eval", "checkpoint"])
def test_other_waits_of_the_learner_are_named(stage: str) -> None:
    waits = dict.fromkeys(("weights", "eval", "checkpoint", "data", "scoring"), 0.0)
    verdict = attribute(work(learner=waits | {"busy": 0.3, stage: 0.6, "data": 0.1}))
    assert verdict is not None and verdict.stage == stage and f"{stage}-bound" in verdict.text


def test_a_worker_that_restarts_counts_on() -> None:
    """The same run, in which the teacher's totals begin at 0 again in the middle."""
    run = Pipeline(Shape(score_s=0.05, train_s=0.2, write_s=0.005)).run(SECONDS)
    window, cut = WorkWindow(60.0), run.snapshots[len(run.snapshots) * 3 // 4]
    base = next(peer.stats for peer in cut.peers if peer.role == "teacher")
    for snapshot in run.snapshots:
        peers = snapshot.peers
        if snapshot.time_s > cut.time_s:
            peers = tuple(
                msgspec.structs.replace(peer, stats={name: value - base[name] for name, value in peer.stats.items()})
                if peer.role == "teacher"
                else peer
                for peer in peers
            )
        window.update(msgspec.structs.replace(snapshot, peers=peers))
    found = window.work()
    assert found is not None and found.teachers_busy == pytest.approx(1.0, abs=0.01)
    verdict = attribute(found)
    assert verdict is not None and verdict.stage == "teachers"


def test_a_snapshot_that_comes_late_takes_nothing_back() -> None:
    """A batch that was fetched ahead brings the snapshot of the moment when it was formed."""
    run = Pipeline(Shape(score_s=0.05, train_s=0.2, write_s=0.005)).run(SECONDS)
    in_order, late = WorkWindow(math.inf), WorkWindow(math.inf)
    in_order.update(run.snapshots[0])
    late.update(run.snapshots[0])
    for before, snapshot in pairwise(run.snapshots):
        in_order.update(snapshot)
        late.update(snapshot)
        late.update(before)
    assert late.work() == in_order.work() is not None


def test_if_actors_and_teachers_are_both_busy_the_pile_before_the_teachers_decides() -> None:
    stages = [
        verdict.stage
        for unscored in (0.0, 1000.0)
        if (verdict := attribute(work(teachers_busy=0.9, actors_busy=0.95, unscored_tokens=unscored))) is not None
    ]
    assert stages == ["actors", "teachers"]


def test_one_line_of_status_leaves_out_why_nothing_can_be_said() -> None:
    known = BoundVerdict("teachers", {}, "teacher-bound 71%: two more teachers would give about 1.4 times")
    assert known.short == known.text
    assert (
        BoundVerdict("unknown", {}, "cannot tell what binds: the learner waits 14%").short == "cannot tell what binds"
    )


def test_a_learner_that_works_four_fifths_of_the_time_is_the_limit_if_no_other_role_is() -> None:
    waits = dict.fromkeys(("weights", "eval", "checkpoint", "scoring"), 0.0)
    seen = work(learner=waits | {"busy": 0.86, "data": 0.14}, actors_busy=0.2, teachers_busy=0.2, busiest_teacher=0.2)
    verdict = attribute(seen)
    assert verdict is not None and verdict.stage == "learner" and verdict.text.startswith("learner-bound 86%")
