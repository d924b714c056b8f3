"""Which tokens leave for the learner, and when."""

from __future__ import annotations

import pytest

from stillhouse.buffer.config import Release
from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import VersionSpan
from tests.buffer.driver import Driver, rollout_ids, v

Make = type[Driver]


def advance(driver: Driver, steps: int, first_task: int = 100) -> None:
    """Train `steps` batches of other rollouts, so that the clock moves on. Needs one free ticket per rollout."""
    size = driver.config.batch_rollouts
    for _ in range(steps):
        now = driver.snapshot.version
        tasks = range(first_task, first_task + size)
        driver.offer(*tasks)
        for task_id in tasks:
            driver.roll(task_id, step=now.step)
        batch = driver.batch_for(now.step)
        driver.trained(batch)
        first_task += size


def test_a_batch_leaves_when_enough_whole_rollouts_are_scored_oldest_first(make: Make) -> None:
    driver = make(batch=2, staleness=1)
    driver.offer(0, 1, 2)
    assert driver.want(0) is None
    driver.roll(2)
    driver.take(m.Batch)
    driver.roll(1)
    assert rollout_ids(driver.batch()) == ["train-1-0-0", "train-2-0-0"]
    driver.roll(0)
    assert driver.ledger.tokens.waiting == 2


@pytest.mark.parametrize("release", ["segment", "deadline", "rollout"])
def test_only_policy_segment_lets_a_fresh_prefix_go(make: Make, release: Release) -> None:
    driver = make(batch=1, staleness=2, release=release)
    driver.offer(0, 1, 2)
    driver.roll(0, n=4)  # finished rollouts have 4 sampled tokens on the average
    batch = driver.batch_for(0)
    driver.trained(batch)
    driver.write("train-1-0-0", 4, step=1)
    driver.score()
    batch = driver.want(1)
    assert (batch is not None) == (release == "segment")


def test_pieces_of_a_rollout_weigh_what_they_are_of_the_mean(make: Make) -> None:
    driver = make(batch=1, staleness=3, release="segment")
    driver.offer(0, 1, 2)
    driver.roll(0, n=4)
    batch = driver.batch_for(0)
    driver.trained(batch)
    driver.want(1)
    driver.write("train-1-0-0", 2, step=1)
    driver.score()
    assert driver.batch() is None, "half of a mean rollout is half a batch"
    driver.write("train-2-0-0", 2, step=1)
    driver.score()
    batch = driver.batch()
    assert rollout_ids(batch) == ["train-1-0-0", "train-2-0-0"]
    assert batch is not None and batch.staleness == {0: 4}
    assert not any(item.final for item in batch.items)


def test_pieces_weigh_more_as_finished_rollouts_turn_out_shorter(make: Make) -> None:
    driver = make(batch=2, staleness=3, release="segment")
    driver.offer(0, 1, 2)
    driver.want(0)
    driver.write("train-0-0-0", 6)
    driver.score()
    driver.roll(1, n=2)
    assert driver.batch() is None, "6 of 10 (max_new_tokens stood for the mean) and a whole one"
    driver.wait(0.05)
    assert rollout_ids(driver.batch()) == ["train-0-0-0"], "6 tokens are three rollouts of 2"


def test_a_prefix_has_neither_reward_nor_finish_even_where_the_rollout_is_finished(make: Make) -> None:
    """The final segment is there and not yet scored; it leaves later, with both."""
    driver = make(batch=1, staleness=2, release="segment")
    driver.offer(0, 1, 2)
    driver.write("train-0-0-0", 10)
    (first,) = driver.work
    driver.write("train-0-0-0", 10, final=True)
    second = next(lease for lease in driver.work if lease != first)
    told: list[tuple[int, bool, float | None, str | None]] = []
    for step, lease in enumerate((first, second)):
        driver.answer(lease)
        driver.write(f"train-{step + 1}-0-0", 10, final=True)  # fills the batch
        driver.answer(next(lease for lease in driver.work if lease not in (first, second)))
        batch = driver.batch_for(step)
        told += [(i.end, i.final, i.reward, i.finish_reason) for i in batch.items if i.rollout_id == "train-0-0-0"]
        driver.trained(batch)
    assert told == [(12, False, None, None), (22, True, 1.0, "stop")]


def test_a_scored_prefix_leaves_before_it_would_be_stale(make: Make) -> None:
    driver = make(batch=2, staleness=2, release="deadline")
    driver.offer(0)
    driver.write("train-0-0-0", 4)
    driver.score()
    driver.offer(1, 2, 3, 4)
    for step, task_id in ((0, 1), (1, 3)):
        driver.roll(task_id, n=4, step=step)
        driver.roll(task_id + 1, n=4, step=step)
        batch = driver.want(step)
        assert rollout_ids(batch) == [f"train-{task_id}-0-0", f"train-{task_id + 1}-0-0"], "the prefix is fresh enough"
        assert batch is not None
        driver.trained(batch)
    driver.offer(5)
    driver.roll(5, n=4, step=2)
    batch = driver.want(2)
    assert rollout_ids(batch) == ["train-0-0-0", "train-5-0-0"], "in step 3 it would be too late"
    assert batch is not None and batch.staleness == {0: 4, 2: 4}


