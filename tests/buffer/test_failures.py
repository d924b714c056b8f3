"""Peers that fail, fall silent, die and come back."""

from __future__ import annotations

import msgspec
import pytest

from stillhouse.buffer.core import Core
from stillhouse.buffer.ledger import MAX_CLASSES, MAX_EXAMPLES, MAX_TEXT
from stillhouse.protocol import messages as m
from tests.buffer.driver import Driver, rollout_ids, tasks_of, v
from tests.buffer.shadow import restored

Make = type[Driver]


def test_a_failed_rollout_is_dropped_and_tried_again_with_another_seed(make: Make) -> None:
    driver = make()
    driver.offer(0)
    driver.write("train-0-0-0", 2)
    driver.send("actor", "a", m.RolloutFailed("train-0-0-0", "engine_error"))
    assert driver.take(m.RolloutFailedAck) == [m.RolloutFailedAck("train-0-0-0")]
    assert driver.ledger.tokens.dropped == {"engine_error": 2}
    again = driver.tickets["train-0-0-1"]
    assert again.sampling.seed != driver.tickets["train-0-0-0"].sampling.seed
    driver.send("actor", "a", m.RolloutFailed("train-0-0-0", "engine_error"))
    assert driver.take(m.RolloutFailedAck) == [m.RolloutFailedAck("train-0-0-0")], "repeated, and known"
    assert "train-0-0-2" not in driver.tickets


def test_after_max_attempts_the_sample_is_dropped_for_good(make: Make) -> None:
    driver = make(max_attempts=2, staleness=0, batch=1)
    driver.offer(0, 1)
    driver.send("actor", "a", m.RolloutFailed("train-0-0-0", "engine_error"))
    assert driver.snapshot.queues["rollouts_live"] == 1
    driver.send("actor", "a", m.RolloutFailed("train-0-0-1", "engine_error"))
    assert set(driver.tickets) == {"train-0-0-0", "train-0-0-1", "train-1-0-0"}
    assert driver.snapshot.queues["rollouts_given_up_total"] == 1


def test_a_new_incarnation_means_that_the_old_one_is_dead(make: Make) -> None:
    driver = make()
    driver.offer(0)
    driver.write("train-0-0-0", 2)
    driver.join("actor", "a", incarnation="2")
    assert driver.ledger.tokens.dropped == {"actor_lost": 2}
    assert "train-0-0-1" not in driver.tickets, "the new process gave no credit yet"
    driver.send("actor", "a", m.TicketCredit(1, 1, 0))
    assert "train-0-0-1" in driver.tickets
    assert driver.take(m.Membership)[-1] == m.Membership(("a",), ("2",))


def test_a_reconnect_of_the_same_incarnation_loses_nothing(make: Make) -> None:
    driver = make()
    driver.offer(0)
    driver.write("train-0-0-0", 2)
    driver.join("actor", "a")
    ack = driver.write("train-0-0-0", 1, final=True)
    assert ack is not None and ack.status == "accepted"


def test_an_actor_back_from_silence_is_told_to_stop_what_was_taken_from_it(make: Make) -> None:
    driver = make()
    driver.offer(0)
    driver.write("train-0-0-0", 2)
    driver.lose("actor", "a")
    driver.join("actor", "a")
    assert driver.take(m.CancelRollout) == [m.CancelRollout("train-0-0-0", "actor_lost")]
    late = driver.write("train-0-0-0", 1, final=True)
    assert late is not None and late.reason == "rollout_ended"
    driver.send("actor", "a", m.TicketCredit(1, 2, 1))
    assert "train-0-0-1" in driver.tickets
    driver.lose("actor", "a")
    driver.join("actor", "a")
    assert driver.take(m.CancelRollout) == [m.CancelRollout("train-0-0-1", "actor_lost")], "the first is told already"


def test_an_actor_back_from_silence_is_not_held_to_tickets_it_never_got(make: Make) -> None:
    driver = make(peers=False)
    driver.join("learner", "learner")
    driver.actor("a", n=2)
    driver.offer(0, 1, 2)
    assert len(driver.tickets) == 2
    driver.lose("actor", "a")
    driver.join("actor", "a")
    assert len(driver.tickets) == 2, "nothing before its next credit"
    driver.send("actor", "a", m.TicketCredit(2, 2, 0))
    assert len(driver.tickets) == 4, "the two on their way were lost"


def test_ticket_credit_is_absolute_and_counts_what_is_on_its_way(make: Make) -> None:
    driver = make(peers=False, batch=10)
    driver.join("learner", "learner")
    driver.actor("a", n=3)
    driver.offer(*range(8))
    assert len(driver.tickets) == 3
    driver.send("actor", "a", m.TicketCredit(3, 2, 0))
    assert len(driver.tickets) == 3, "three are on their way"
    driver.send("actor", "a", m.TicketCredit(3, 1, 3))
    assert len(driver.tickets) == 3, "an old credit"
    driver.send("actor", "a", m.TicketCredit(1, 3, 3))
    assert len(driver.tickets) == 4


