"""A learner that starts again from a checkpoint against a buffer that lived on, or was restored from its journal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stillhouse.buffer.core import Core
from stillhouse.protocol import messages as m
from tests.buffer.driver import Driver, rollout_ids, v
from tests.buffer.shadow import restored


def as_it_is(driver: Driver) -> None:
    """The buffer's process lives on."""


def by_image(driver: Driver) -> None:
    """Another process goes on for it."""
    driver.state = restored(Core(driver.state), driver.now_s).state


BUFFERS = pytest.mark.parametrize("interlude", [as_it_is, by_image])
Interlude = Callable[[Driver], None]


def open_tasks(*task_ids: int) -> tuple[m.OpenTask, ...]:
    """Of which no sample is settled."""
    return tuple(m.OpenTask(task_id) for task_id in task_ids)


def new_tickets(driver: Driver) -> set[str]:
    """Issued since the first restart of the learner."""
    return {rollout_id for rollout_id in driver.tickets if int(rollout_id.rsplit("-", 1)[1]) >= 1000}


def train(driver: Driver, step: int, epoch: int = 0) -> m.Batch:
    batch = driver.want(step, epoch)
    assert batch is not None, f"no batch for step {step}"
    driver.trained(batch)
    return batch


@BUFFERS
def test_a_batch_that_the_former_learner_held_goes_to_the_next_and_is_not_trained_by_both(interlude: Interlude) -> None:
    driver = Driver(batch=1, staleness=2)
    driver.offer(0, 1)
    driver.roll(0)
    held = driver.batch_for(0)
    interlude(driver)
    driver.restart_learner(0, epoch=1)
    driver.offer(0, 1)
    assert len(driver.tickets) == 2, "nothing is redone"
    batch = driver.want(0, epoch=1)
    assert rollout_ids(batch) == ["train-0-0-0"]
    driver.trained(held)
    assert driver.ledger.tokens.trained == 0 and driver.ledger.rejected == {"unknown_batch": 1}
    assert batch is not None
    driver.trained(batch)
    driver.trained(batch)
    assert driver.ledger.tokens.trained == 2


@BUFFERS
def test_what_was_trained_after_the_checkpoint_is_done_again_and_what_waits_is_not(interlude: Interlude) -> None:
    driver = Driver(batch=1, staleness=4)
    driver.offer(0, 1, 2, 3)
    driver.roll(0)
    assert train(driver, 0).settled == (m.Settled(0, 0, "trained"),)  # the checkpoint of step 1 knows it
    driver.roll(1, step=1)
    assert train(driver, 1).settled == (m.Settled(1, 0, "trained"),)  # lost with the learner
    driver.roll(2, step=2)
    driver.write("train-3-0-0", 2, step=2)
    interlude(driver)
    driver.restart_learner(1, epoch=1, next_task_id=4, open=open_tasks(1, 2, 3))
    driver.offer(1, 2, 3)
    assert new_tickets(driver) == {"train-1-0-1000"}, "under an id that was never used"
    batch = train(driver, 1, epoch=1)
    assert rollout_ids(batch) == ["train-2-0-0"] and batch.settled == (m.Settled(2, 0, "trained"),)
    assert batch.staleness == {1: 2}, "a step down from the branch that was left"
    driver.score()
    driver.write("train-3-0-0", 1, step=1, epoch=1, final=True)
    driver.score()
    assert rollout_ids(train(driver, 2, epoch=1)) == ["train-3-0-0"]
    driver.write("train-1-0-1000", 2, step=2, epoch=1, final=True)
    driver.score()
    batch = train(driver, 3, epoch=1)
    assert rollout_ids(batch) == ["train-1-0-1000"] and batch.settled == (m.Settled(1, 0, "trained"),)
    tokens = driver.ledger.tokens
    assert (tokens.accepted, tokens.trained, tokens.waiting, tokens.in_flight) == (11, 11, 0, 0)


@BUFFERS
def test_tasks_that_only_the_branch_that_was_left_came_to_are_run_again(interlude: Interlude) -> None:
    driver = Driver(batch=1, staleness=4)
    driver.offer(0)
    driver.roll(0)
    train(driver, 0)  # the checkpoint is of before, and the stream had not come to task 0
    interlude(driver)
    driver.restart_learner(0, epoch=1, next_task_id=0)
    assert new_tickets(driver) == set()
    driver.offer(0)
    assert new_tickets(driver) == {"train-0-0-1000"}