def test_an_idle_learner_gets_prefixes_after_a_while(make: Make) -> None:
    driver = make(batch=1, staleness=2, release="deadline", idle_release_s=5.0)
    driver.offer(0)
    driver.write("train-0-0-0", 10)  # max_new_tokens: with no finished rollout yet, the mean is taken to be that
    driver.score()
    assert driver.want(0) is None
    driver.wait(4.9)
    assert driver.batch() is None
    driver.wait(0.2)
    assert rollout_ids(driver.batch()) == ["train-0-0-0"]


def test_a_learner_that_asked_ahead_is_idle_from_when_it_asks_with_nothing_left_to_train(make: Make) -> None:
    driver = make(batch=1, staleness=2, release="deadline", idle_release_s=5.0)
    driver.offer(0, 1)
    driver.roll(0, n=10)
    first = driver.batch_for(0)
    assert driver.want(1) is None
    driver.write("train-1-0-0", 10)
    driver.score()
    driver.wait(60.0)
    assert driver.batch() is None, "it is still at the first"
    driver.trained(first)
    driver.wait(60.0)
    assert driver.batch() is None, "it has not asked since, because it writes a checkpoint, say"
    assert driver.want(1) is None
    driver.wait(4.9)
    assert driver.want(1) is None
    driver.wait(0.2)
    assert rollout_ids(driver.batch()) == ["train-1-0-0"]


def test_a_group_that_lost_a_sample_counts_with_what_is_left(make: Make) -> None:
    driver = make(batch=2, staleness=1, release="rollout", max_attempts=1)
    driver.offer(0, 1, group=2)
    driver.want(0)
    driver.roll(0, 0)
    driver.send("actor", "a", m.RolloutFailed("train-0-1-0", "engine_error"))
    assert driver.batch() is None, "one rollout is not two"
    driver.roll(1, 0)
    driver.roll(1, 1)
    assert rollout_ids(driver.batch()) == ["train-0-0-0", "train-1-0-0", "train-1-1-0"]


def test_a_group_is_not_begun_without_room_for_all_of_it(make: Make) -> None:
    driver = make(batch=3, staleness=0, release="rollout")
    driver.offer(0, 1, group=2)
    assert set(driver.tickets) == {"train-0-0-0", "train-0-1-0"}
    driver.want(0)
    driver.roll(0, 0)
    driver.roll(0, 1)
    batch = driver.batch()
    assert rollout_ids(batch) == ["train-0-0-0", "train-0-1-0"], "nothing can follow: a smaller batch leaves"
    assert batch is not None
    driver.trained(batch)
    assert driver.tickets["train-1-1-0"].min_version == v(1)


def test_a_group_that_could_never_be_out_at_once_is_refused(make: Make) -> None:
    driver = make(batch=2, staleness=1, release="rollout")
    driver.offer(0, group=5)
    (refused,) = driver.take(m.Refused)
    assert refused.got == "group_size 5" and "(max_staleness + 1) * batch_rollouts = 4" in refused.expected
    assert not driver.tickets


def test_bound_zero_is_the_synchronous_schedule(make: Make) -> None:
    driver = make(batch=2, staleness=0)
    driver.offer(*range(6))
    for step in range(3):
        mine = [f"train-{2 * step + i}-0-0" for i in range(2)]
        assert set(driver.tickets) == {f"train-{i}-0-0" for i in range(2 * step + 2)}
        assert {driver.tickets[rollout_id].min_version for rollout_id in mine} == {v(step)}
        assert driver.want(step) is None
        for i in (1, 0):
            driver.roll(2 * step + i, step=step)
        batch = driver.batch()
        assert rollout_ids(batch) == mine
        assert batch is not None and batch.staleness == {0: 4}
        driver.trained(batch)


def test_a_sample_dropped_for_good_is_replaced_in_the_same_step_when_the_bound_is_zero(make: Make) -> None:
    driver = make(batch=2, staleness=0, max_attempts=1)
    driver.offer(*range(4))
    driver.want(0)
    driver.send("actor", "a", m.RolloutFailed("train-0-0-0", "engine_error"))
    assert driver.tickets["train-2-0-0"].min_version == v(0)
    driver.roll(1)
    driver.roll(2)
    assert rollout_ids(driver.batch()) == ["train-1-0-0", "train-2-0-0"]


def test_stale_tokens_are_masked_token_by_token(make: Make) -> None:
    driver = make(batch=1, staleness=1, release="rollout")
    driver.offer(0)
    driver.write("train-0-0-0", 2)
    advance(driver, 1)
    message, arrays = driver.make("train-0-0-0", 4)
    spans = (VersionSpan(v(0), 4, 6), VersionSpan(v(1), 6, 8))
    driver.submit(m.Segment(message.rollout_id, 1, 4, 8, spans, final=False), arrays)
    advance(driver, 1, first_task=200)
    driver.write("train-0-0-0", 1, step=2, final=True)
    driver.score()
    driver.send("learner", "learner", m.BatchWanted(v(2)))
    assert list(driver.frames(driver.sent)[2]) == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    batch = driver.batch()
    assert batch is not None and batch.staleness == {0: 1, 1: 2}
    assert driver.ledger.tokens.masked == {"stale": 4}
    assert driver.ledger.segments.masked == {"stale": 1}, "the first segment is stale altogether"
    driver.trained(batch)
    assert driver.ledger.segments.trained == 4 and driver.ledger.rollouts.trained == 3


