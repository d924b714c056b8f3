"""The learner's lease on a batch: what is in it, repeats, prefetch, BatchTrained, tasks done, the last ones."""

from __future__ import annotations

import msgspec
import numpy as np

from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import VersionSpan
from tests.buffer.driver import PROMPT, Driver, rollout_ids, tasks_of, v

Make = type[Driver]


def test_an_item_carries_everything_up_to_its_last_token(make: Make) -> None:
    driver = make(batch=1)
    driver.offer(0)
    driver.write("train-0-0-0", 2, context=1)
    driver.write("train-0-0-0", 1, final=True)
    driver.score()
    driver.send("learner", "learner", m.BatchWanted(v(0)))
    ids, logprobs, train_mask, teacher = driver.frames(driver.sent)
    batch = driver.batch()
    assert batch is not None
    assert list(ids) == [1, 2, 10, 11, 3, 10]
    assert list(train_mask) == [0, 0, 1, 1, 0, 1]
    np.testing.assert_array_equal(logprobs, np.where(train_mask, np.float32(-0.5), 0))
    np.testing.assert_array_equal(teacher, np.where(train_mask, np.float32(-1), 0)[None, :])
    (item,) = batch.items
    assert item.spans == (VersionSpan(v(0), 2, 4), VersionSpan(v(0), 5, 6))
    assert (item.end, item.final, item.finish_reason, item.reward) == (6, True, "stop", 1.0)
    assert batch.staleness == {0: 3}
    assert all(not array.flags.writeable for array in (ids, logprobs)), "views on what the buffer keeps"


def test_a_repeated_request_gets_nothing_more_until_the_learner_was_lost_and_then_the_same(make: Make) -> None:
    driver = make(batch=1)
    driver.offer(0, 1)
    driver.roll(0)
    first = driver.want(0)
    driver.roll(1)
    assert driver.want(0) is None, "it is on its way, and another copy would only delay what follows it"
    driver.lose("learner", "learner")
    driver.join("learner", "learner")
    again = driver.want(0)
    assert driver.want(0) is None
    assert first is not None and again is not None
    assert (first.batch_id, first.items, first.staleness) == (again.batch_id, again.items, again.staleness)
    driver.trained(first)
    assert driver.want(0) is None
    second = driver.batch_for(1)
    assert second.batch_id != first.batch_id


def test_the_next_batch_may_be_asked_for_while_one_is_held(make: Make) -> None:
    driver = make(batch=1, staleness=1)
    driver.offer(0, 1, 2)
    driver.roll(0)
    driver.roll(1)
    first, second = driver.want(0), driver.want(1)
    assert rollout_ids(first) == ["train-0-0-0"] and rollout_ids(second) == ["train-1-0-0"]
    assert first is not None and second is not None
    assert (tasks_of(first), tasks_of(second)) == ((0,), (1,)), "each task is told once"
    assert second is not None and second.staleness == {1: 2}, "against its own version"
    assert set(driver.tickets) == {"train-0-0-0", "train-1-0-0"}, "both count until they are trained"
    assert first is not None
    driver.trained(first)
    assert "train-2-0-0" in driver.tickets


def test_a_request_ahead_moves_no_clock(make: Make) -> None:
    """Its version is not there yet, so that no ticket may demand it, and pacing goes by what is trained."""
    driver = make(batch=1, staleness=1)
    driver.offer(0, 1, 2)
    driver.roll(0)
    first = driver.batch_for(0)
    assert driver.want(1) is None
    assert driver.snapshot.version == v(0)
    ack = driver.write("train-1-0-0", 2, step=2)
    assert ack is not None and ack.reason == "future_version"
    driver.trained(first)
    assert driver.snapshot.version == v(1)
    assert {ticket.min_version for ticket in driver.tickets.values()} <= {v(0), v(1)}


def test_a_learner_that_holds_two_batches_may_be_two_steps_further_than_it_has_said(make: Make) -> None:
    driver = make(batch=1, staleness=2)
    driver.offer(0, 1, 2)
    driver.roll(0)
    driver.roll(1)
    assert driver.want(0) is not None and driver.want(1) is not None
    ack = driver.write("train-2-0-0", 2, step=2)
    assert ack is not None and ack.status == "accepted", "actors may have weights that the buffer has not heard of"
    ack = driver.write("train-2-0-0", 2, step=3)
    assert ack is not None and ack.reason == "future_version"


def test_tokens_too_old_for_the_step_after_this_one_are_not_in_its_batch(make: Make) -> None:
    driver = make(batch=1, staleness=1)
    driver.offer(0, 1, 2)
    driver.roll(0)
    driver.roll(1)
    for step in (0, 1):
        batch = driver.batch_for(step)
        if step == 0:
            driver.trained(batch)
    driver.roll(2, n=3)
    assert driver.want(2) is None, "in the step of version 2 they would be two steps old"
    assert driver.ledger.tokens.masked == {"stale": 3}


