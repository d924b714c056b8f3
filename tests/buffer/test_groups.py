"""Dynamic sampling and overlong filtering: what is not trained, and what becomes of its place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stillhouse.protocol import messages as m
from tests.buffer.driver import Driver, rollout_ids

Make = type[Driver]
EQUAL: dict[str, Any] = {"release": "rollout", "dynamic_sampling": 3}
OVERLONG: dict[str, Any] = {"release": "rollout", "mask_truncated": True}


def end(
    driver: Driver,
    task_id: int,
    sample: int,
    reward: float | None,
    finish: str = "stop",
    *,
    n: int = 2,
    step: int = 0,
    attempt: int = 0,
    epoch: int = 0,
) -> str:
    """A whole rollout in one segment, not scored yet."""
    rollout_id = f"train-{task_id}-{sample}-{attempt}"
    message, arrays = driver.make(rollout_id, n, final=True, step=step, epoch=epoch)
    driver.submit(msgspec.structs.replace(message, reward=reward, finish_reason=finish), arrays)
    return rollout_id


def group(driver: Driver, task_id: int, *rewards: float | None, step: int = 0) -> None:
    """All rollouts of a task, scored."""
    for sample, reward in enumerate(rewards):
        end(driver, task_id, sample, reward, step=step)
    driver.score()


def test_a_group_of_equal_rewards_is_dropped_and_another_task_takes_its_place(make: Make) -> None:
    driver = make(batch=2, staleness=0, **EQUAL)
    driver.offer(0, 1, group=2)
    assert driver.want(0) is None and set(driver.tickets) == {"train-0-0-0", "train-0-1-0"}
    group(driver, 0, 1.0, 1.0)
    assert {"train-1-0-0", "train-1-1-0"} <= set(driver.tickets), "no place is left behind"
    assert driver.batch() is None
    ledger = driver.ledger
    assert ledger.tokens.dropped == {"equal_rewards": 4} and ledger.rollouts.dropped == {"equal_rewards": 2}
    assert driver.snapshot.queues["groups_equal_total"] == 1
    group(driver, 1, 1.0, 0.0)
    batch = driver.batch()
    assert rollout_ids(batch) == ["train-1-0-0", "train-1-1-0"]
    assert batch is not None
    dropped = tuple(m.Settled(0, sample, "dropped", "equal_rewards") for sample in range(2))
    assert batch.settled == (*dropped, m.Settled(1, 0, "trained"), m.Settled(1, 1, "trained"))
    driver.trained(batch)
    assert driver.ledger.tokens == m.LedgerCounts(8, 4, {}, {"equal_rewards": 4}, 0, 0)


def test_teachers_do_not_score_what_will_not_be_trained(make: Make) -> None:
    driver = make(batch=2, staleness=1, **EQUAL)
    driver.offer(0, group=2)
    end(driver, 0, 0, 0.5)
    end(driver, 0, 1, 0.5)
    assert driver.ledger.tokens.dropped == {"equal_rewards": 4}, "both had ended; no score was there"
    (lease,) = driver.work  # of the first one, before anything was known; the other one was sent to nobody
    assert driver.answer(lease).statuses == ("expired",)
    assert driver.ledger.balanced


def test_without_it_groups_of_equal_rewards_are_trained(make: Make) -> None:
    driver = make(batch=2, staleness=1, release="rollout")
    driver.offer(0, group=2)
    driver.want(0)
    group(driver, 0, 1.0, 1.0)
    assert rollout_ids(driver.batch()) == ["train-0-0-0", "train-0-1-0"]
    assert not [name for name in driver.snapshot.queues if "equal" in name]


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [((None, None), False), ((1.0, None), False), ((None, 0.0, 1.0), True), ((0.25, 0.25, 0.5), True)],
)
def test_a_rollout_without_a_reward_is_compared_with_nothing(
    make: Make, rewards: tuple[float | None, ...], kept: bool
) -> None:
    driver = make(batch=3, staleness=0, **EQUAL)
    driver.offer(0, group=len(rewards), last=True)
    driver.want(0)
    group(driver, 0, *rewards)
    assert bool(driver.ledger.tokens.dropped) != kept
    batch = driver.batch()
    assert batch is not None and len(batch.items) == (len(rewards) if kept else 0)


def test_a_streak_is_counted_in_batches_until_a_batch_leaves(make: Make) -> None:
    driver = make(batch=4, staleness=1, **EQUAL)
    driver.offer(*range(12), group=2)
    driver.want(0)
    in_a_row: list[int] = []
    for task_id in range(8):
        group(driver, task_id, 0.0, 0.0)
        in_a_row.append(driver.snapshot.queues["batches_equal_in_a_row"])
    assert in_a_row == [0, 1, 1, 2, 2, 3, 3, 4] and driver.batch() is None
    for task_id in (8, 9):
        group(driver, task_id, 0.0, 1.0)
    assert driver.batch() is not None
    queues = driver.snapshot.queues
    assert (queues["batches_equal_in_a_row"], queues["groups_equal_total"]) == (0, 8)


def test_places_never_run_out_however_many_groups_are_equal(make: Make) -> None:
    driver = make(batch=2, staleness=1, task_queue=4, **EQUAL)
    driver.want(0)
    for task_id in range(200):
        driver.send("actor", "a", m.TicketCredit(100, 2 + task_id, 2 * task_id))
        driver.offer(task_id, group=2)
        assert f"train-{task_id}-1-0" in driver.tickets, f"task {task_id} waits for a place"
        group(driver, task_id, 1.0, 1.0)
    assert driver.snapshot.queues["rollouts_live"] == 0 and driver.ledger.rollouts.dropped == {"equal_rewards": 400}


def test_a_learner_that_goes_back_runs_again_what_was_dropped_after_its_checkpoint(make: Make) -> None:
    """What its checkpoint knows as dropped stays so."""
    driver = make(batch=2, staleness=1, **EQUAL)
    driver.offer(0, 1, 2, group=2)
    driver.want(0)
    group(driver, 0, 1.0, 1.0)
    group(driver, 1, 1.0, 0.0)
    batch = driver.batch()
    assert batch is not None and len(batch.settled) == 4
    driver.trained(batch)
    group(driver, 2, 0.0, 0.0, step=1)
    driver.restart_learner(1, 1, next_task_id=3, open=(m.OpenTask(2),))
    driver.offer(0, 1, 2, group=2)
    assert {i for i in driver.tickets if i.endswith("-1000")} == {"train-2-0-1000", "train-2-1-1000"}
    end(driver, 2, 0, 0.0, step=1, epoch=1, attempt=1000)
    end(driver, 2, 1, 0.0, step=1, epoch=1, attempt=1000)
    assert driver.ledger.rollouts.dropped == {"equal_rewards": 6}
    driver.offer(3, group=2)
    for sample in range(2):
        end(driver, 3, sample, float(sample), step=1, epoch=1, attempt=1000)
    driver.score()
    batch = driver.batch_for(1, epoch=1)
    assert [(one.task_id, one.fate) for one in batch.settled] == [
        *[(2, "dropped")] * 2,
        *[(3, "trained")] * 2,
    ]


# ------------------------------------------------------------------------------------------------ overlong filtering


def test_a_rollout_that_ended_at_the_limit_is_masked_and_its_reward_goes_along(make: Make) -> None:
    driver = make(batch=1, staleness=1, **OVERLONG)
    driver.offer(0, group=2)
    driver.write("train-0-0-0", 3)
    driver.score()
    end(driver, 0, 0, 0.0, "length", n=4)
    end(driver, 0, 1, 1.0)
    driver.score()
    ledger = driver.ledger
    assert ledger.tokens.masked == {"truncated": 7} and ledger.rollouts.masked == {"truncated": 1}
    assert ledger.segments.masked == {"truncated": 2}, "the one that was scored, and the one that was not"
    batch = driver.batch_for(0)
    assert [(i.rollout_id, i.reward) for i in batch.items] == [
        ("train-0-1-0", 1.0),
        ("train-0-0-0", 0.0),
    ]
    assert batch.settled == (m.Settled(0, 0, "masked", "truncated"), m.Settled(0, 1, "trained"))
    driver.trained(batch)
    assert driver.ledger.tokens == m.LedgerCounts(9, 2, {"truncated": 7}, {}, 0, 0)


def test_a_group_of_which_all_ended_at_the_limit_is_settled_and_its_places_are_free(make: Make) -> None:
    driver = make(batch=2, staleness=0, **OVERLONG)
    driver.offer(0, 1, group=2)
    driver.want(0)
    for sample in range(2):
        end(driver, 0, sample, float(sample), "length")
    assert "train-1-0-0" in driver.tickets and driver.batch() is None
    group(driver, 1, 1.0, 0.0)
    batch = driver.batch()
    assert batch is not None and [(one.task_id, one.fate, one.reason) for one in batch.settled] == [
        *[(0, "masked", "truncated")] * 2,
        *[(1, "trained", "")] * 2,
    ]


def test_without_it_and_in_evaluations_such_rollouts_are_as_others(make: Make) -> None:
    plain = make(batch=1, staleness=1, release="rollout")
    plain.offer(0)
    end(plain, 0, 0, 1.0, "length")
    plain.score()
    assert rollout_ids(plain.want(0)) == ["train-0-0-0"]
    driver = make(batch=1, staleness=1, **OVERLONG)
    driver.offer(0, kind="eval", eval_id="e")
    message, arrays = driver.make("eval-0-0-0", 2, final=True)
    driver.submit(msgspec.structs.replace(message, finish_reason="length"), arrays)
    driver.score()
    assert driver.ledger.eval_tokens == m.LedgerCounts(2, 0, {}, {}, waiting=2, in_flight=0)