@BUFFERS
def test_what_the_learner_was_not_told_before_its_checkpoint_is_run_again(interlude: Interlude) -> None:
    driver = Driver(batch=1, staleness=4, max_attempts=1)
    driver.offer(0, 1)
    driver.send("actor", "a", m.RolloutFailed("train-0-0-0", "engine_error"))
    interlude(driver)
    driver.restart_learner(0, epoch=1, next_task_id=2, open=open_tasks(0, 1))
    driver.offer(0, 1)
    assert new_tickets(driver) == {"train-0-0-1000"}
    driver.roll(1)
    assert train(driver, 0, epoch=1).settled == (m.Settled(1, 0, "trained"),)


@BUFFERS
def test_a_group_half_of_which_was_trained_before_the_checkpoint_is_finished(interlude: Interlude) -> None:
    driver = Driver(batch=1, staleness=3)
    driver.offer(0, group=2)
    driver.roll(0)
    train(driver, 0)
    interlude(driver)
    driver.restart_learner(1, epoch=1, next_task_id=1, open=(m.OpenTask(0, settled=(0,)),))
    driver.offer(0, group=2)
    assert new_tickets(driver) == set(), "sample 1 still runs"
    driver.roll(0, sample=1)
    assert train(driver, 1, epoch=1).settled == (m.Settled(0, 1, "trained"),)


@BUFFERS
def test_a_group_half_of_which_was_trained_after_the_checkpoint_runs_that_half_again(interlude: Interlude) -> None:
    driver = Driver(batch=1, staleness=3)
    driver.offer(0, group=2)
    driver.roll(0)
    train(driver, 0)
    interlude(driver)
    driver.restart_learner(0, epoch=1, next_task_id=1, open=open_tasks(0))
    assert new_tickets(driver) == set(), "they are in the order of the stream"
    driver.offer(0, group=2)
    assert new_tickets(driver) == {"train-0-0-1000"}
    driver.roll(0, sample=1)
    assert train(driver, 0, epoch=1).settled == (m.Settled(0, 1, "trained"),)


def test_a_buffer_that_begins_anew_issues_only_the_samples_that_the_checkpoint_does_not_know_as_settled() -> None:
    driver = Driver(batch=1, staleness=3, start=v(4))
    partial = (m.PartialSample(2, "train-0-2-0", 5),)
    driver.restart_learner(4, epoch=1, next_task_id=1, open=(m.OpenTask(0, settled=(0,), partial=partial),))
    driver.offer(0, group=4)
    assert set(driver.tickets) == {"train-0-1-1000", "train-0-3-1000"}
    driver.write("train-0-1-1000", 2, step=4, epoch=1, final=True)
    driver.score()
    settled = train(driver, 4, epoch=1).settled
    assert settled == (m.Settled(0, 2, "trained", "learner_restart"), m.Settled(0, 1, "trained"))


def cut_in_the_middle(driver: Driver) -> m.Batch:
    """The first tokens of a rollout are trained, and it runs on."""
    driver.offer(0, last=True)
    driver.write("train-0-0-0", 10)
    driver.score()
    return train(driver, 0)


@BUFFERS
def test_a_sample_that_is_as_the_checkpoint_knows_it_goes_on(interlude: Interlude) -> None:
    driver = Driver(batch=1, staleness=3, release="segment")
    assert cut_in_the_middle(driver).settled == ()
    interlude(driver)
    known = m.OpenTask(0, partial=(m.PartialSample(0, "train-0-0-0", 10),))
    driver.restart_learner(1, epoch=1, next_task_id=1, open=(known,))
    driver.offer(0, last=True)
    assert new_tickets(driver) == set()
    driver.write("train-0-0-0", 10, step=1, epoch=1, final=True)
    driver.score()
    out = driver.send("learner", "learner", m.BatchWanted(v(1, epoch=1)))
    assert list(driver.frames(out)[2]) == [0] * 12 + [1] * 10, "its first ten are trained"
    batch = driver.batch()
    assert batch is not None and batch.settled == (m.Settled(0, 0, "trained"),)


@BUFFERS
@pytest.mark.parametrize("more", ["trained", "settled"])
def test_a_sample_of_which_more_was_trained_since_ends_where_the_checkpoint_knows_it(
    interlude: Interlude, more: str
) -> None:
    driver = Driver(batch=1, staleness=3, release="segment")
    cut_in_the_middle(driver)
    driver.write("train-0-0-0", 10, step=1, final=more == "settled")
    driver.score()
    train(driver, 1)
    interlude(driver)
    known = m.OpenTask(0, partial=(m.PartialSample(0, "train-0-0-0", 10),))
    driver.restart_learner(1, epoch=1, next_task_id=1, open=(known,))
    driver.offer(0, 1, last=True)
    assert new_tickets(driver) == {"train-1-0-1000"}, "it is not begun anew"
    driver.write("train-1-0-1000", 10, step=1, epoch=1, final=True)
    driver.score()
    settled = train(driver, 1, epoch=1).settled
    assert settled == (m.Settled(0, 0, "trained", "learner_restart"), m.Settled(1, 0, "trained"))