def test_no_smaller_batch_comes_while_the_learner_holds_one(make: Make) -> None:
    driver = make(batch=2, staleness=1)
    driver.offer(0, 1, 2, last=True)
    for task_id in range(3):
        driver.roll(task_id)
    first = driver.want(0)
    assert len(rollout_ids(first)) == 2
    assert driver.want(1) is None, "nothing follows, but that is known for sure only when the first one is trained"
    assert first is not None
    driver.trained(first)
    assert rollout_ids(driver.batch()) == ["train-2-0-0"]


def test_responses_dropped_while_their_tokens_were_in_a_batch_are_not_trained_when_it_comes_back(make: Make) -> None:
    driver = make(batch=1, staleness=2, release="segment")
    driver.offer(0, 1)
    driver.write("train-0-0-0", 10)
    driver.score()
    first = driver.want(0)
    assert rollout_ids(first) == ["train-0-0-0"] and driver.want(1) is None
    prompt = len(PROMPT)
    last, arrays = driver.make("train-0-0-0", 10, final=True)
    driver.submit(msgspec.structs.replace(last, dropped=(m.Dropped(prompt, prompt + 4, "retried"),)), arrays)
    driver.score()
    assert "retried" not in driver.ledger.tokens.masked, "the learner has them"
    driver.lose("learner", "learner")
    driver.restart_learner(0, epoch=1)
    driver.offer(0, 1)
    assert driver.ledger.tokens.masked == {"retried": 4}
    driver.take(m.Batch)
    out = driver.send("learner", "learner", m.BatchWanted(v(0, 1)))
    assert int(driver.frames(out)[2].sum()) == 16


def test_batch_trained_is_acknowledged_again_and_counted_once(make: Make) -> None:
    driver = make(batch=1)
    driver.offer(0)
    driver.roll(0)
    batch = driver.batch_for(0)
    for _ in range(3):
        driver.trained(batch)
    assert driver.take(m.BatchTrainedAck) == [m.BatchTrainedAck(batch.batch_id, v(1))] * 3
    assert driver.ledger.tokens.trained == 2
    assert driver.snapshot.staleness_hist == {0: 2}


def test_a_batch_trained_into_another_step_is_refused(make: Make) -> None:
    driver = make(batch=1)
    driver.offer(0)
    driver.roll(0)
    batch = driver.batch_for(0)
    driver.send("learner", "learner", m.BatchTrained(batch.batch_id, v(3)))
    (refused,) = driver.take(m.Refused)
    assert (refused.got, refused.expected) == ("0.3", "0.1")
    assert driver.ledger.tokens.in_flight == 2


def test_each_sample_is_told_once_when_it_is_settled(make: Make) -> None:
    driver = make(batch=1, staleness=3, max_attempts=1)
    driver.offer(0, group=2)
    driver.offer(1, 2)
    driver.roll(0, 0)
    batch = driver.batch_for(0)
    assert batch.settled == (m.Settled(0, 0, "trained"),)
    driver.trained(batch)
    driver.send("actor", "a", m.RolloutFailed("train-0-1-0", "engine_error"))
    driver.roll(1, step=1)
    batch = driver.batch_for(1)
    assert tasks_of(batch) == (0, 1)
    assert batch.settled[0] == m.Settled(0, 1, "dropped", "engine_error")
    driver.lose("learner", "learner")
    driver.join("learner", "learner")
    repeat = driver.batch_for(1)
    assert tasks_of(repeat) == (0, 1)
    driver.trained(batch)
    driver.roll(2, step=2)
    batch = driver.batch_for(2)
    assert tasks_of(batch) == (2,)


def test_the_last_batch_may_be_smaller_and_then_there_is_an_empty_one(make: Make) -> None:
    driver = make(batch=4, staleness=0, max_attempts=1)
    driver.offer(0, 1, 2, last=True)
    assert driver.take(m.TasksAck)[-1].tasks_wanted == 0
    driver.want(0)
    driver.roll(0)
    assert driver.batch() is None, "1 and 2 may still come"
    driver.roll(1)
    driver.send("actor", "a", m.RolloutFailed("train-2-0-0", "engine_error"))
    batch = driver.batch()
    assert rollout_ids(batch) == ["train-0-0-0", "train-1-0-0"]
    assert batch is not None and set(tasks_of(batch)) == {0, 1, 2}
    driver.trained(batch)
    nothing = driver.batch_for(1)
    assert (nothing.batch_id, nothing.items, tasks_of(nothing)) == (0, (), ())


