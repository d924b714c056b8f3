"""With a bound of 1: a batch waits for the learner, takes all that the next one could not train, and actors are asked
for what they hold shortly before."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from stillhouse.buffer.config import Release
from stillhouse.buffer.departure import Departure
from stillhouse.protocol import messages as m
from tests.buffer.driver import Driver, rollout_ids, v

STEP_S = 40.0
TICK_S = 0.05


def in_second_step(*, actors: int = 4, scoring_s: float = 0.0) -> Driver:
    """The learner has needed 40 s for a batch, and is 0 s into the step of one of the same size. Each of `actors` has a
    rollout of which nothing has come; all others are with `writer`. The teacher has scored each of the 32 segments
    `scoring_s` after it came."""
    driver = Driver(staleness=1, batch=4, peers=False)
    for i in range(actors):
        driver.actor(f"a{i}", n=1)
    driver.actor("writer")
    driver.teacher()
    driver.join("learner", "learner")
    driver.send("learner", "learner", m.VersionPublished(v(0)))
    driver.offer(*range(40))
    for _ in range(4):
        in_four_segments(driver, next_of_writer(driver), scoring_s)
    first = driver.batch_for(0)
    assert driver.want(1) is None
    driver.wait(STEP_S)
    driver.trained(first)
    driver.send("learner", "learner", m.VersionPublished(v(1)))
    for _ in range(4):
        in_four_segments(driver, next_of_writer(driver), scoring_s, step=1)
    assert len(rollout_ids(driver.batch())) == 4 and driver.want(2) is None
    assert driver.take(m.SegmentsWanted) == [], "nothing was known of the learner's pace"
    return driver


def in_four_segments(driver: Driver, task_id: int, scoring_s: float, *, step: int = 0) -> None:
    """A rollout of four tokens, each scored `scoring_s` after it came."""
    for number in range(4):
        driver.write(f"train-{task_id}-0-0", 1, final=number == 3, step=step)
        driver.wait(scoring_s)
        driver.score()


def with_a_prefix_that_is_a_batch(driver: Driver) -> m.Batch:
    """Four rollouts are out: two in the batch that is returned, 9 tokens of the third, where the mean is 2, and nothing
    of the fourth."""
    driver.offer(*range(5))
    driver.roll(0)
    driver.roll(1)
    first = driver.batch_for(0)
    driver.write("train-2-0-0", 9)
    driver.score()
    return first


def next_of_writer(driver: Driver) -> int:
    """Task of a rollout that `writer` has not begun."""
    ids = (rollout_id for rollout_id, name in driver.holder.items() if name == "writer")
    return int(next(rollout_id for rollout_id in ids if rollout_id not in driver.written).split("-")[1])


def test_a_batch_that_is_full_waits_until_the_learner_has_trained_the_one_before() -> None:
    driver = Driver(batch=2, staleness=1)
    first = with_a_prefix_that_is_a_batch(driver)
    assert driver.want(1) is None
    driver.wait(100.0)
    assert driver.batch() is None, "nothing is known of the learner's pace"
    driver.trained(first)
    assert rollout_ids(driver.batch()) == ["train-2-0-0"]


def test_it_does_not_wait_once_nothing_is_under_way() -> None:
    driver = Driver(batch=2, staleness=1)
    with_a_prefix_that_is_a_batch(driver)
    assert driver.want(1) is None
    driver.write("train-2-0-0", 1, final=True)
    driver.score()
    assert driver.batch() is None
    driver.roll(3)
    assert rollout_ids(driver.batch()) == ["train-2-0-0", "train-3-0-0"]


@pytest.mark.parametrize("release", ["deadline", "segment"])
def test_it_leaves_at_once_where_no_token_runs_out(release: Release) -> None:
    driver = Driver(batch=2, staleness=2, release=release)
    driver.offer(*range(9))
    for task_id in range(4):
        driver.roll(task_id)
    assert driver.want(0) is not None and driver.want(1) is not None
    assert driver.snapshot.queues["tickets_outstanding"] == 2, "more may come"


def test_it_takes_everything_that_the_next_one_could_not_train() -> None:
    driver = Driver(batch=2, staleness=1)
    first = with_a_prefix_that_is_a_batch(driver)
    driver.roll(3)
    assert driver.want(1) is None
    driver.trained(first)
    second = driver.batch()
    assert rollout_ids(second) == ["train-2-0-0", "train-3-0-0"]
    assert second is not None and second.staleness == {1: 11}


def test_it_leaves_when_the_step_before_is_about_to_end_by_the_pace_of_the_last_one() -> None:
    clock = Departure()
    clock.batch_left(10.0, awaited=True)
    clock.step_began(13.0, 100)  # 3 s on its way
    assert not clock.due(1000.0), "no pace yet"
    clock.step_ended(63.0)  # half a second per token
    assert clock.due(63.0), "the learner waits"
    clock.batch_left(64.0, awaited=True)
    clock.step_began(68.0, 20)  # 4 s; ends at 78
    assert next(now_s for now_s in np.arange(68.0, 80.0, 0.5) if clock.due(now_s)) == 74.0


def test_the_way_is_taken_for_shorter_until_the_learner_waits_again() -> None:
    clock = Departure()
    clock.batch_left(0.0, awaited=True)
    clock.step_began(4.0, 10)
    clock.step_ended(14.0)
    leaves = list[float]()
    for waits in (False, False, True):
        clock.batch_left(14.0, awaited=False)
        if waits:
            clock.awaited()
        clock.step_began(20.0, 30)  # a second per token: ends at 50
        leaves.append(next(now_s for now_s in np.arange(20.0, 60.0, 0.01) if clock.due(now_s)))
        clock.step_ended(50.0)
    assert leaves == pytest.approx([50 - 3.6, 50 - 3.24, 50 - 6.0], abs=0.011)


def test_a_learner_that_waits_for_a_batch_that_has_left_measures_its_way() -> None:
    driver = in_second_step()
    driver.write(next(rollout_id for rollout_id, name in driver.holder.items() if name == "a0"), 17, step=1)
    driver.score()
    driver.wait(STEP_S)
    batch = driver.batch()
    assert batch is not None and batch.version == v(2), "it left by the pace, before the step has ended"
    assert driver.want(2) is None, "it is on its way, and the learner waits"
    driver.wait(5.0)
    assert driver.want(3) is None
    assert "way_s=5.0" in repr(driver.state)


def test_actors_are_asked_in_turn_in_the_last_quarter_of_a_step_in_ever_shorter_rounds() -> None:
    driver = in_second_step(actors=4)
    asked: dict[str, list[float]] = {}
    for at in range(1, round(STEP_S / TICK_S) + 1):
        for out in driver.wait(TICK_S):
            if isinstance(out.message, m.SegmentsWanted):
                asked.setdefault(out.name, []).append(at * TICK_S)
    assert asked.keys() >= {"a0", "a1", "a2", "a3"}
    times = sorted(at for some in asked.values() for at in some)
    assert times[0] >= 0.75 * STEP_S
    for some in asked.values():
        gaps = np.diff(some)
        assert (gaps[1:] <= gaps[:-1] + 2 * TICK_S).all(), gaps
        assert STEP_S - some[-1] <= 3 * TICK_S, "what they hold at the end is of the last moment"
    # A round takes as long as there is time left: the rate of asking one actor is 1 / (time left), at most 10 per s.
    left = np.arange(0.0, STEP_S / 4, 0.001)
    rounds = float(np.sum(0.001 / np.maximum(0.1, left)))
    assert all(abs(len(some) - rounds) < 2 for some in asked.values()), (rounds, Counter(map(len, asked.values())))


def test_actors_are_asked_on_while_the_learner_waits_for_enough() -> None:
    driver = in_second_step()
    driver.wait(STEP_S)
    driver.take(m.SegmentsWanted)
    for _ in range(100):
        driver.wait(TICK_S)
    assert driver.batch() is None and driver.take(m.SegmentsWanted, to="a0")


@pytest.mark.parametrize(("staleness", "release"), [(0, "deadline"), (2, "deadline"), (2, "segment"), (1, "rollout")])
def test_nobody_is_asked_where_no_token_runs_out(staleness: int, release: Release) -> None:
    driver = Driver(staleness=staleness, release=release, batch=2)
    driver.offer(*range(9))
    for step in range(2):
        driver.send("learner", "learner", m.VersionPublished(v(step)))
        mine = [i for i in range(9) if f"train-{i}-0-0" in driver.tickets and f"train-{i}-0-0" not in driver.written]
        batch = driver.want(step)
        for i in mine[:2]:
            driver.roll(i, step=step)
        batch = batch or driver.batch()
        assert batch is not None
        driver.want(step + 1)
        for _ in range(100):
            driver.wait(TICK_S)
        driver.trained(batch)
    assert driver.take(m.SegmentsWanted) == []


def test_actors_without_rollouts_are_asked_for_nothing() -> None:
    driver = in_second_step(actors=1)
    driver.actor("idle", n=0)
    for _ in range(1100):
        driver.wait(TICK_S)
    assert driver.take(m.SegmentsWanted, to="idle") == [] and driver.take(m.SegmentsWanted, to="a0")


@pytest.mark.parametrize(("share", "asked"), [(0.24, True), (0.26, False)])
def test_nobody_is_asked_where_scores_would_come_too_late(share: float, asked: bool) -> None:
    """A segment that is sent early is one more to score, and teachers that are slow already would score whole rollouts
    later for it: a run whose teacher needed 1 s for a batch became 1.5 times slower."""
    driver = in_second_step(scoring_s=share * STEP_S)
    driver.wait(0.9 * STEP_S)
    for _ in range(100):
        driver.wait(TICK_S)
    assert bool(driver.take(m.SegmentsWanted)) == asked


def test_nobody_is_asked_while_it_is_not_known_how_long_scores_take() -> None:
    clock = Departure()
    clock.batch_left(0.0, awaited=False)
    clock.step_began(0.0, 1)
    clock.step_ended(100.0)
    assert [clock.turns(100.0 + 0.05 * i, 0.0, None) for i in range(21)] == [0.0] * 21


def test_more_rollouts_than_can_be_taken_in_are_not_asked_for() -> None:
    """4,000 segments/s: with 8,000 rollouts at actors a round takes 2 s."""
    clock = Departure()
    clock.batch_left(0.0, awaited=False)
    clock.step_began(0.0, 1)
    clock.step_ended(100.0)
    shares = [clock.turns(100.0 + 0.05 * i, 2.0, 0.0) for i in range(21)]
    assert sum(shares) == pytest.approx(0.5)
