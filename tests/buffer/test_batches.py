"""The learner's lease on a batch: what is in it, repeats, prefetch, BatchTrained, tasks done, the last ones."""

from __future__ import annotations

from stillhouse.protocol import messages as m
from tests.buffer.driver import Driver, rollout_ids, tasks_of, v

Make = type[Driver]


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