def test_a_small_batch_does_not_leave_while_the_stream_goes_on(make: Make) -> None:
    driver = make(batch=2, staleness=1)
    driver.offer(0)
    driver.roll(0)
    assert driver.want(0) is None
    driver.wait(1000.0)
    assert driver.batch() is None


def test_what_the_learner_left_out_is_masked_with_its_reason_and_not_trained(make: Make) -> None:
    driver = make(batch=2)
    driver.offer(0, 1)
    driver.roll(0)
    driver.roll(1)
    batch = driver.batch_for(0)
    assert len(batch.items) == 2
    message = m.BatchTrained(batch.batch_id, v(1), (batch.items[0].rollout_id,))
    for _ in range(2):
        driver.send("learner", "learner", message)
    ledger = driver.ledger
    assert (ledger.tokens.trained, ledger.tokens.masked) == (2, {"non_finite": 2})
    assert (ledger.rollouts.trained, ledger.rollouts.masked) == (1, {"non_finite": 1})
    assert (ledger.segments.masked, ledger.balanced) == ({"non_finite": 1}, True)
    assert driver.snapshot.staleness_hist == {0: 2}


def test_a_whole_batch_may_be_left_out_and_its_tasks_are_done_all_the_same(make: Make) -> None:
    driver = make(batch=1)
    driver.offer(0, 1)
    driver.roll(0)
    batch = driver.batch_for(0)
    assert tasks_of(batch) == (0,)
    driver.send("learner", "learner", m.BatchTrained(batch.batch_id, v(1), (batch.items[0].rollout_id,)))
    assert (driver.ledger.tokens.trained, driver.snapshot.staleness_hist) == (0, {})
    driver.roll(1, step=1)
    assert driver.want(1) is not None


def test_leaving_out_what_was_not_in_the_batch_is_refused(make: Make) -> None:
    driver = make(batch=1)
    driver.offer(0)
    driver.roll(0)
    batch = driver.batch_for(0)
    driver.send("learner", "learner", m.BatchTrained(batch.batch_id, v(1), ("train-7-0-0",)))
    (refused,) = driver.take(m.Refused)
    assert "train-7-0-0" in refused.got
    assert driver.ledger.rejected == {"not_in_batch": 1} and driver.ledger.tokens.in_flight == 2


def test_two_batches_of_a_lost_learner_wait_again_with_every_token_to_be_trained(make: Make) -> None:
    """It trained neither as far as the buffer knows: what it said of the first was lost with it."""
    driver = make(batch=1, staleness=2, release="segment")
    driver.offer(0, 1)
    driver.write("train-0-0-0", 10)
    driver.score()
    driver.roll(1, n=10)
    held = [driver.want(0), driver.want(1)]
    assert sorted(rollout_ids(held[0]) + rollout_ids(held[1])) == ["train-0-0-0", "train-1-0-0"]
    driver.lose("learner", "learner")
    driver.restart_learner(0, epoch=1)
    driver.offer(0, 1)
    seen: dict[str, int] = {}
    for step in range(2):
        driver.take(m.Batch)
        out = driver.send("learner", "learner", m.BatchWanted(v(step, 1)))
        batch = driver.batch()
        assert batch is not None
        (item,) = batch.items
        seen[item.rollout_id] = int(driver.frames(out)[2].sum())
        driver.trained(batch)
    assert seen == {"train-0-0-0": 10, "train-1-0-0": 10}, "tokens of each mask"
    assert driver.ledger.tokens.trained == 20
    for batch in held:
        assert batch is not None
        driver.trained(batch)
    assert driver.ledger.tokens.trained == 20 and driver.ledger.rejected == {"unknown_batch": 2}


def test_word_of_the_first_of_two_batches_may_come_after_that_of_the_second(make: Make) -> None:
    """A frame of it was lost, and it was sent again: each token counts once, against the version of its own batch."""
    driver = make(batch=1, staleness=1, release="segment")
    driver.offer(0, 1, 2, 3)
    driver.roll(0)
    driver.roll(1)
    first, second = driver.want(0), driver.want(1)
    assert first is not None and second is not None
    driver.trained(second)
    assert (driver.ledger.tokens.trained, driver.ledger.tokens.in_flight) == (2, 2)
    driver.trained(first)
    driver.trained(second)
    assert driver.ledger.tokens.trained == 4 and not driver.ledger.rejected
    assert driver.snapshot.staleness_hist == {0: 2, 1: 2}
    assert driver.tickets["train-3-0-0"].min_version == v(2), "of the batches for steps 2 and 3, with a bound of 1"
    driver.roll(2, step=2)
    third = driver.batch_for(2)
    assert rollout_ids(third) == ["train-2-0-0"] and third.staleness == {0: 2}
