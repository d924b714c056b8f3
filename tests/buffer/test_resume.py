"""A learner that starts again from a checkpoint against a buffer that lived on, or was restored from its journal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.core import Core
from protocol import messages as m
from tests.buffer.driver import Driver, rollout_ids
from tests.buffer.shadow import restored


def as_it_is(driver: Driver) -> None:
    """The buffer's process lives on."""


def by_image(driver: Driver) -> None:
    """Another process goes on for it."""
    driver.state = restored(Core(driver.state), driver.now_s).state


BUFFERS = pytest.mark.parametrize("interlude", [as_it_is, by_image])
Interlude = Callable[[Driver], None]


def train(driver: Driver, step: int, epoch: int = 0) -> m.Batch:
    batch = driver.want(step, epoch)
    assert batch is not None, f"no batch for step {step}"
    driver.trained(batch)
    return batch


@BUFFERS
def test_what_was_trained_after_the_checkpoint_is_done_again_and_what_waits_is_not(interlude: Interlude) -> None:
    driver = Driver(batch=1, staleness=4)
    driver.offer(0, 1, 2, 3)
    driver.roll(0)
    assert train(driver, 0).tasks_done == (0,)  # the checkpoint of step 1 knows it
    driver.roll(1, step=1)
    assert train(driver, 1).tasks_done == (1,)  # lost with the learner
    driver.roll(2, step=2)
    driver.write("train-3-0-0", 2, step=2)
    interlude(driver)
    driver.restart_learner(1, epoch=1)
    driver.offer(1, 2, 3)
    assert "train-1-0-3" in driver.tickets, "under an id that was never used"
    assert not {"train-0-0-3", "train-2-0-3", "train-3-0-3"} & set(driver.tickets)
    batch = train(driver, 1, epoch=1)
    assert rollout_ids(batch) == ["train-2-0-0"] and batch.tasks_done == (2,)
    assert batch.staleness == {1: 2}, "a step down from the branch that was left"
    driver.score()
    driver.write("train-3-0-0", 1, step=1, epoch=1, final=True)
    driver.score()
    assert rollout_ids(train(driver, 2, epoch=1)) == ["train-3-0-0"]
    driver.write("train-1-0-3", 2, step=2, epoch=1, final=True)
    driver.score()
    batch = train(driver, 3, epoch=1)
    assert rollout_ids(batch) == ["train-1-0-3"] and batch.tasks_done == (1,)
    tokens = driver.ledger.tokens
    assert (tokens.accepted, tokens.trained, tokens.waiting, tokens.in_flight) == (11, 11, 0, 0)


@BUFFERS
def test_a_batch_that_the_former_learner_held_goes_to_the_next_and_is_not_trained_by_both(interlude: Interlude) -> None:
    driver = Driver(batch=1, staleness=2)
    driver.offer(0, 1)
    driver.roll(0)
    held = driver.want(0)
    assert held is not None
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
def test_a_group_half_of_which_was_trained_after_the_checkpoint_is_finished(interlude: Interlude) -> None:
    driver = Driver(batch=1, staleness=3)
    driver.offer(0, group=2)
    driver.roll(0)
    assert train(driver, 0).tasks_done == ()
    interlude(driver)
    driver.restart_learner(0, epoch=1)
    driver.offer(0, group=2)
    assert set(driver.tickets) == {"train-0-0-0", "train-0-1-0"}
    driver.roll(0, sample=1)
    assert train(driver, 0, epoch=1).tasks_done == (0,)


@BUFFERS
def test_tokens_past_the_bound_after_the_way_back_are_masked_and_counted(interlude: Interlude) -> None:
    driver = Driver(batch=1, staleness=1)
    driver.offer(0, 1, 2)
    driver.roll(0)
    train(driver, 0)
    driver.roll(1, step=1)
    train(driver, 1)
    driver.roll(2, step=2)
    interlude(driver)
    driver.restart_learner(0, epoch=1)
    driver.offer(0, 1, 2)
    assert driver.want(0, epoch=1) is None, "two steps away"
    tokens = driver.ledger.tokens
    assert tokens.masked == {"stale": 2} and tokens.balanced
    assert {"train-0-0-3", "train-1-0-3"} & set(driver.tickets)


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