def test_actors_take_turns(make: Make) -> None:
    driver = make(peers=False, batch=10)
    driver.join("learner", "learner")
    driver.actor("a", n=10)
    driver.actor("b", n=10)
    driver.offer(*range(4))
    assert sorted(driver.holder.values()) == ["a", "a", "b", "b"]


def test_a_silent_rollout_is_taken_back_and_cancelled(make: Make) -> None:
    driver = make(ticket_timeout_s=100.0)
    driver.offer(0, 1)
    driver.wait(60.0)
    driver.write("train-1-0-0", 1)
    driver.wait(50.0)
    assert driver.take(m.CancelRollout) == [m.CancelRollout("train-0-0-0", "ticket_timeout")]
    assert "train-0-0-1" in driver.tickets and "train-1-0-1" not in driver.tickets
    driver.wait(50.0)
    assert driver.take(m.CancelRollout) == [m.CancelRollout("train-1-0-0", "ticket_timeout")]


@pytest.mark.parametrize("trained", [False, True])
def test_a_rollout_that_was_trained_in_part_ends_where_it_stands(make: Make, trained: bool) -> None:
    driver = make(batch=1, staleness=3, release="segment")
    driver.offer(0, 1)
    driver.write("train-0-0-0", 10)
    driver.score()
    batch = driver.batch_for(0)
    if trained:
        driver.trained(batch)
    driver.write("train-0-0-0", 2)
    driver.send("actor", "a", m.RolloutFailed("train-0-0-0", "engine_error"))
    assert "train-0-0-1" not in driver.tickets
    assert driver.ledger.tokens.dropped == {}
    late = driver.write("train-0-0-0", 1)
    assert late is not None and late.reason == "rollout_ended"
    if not trained:
        driver.trained(batch)
    driver.roll(1, n=10, step=0)
    batch = driver.want(1)
    assert rollout_ids(batch) == ["train-0-0-0", "train-1-0-0"], "what was accepted may be trained"
    assert batch is not None and not batch.items[0].final and batch.items[1].final
    driver.trained(batch)
    assert driver.ledger.rollouts.trained == 2


def test_a_new_learner_process_frees_the_batch_before_it_says_anything(make: Make) -> None:
    driver = make(batch=1, staleness=1)
    driver.offer(0)
    driver.roll(0)
    assert driver.want(0) is not None
    driver.join("learner", "learner", "2")
    assert driver.ledger.tokens.waiting == 2


def test_a_learner_that_says_goodbye_gives_its_batch_back_and_cannot_train_it_later(make: Make) -> None:
    driver = make(batch=1, staleness=1)
    driver.offer(0)
    driver.roll(0)
    batch = driver.batch_for(0)
    driver.send("learner", "learner", m.Goodbye("done"))
    assert driver.ledger.tokens.waiting == 2
    driver.join("learner", "learner")
    driver.trained(batch)
    assert driver.ledger.tokens.trained == 0
    assert driver.ledger.rejected == {"unknown_batch": 1}
    assert driver.take(m.BatchTrainedAck) != [], "so that it is not sent for ever"


def test_tickets_after_a_fork_wait_for_weights_of_the_new_branch(make: Make) -> None:
    driver = make(batch=1, staleness=0)
    driver.offer(0, 1, 2)
    for step in range(2):
        driver.roll(step, step=step)
        batch = driver.batch_for(step)
        driver.trained(batch)
    assert driver.tickets["train-2-0-0"].min_version == v(2)
    driver.restart_learner(1, epoch=1, next_task_id=1)
    assert driver.take(m.CancelRollout) == [m.CancelRollout("train-2-0-0", "learner_restart")], "none could be trained"
    driver.offer(1, 2)
    assert driver.tickets["train-1-0-1000"].min_version == v(1, epoch=1)


def test_what_names_an_epoch_that_no_learner_has_begun_is_refused(make: Make) -> None:
    driver = make(batch=1, staleness=1)
    driver.offer(0)
    driver.roll(0)
    driver.join("learner", "learner", "2")
    assert driver.want(0, epoch=3) is None
    (refused,) = driver.take(m.Refused)
    assert (refused.got, refused.expected) == ("version 3.0", "epoch 0")


def test_a_learner_of_a_branch_that_was_left_is_refused(make: Make) -> None:
    driver = make(batch=1)
    driver.restart_learner(0, epoch=2, parent_epoch=0)
    assert driver.want(5, epoch=1) is None
    (refused,) = driver.take(m.Refused)
    assert (refused.got, refused.expected) == ("version 1.5", "epoch 2")


def test_a_learner_that_goes_back_without_a_new_epoch_is_refused(make: Make) -> None:
    driver = make(batch=1, staleness=2)
    driver.offer(0)
    driver.roll(0)
    batch = driver.batch_for(0)
    driver.trained(batch)
    driver.restart_learner(0, epoch=0, parent_epoch=0)
    (refused,) = driver.take(m.Refused)
    assert (refused.got, refused.expected) == ("version 0.0", "an epoch above 0")