@BUFFERS
def test_a_sample_trained_in_part_after_the_checkpoint_is_begun_anew_and_its_tokens_are_dropped_by_name(
    interlude: Interlude,
) -> None:
    driver = Driver(batch=1, staleness=3, release="segment")
    cut_in_the_middle(driver)
    driver.write("train-0-0-0", 3, step=1)
    interlude(driver)
    driver.restart_learner(0, epoch=1, next_task_id=1, open=open_tasks(0))
    driver.offer(0)
    assert new_tickets(driver) == {"train-0-0-1000"}
    assert driver.take(m.CancelRollout) == [m.CancelRollout("train-0-0-0", "learner_restart")]
    assert driver.ledger.tokens.dropped == {"learner_restart": 3}


@BUFFERS
def test_what_is_past_the_bound_after_the_way_back_is_begun_anew(interlude: Interlude) -> None:
    driver = Driver(batch=1, staleness=1)
    driver.offer(0, 1, 2, 3)
    driver.roll(0)
    train(driver, 0)
    driver.roll(1, step=1)
    train(driver, 1)
    driver.roll(2, step=2)
    interlude(driver)
    driver.restart_learner(0, epoch=1, next_task_id=4, open=open_tasks(0, 1, 2, 3))
    assert driver.take(m.CancelRollout) == [m.CancelRollout("train-3-0-0", "learner_restart")], "its engine is as far"
    driver.offer(0, 1, 2, 3)
    assert new_tickets(driver) == {"train-0-0-1000", "train-1-0-1000"}, "in the order of the stream"
    assert driver.want(0, epoch=1) is None
    tokens = driver.ledger.tokens
    assert tokens.dropped == {"learner_restart": 2} and not tokens.masked and tokens.balanced


@BUFFERS
def test_groups_that_leave_as_a_whole_are_begun_anew_as_a_whole(interlude: Interlude) -> None:
    driver = Driver(batch=2, staleness=1, release="rollout", max_attempts=1)
    driver.offer(0, 1, group=2)
    driver.send("actor", "a", m.RolloutFailed("train-0-0-0", "engine_error"))
    interlude(driver)
    driver.restart_learner(0, epoch=1, next_task_id=2, open=open_tasks(0, 1))
    driver.offer(0, 1, group=2)
    assert new_tickets(driver) == {"train-0-0-1000", "train-0-1-1000"}
    assert driver.take(m.CancelRollout) == [m.CancelRollout("train-0-1-0", "learner_restart")]


@BUFFERS
def test_a_learner_that_was_only_cut_off_asks_again_and_goes_on(interlude: Interlude) -> None:
    driver = Driver(batch=1, staleness=1)
    driver.offer(0, 1)
    driver.roll(0)
    batch = driver.want(0)
    interlude(driver)
    driver.join("learner", "learner", "1")
    again = driver.want(0)
    assert batch is not None and again is not None
    assert (again.batch_id, again.items) == (batch.batch_id, batch.items)
    driver.trained(batch)
    driver.trained(batch)
    assert driver.ledger.tokens.trained == 2 and not driver.ledger.rejected


@BUFFERS
def test_what_would_be_past_the_bound_when_its_turn_comes_is_begun_anew(interlude: Interlude) -> None:
    """Two of three can be trained in time: one in each of the next two steps."""
    driver = Driver(batch=1, staleness=2)
    driver.offer(0, 1, 2)
    for task_id in range(3):
        driver.roll(task_id)
    driver.restart_learner(1, epoch=1, next_task_id=3, open=open_tasks(0, 1, 2))
    interlude(driver)
    driver.offer(0, 1, 2)
    assert new_tickets(driver) == {"train-2-0-1000"}
    for step in (1, 2):
        assert rollout_ids(train(driver, step, epoch=1)) == [f"train-{step - 1}-0-0"]
    driver.write("train-2-0-1000", 2, step=1, epoch=1, final=True)
    driver.score()
    assert rollout_ids(train(driver, 3, epoch=1)) == ["train-2-0-1000"]
    assert not driver.ledger.tokens.masked