def test_a_rollout_that_is_stale_altogether_is_settled_and_fills_no_batch(make: Make) -> None:
    driver = make(batch=1, staleness=1)
    driver.offer(0, 1, 2)
    driver.write("train-0-0-0", 2, final=True, step=0)
    assert driver.want(2) is None, "the learner has come to step 2 by what other buffers gave it"
    driver.score()
    assert driver.ledger.rollouts.masked == {"stale": 1}
    assert "train-2-0-0" in driver.tickets, "its place is free"
    driver.roll(1, step=2)
    batch = driver.batch()
    assert batch is not None and batch.settled == (m.Settled(0, 0, "masked", "stale"), m.Settled(1, 0, "trained"))


def test_remainders_too_small_for_a_batch_leave_when_pacing_allows_no_more(make: Make) -> None:
    driver = make(batch=1, staleness=1, release="segment")
    driver.offer(0, 1, 2)
    driver.want(0)
    for task_id, n in ((0, 9), (1, 1)):  # of max_new_tokens = 10, which stands for the unknown mean
        driver.write(f"train-{task_id}-0-0", n)
        driver.score()
    batch = driver.batch()
    assert rollout_ids(batch) == ["train-0-0-0", "train-1-0-0"]
    assert batch is not None
    driver.trained(batch)
    driver.want(1)
    driver.write("train-0-0-0", 1, step=1, final=True)
    driver.score()
    assert driver.batch() is None, "a tenth of a rollout, and the other one still runs"
    driver.write("train-1-0-0", 1, step=1, final=True)
    driver.score()
    assert rollout_ids(driver.batch()) == ["train-0-0-0", "train-1-0-0"], "both places are taken: nothing else can come"
    assert "train-2-0-0" not in driver.tickets


def test_a_rollout_that_is_stale_as_a_whole_stays_with_its_group_for_its_reward(make: Make) -> None:
    """Or the advantages of the others, which are relative to the group's mean, would be others: a bias against long
    answers, which are stale more often."""
    driver = make(batch=1, staleness=2, release="rollout")
    driver.offer(0, group=2)
    driver.write("train-0-0-0", 2, final=True, step=0)
    driver.write("train-0-1-0", 2, step=0)
    advance(driver, 3)
    driver.write("train-0-1-0", 3, final=True, step=3)
    driver.score()
    frames = driver.frames(driver.send("learner", "learner", m.BatchWanted(v(3))))
    batch = driver.batch()
    assert rollout_ids(batch) == ["train-0-1-0", "train-0-0-0"]
    assert batch is not None and [item.reward for item in batch.items] == [1.0, 1.0]
    assert [int(mask.sum()) for mask in (frames[2], frames[6])] == [3, 0]
    assert driver.ledger.rollouts.masked == {"stale": 1}
    assert batch.settled == (m.Settled(0, 0, "masked", "stale"), m.Settled(0, 1, "trained", "stale"))
    driver.trained(batch)
    assert driver.ledger.balanced and driver.ledger.tokens.trained == 6 + 3


def test_a_group_of_which_all_is_stale_is_settled_and_told_of_together(make: Make) -> None:
    driver = make(batch=1, staleness=2, release="rollout")
    driver.offer(0, group=2)
    driver.write("train-0-0-0", 2, final=True, step=0)
    driver.write("train-0-1-0", 2, step=0)
    advance(driver, 3)
    driver.offer(300)
    driver.write("train-0-1-0", 1, final=True, step=0)
    driver.roll(300, step=3)
    batch = driver.want(3)
    assert rollout_ids(batch) == ["train-300-0-0"]
    masked = tuple(m.Settled(0, sample, "masked", "stale") for sample in range(2))
    assert batch is not None and batch.settled == (*masked, m.Settled(300, 0, "trained"))


def test_a_group_larger_than_what_pacing_allows_is_begun_and_completed(make: Make) -> None:
    """Half of all that is written is too old for its batch, so that less is allowed than a group has rollouts."""
    driver, ended = make(staleness=2, batch=2, release="rollout"), set[str]()
    driver.offer(*range(40), group=5, last=False)
    for step in range(12):
        for rollout_id in [one for one in driver.tickets if one not in ended]:
            ended.add(rollout_id)
            driver.write(rollout_id, 4, step=max(0, step - 3))
            driver.write(rollout_id, 4, final=True, step=step)
        driver.score()
        driver.wait(1.0)
        batch = driver.batch_for(step)
        assert len(batch.items) == 5, driver.state
        driver.trained(batch)
    assert driver.snapshot.queues["rollouts_allowed"] <= 6
    assert driver.ledger.tokens.masked["stale"] > 100