def test_an_older_version_that_comes_late_is_not_the_published_one_until_the_learner_goes_back(make: Make) -> None:
    driver = make()
    for step in (1, 3, 4, 2):
        driver.send("learner", "learner", m.VersionPublished(v(step)))
    assert driver.state.published == v(4)
    driver.restart_learner(2, epoch=1)
    assert driver.state.published == v(2, epoch=1)


def test_tasks_offered_again_are_duplicates_unless_their_training_was_lost(make: Make) -> None:
    driver = make(batch=1, staleness=3)
    driver.offer(0, 1, 2)
    driver.offer(0)
    assert len(driver.tickets) == 3
    driver.roll(0)
    batch = driver.batch_for(0)
    assert tasks_of(batch) == (0,)
    driver.trained(batch)
    driver.offer(0)
    assert len(driver.tickets) == 3, "it is done"
    driver.restart_learner(0, epoch=1)
    driver.take(m.TasksAck)
    driver.offer(0, 1)
    assert driver.take(m.TasksAck)[0].task_ids == (0, 1)
    assert set(driver.tickets) - {f"train-{i}-0-0" for i in range(3)} == {"train-0-0-1000"}, "the others are still here"


# --------------------------------------------------------------------------------------- reasons that actors give


def fail_each(driver: Driver, *failures: m.RolloutFailed) -> None:
    """One rollout each, of which two tokens were written."""
    for i, failure in enumerate(failures):
        driver.offer(i)
        driver.write(f"train-{i}-0-0", 2)
        driver.send("actor", "a", msgspec.structs.replace(failure, rollout_id=f"train-{i}-0-0"))


def failed(error: str, detail: str = "", reason: m.FailureReason = "env_error") -> m.RolloutFailed:
    return m.RolloutFailed("", reason, error, detail)


def test_texts_of_exceptions_are_no_reasons_and_few_are_kept(make: Make) -> None:
    driver = make(batch=100)
    fail_each(driver, *(failed("KeyError", f"no tool {i}") for i in range(40)), failed("OSError", "gone"))
    assert driver.ledger.tokens.dropped == {"env_error_KeyError": 80, "env_error_OSError": 2}
    tools, gone = driver.snapshot.failures
    assert (tools.reason, tools.n, tools.newest) == ("env_error_KeyError", 40, "a: KeyError: no tool 39")
    assert tools.examples == tuple(f"a: KeyError: no tool {i}" for i in range(MAX_EXAMPLES))
    assert (gone.reason, gone.n, gone.examples) == ("env_error_OSError", 1, ("a: OSError: gone",))


def test_the_reason_that_occurred_last_stands_last(make: Make) -> None:
    driver = make(batch=100)
    fail_each(driver, failed("", "slow", "env_timeout"), failed("OSError"), failed("", "slower", "env_timeout"))
    assert [(each.reason, each.n) for each in driver.snapshot.failures] == [
        ("env_error_OSError", 1),
        ("env_timeout", 2),
    ]
    assert driver.snapshot.failures[-1].newest == "a: slower"


def test_classes_of_exceptions_are_bounded_and_must_be_names(make: Make) -> None:
    """A hostile environment can make as many as it likes."""
    driver = make(batch=1000)
    fail_each(driver, *(failed(f"Error{i}") for i in range(3 * MAX_CLASSES)), failed("a b\nc"), failed("X" * 10**4))
    reasons = {f"env_error_Error{i}" for i in range(MAX_CLASSES)} | {"env_error_other"}
    assert driver.ledger.tokens.dropped.keys() == reasons == {each.reason for each in driver.snapshot.failures}
    assert driver.ledger.tokens.dropped["env_error_other"] == 2 * (2 * MAX_CLASSES + 2)


def test_classes_stay_bounded_over_the_launches_of_a_run(make: Make) -> None:
    first = make(batch=1000)
    fail_each(first, *(failed(f"Error{i}") for i in range(MAX_CLASSES)))
    again = make(batch=1000, carried=first.ledger)
    fail_each(again, failed("Error0"), failed("New"))
    dropped = again.ledger.tokens.dropped
    assert dropped["env_error_Error0"] == 4 and dropped["env_error_other"] == 2 and "env_error_New" not in dropped


def test_texts_are_cut(make: Make) -> None:
    driver = make()
    fail_each(driver, failed("ValueError", "y" * 10**6))
    (each,) = driver.snapshot.failures
    assert [len(text) for text in (each.newest, *each.examples)] == [MAX_TEXT, MAX_TEXT]


def test_failures_outlive_the_buffers_process(make: Make) -> None:
    driver = make(batch=100)
    fail_each(driver, failed("KeyError", "no tool"), failed("", "slow", "env_timeout"))
    core = restored(Core(driver.state), 1.0)
    assert core.state.snapshot(1.0).failures == driver.snapshot.failures
