"""Score leases: who gets what, and what happens when scores do not come."""

from __future__ import annotations

import numpy as np
import pytest

from stillhouse.protocol import messages as m
from tests.buffer.driver import PROMPT, Driver, rollout_ids

Make = type[Driver]


def work_of(driver: Driver, teacher: str) -> list[m.ScoreItem]:
    return [item for work in driver.take(m.ScoreWork, to=teacher) for item in work.items]


def with_teachers(make: Make, **tokens: int) -> Driver:
    """Peers of batches of 4, with teachers of so many tokens of credit."""
    driver = make(peers=False, staleness=1, batch=4)
    driver.actor()
    driver.join("learner", "learner")
    for name, credit in tokens.items():
        driver.teacher(name, tokens=credit)
    return driver


def test_a_rollout_stays_with_its_teacher_while_that_one_has_room(make: Make) -> None:
    driver = make()
    driver.teacher("u")
    driver.offer(0, 1)
    holders: dict[str, set[str]] = {}
    for _ in range(4):
        for rollout_id in ("train-0-0-0", "train-1-0-0"):
            driver.write(rollout_id, 1)
            (lease,) = driver.work
            holders.setdefault(rollout_id, set()).add(driver.work[lease][0])
            driver.answer(lease)
    assert all(len(teachers) == 1 for teachers in holders.values())
    assert holders["train-0-0-0"] != holders["train-1-0-0"], "the other one had more room"


def test_credit_is_in_context_tokens_and_absolute(make: Make) -> None:
    driver = with_teachers(make, t=10)
    driver.offer(0, 1, 2)
    for task_id in range(3):
        driver.write(f"train-{task_id}-0-0", 2)  # 4 context tokens each
    assert len(work_of(driver, "t")) == 2
    driver.send("teacher", "t", m.ScoreCredit(tokens=9, seq=2, items_received_total=0))
    assert not work_of(driver, "t"), "8 of the 9 are on their way"
    driver.send("teacher", "t", m.ScoreCredit(tokens=9, seq=1, items_received_total=2))
    assert not work_of(driver, "t"), "an old credit, late"
    driver.send("teacher", "t", m.ScoreCredit(tokens=4, seq=3, items_received_total=2))
    assert len(work_of(driver, "t")) == 1


def test_what_a_teacher_was_sent_before_takes_no_credit_again(make: Make) -> None:
    """So that a growing rollout stays where its prefix may have been kept. For another teacher all of it is new."""
    driver = with_teachers(make, t=10, u=9)
    driver.offer(0)
    for n in (4, 3, 3):
        driver.write("train-0-0-0", n)
    leases = [(name, item.context_tokens, item.known_tokens) for name, item, _ in driver.work.values()]
    assert leases == [("t", 6, 0), ("t", 9, 6), ("u", 12, 0)], "3 do not fit in 10 - 6 - 3"
    driver.write("train-0-0-0", 1, final=True)
    assert len(driver.work) == 3, "neither has room: 1 in 9 - 12, 13 in 10 - 9"


def test_an_item_longer_than_the_credit_goes_alone(make: Make) -> None:
    driver = with_teachers(make, t=3)
    driver.offer(0, 1)
    driver.write("train-0-0-0", 8)
    driver.write("train-1-0-0", 1)
    assert [item.end for item in work_of(driver, "t")] == [10]
    driver.score()
    assert not work_of(driver, "t"), "it has no credit left"


def test_an_idle_teacher_is_asked_before_one_with_more_room(make: Make) -> None:
    """One whose speed is not known yet asks for little, and would stay unknown."""
    driver = with_teachers(make, t=100, u=10)
    driver.offer(0, 1)
    for task_id in range(2):
        driver.write(f"train-{task_id}-0-0", 2)
    assert [name for name, _, _ in driver.work.values()] == ["t", "u"]


def test_work_waits_for_a_teacher_that_has_credit(make: Make) -> None:
    driver = make(peers=False)
    driver.actor()
    driver.join("learner", "learner")
    driver.offer(0)
    driver.write("train-0-0-0", 2)
    assert driver.snapshot.queues["tokens_unscored"] == 2
    driver.teacher(tokens=0)
    assert not driver.work
    driver.send("teacher", "t", m.ScoreCredit(tokens=100, seq=2, items_received_total=0))
    assert len(driver.work) == 1
    assert driver.snapshot.queues["tokens_scoring"] == 2


def test_every_pool_of_the_task_must_score_and_rows_follow_the_task(make: Make) -> None:
    driver = make(batch=1)
    driver.teacher("x", pool="expert")
    driver.offer(0, teachers=("expert", "default"))
    driver.write("train-0-0-0", 2, final=True)
    by_teacher = {name: lease for lease, (name, _, _) in driver.work.items()}
    assert set(by_teacher) == {"t", "x"}
    driver.answer(by_teacher["t"], value=-1.0)
    assert driver.want(0) is None
    driver.answer(by_teacher["x"], value=-2.0)
    out = driver.sent
    frames = driver.frames(out)
    np.testing.assert_array_equal(frames[3], np.array([[0, 0, -2, -2], [0, 0, -1, -1]], np.float32))
    assert driver.batch() is not None


def test_a_task_without_teachers_needs_no_scores(make: Make) -> None:
    driver = make(batch=1)
    driver.offer(0, teachers=())
    driver.write("train-0-0-0", 2, final=True)
    assert not driver.work
    driver.send("learner", "learner", m.BatchWanted(m.WeightVersion(0, 0)))
    assert driver.frames(driver.sent)[3].shape == (0, 4)
    assert rollout_ids(driver.batch()) == ["train-0-0-0"]


def test_an_expired_lease_goes_to_another_teacher_and_late_scores_are_refused(make: Make) -> None:
    driver = make(lease_s=10.0)
    driver.teacher("u")
    driver.offer(0)
    driver.write("train-0-0-0", 2, final=True)
    (first,) = driver.work
    slow = driver.work[first][0]
    driver.wait(9.0)
    assert list(driver.work) == [first]
    driver.wait(1.0)
    second = max(driver.work)
    assert second != first and driver.work[second][0] != slow
    assert driver.answer(first).statuses == ("expired",)
    assert driver.answer(second).statuses == ("accepted",)


def test_repeated_scores_get_the_same_answer_and_count_once(make: Make) -> None:
    driver = make()
    driver.offer(0)
    driver.write("train-0-0-0", 2, final=True)
    (lease,) = driver.work
    message, scores = m.Scores((lease,)), np.full(4, -1, np.float32)
    for _ in range(3):
        driver.send("teacher", "t", message, scores)
    assert [ack.statuses for ack in driver.take(m.ScoresAck)] == [("accepted",)] * 3
    assert driver.snapshot.queues["tokens_scored"] == 2


@pytest.mark.parametrize(
    ("value", "n_extra", "reason"),
    [
        (np.nan, 0, "nan_score"),
        (-np.inf, 0, "inf_score"),
        (0.1, 0, "positive_score"),
        (-1e30, 0, "absurd_score"),
        (-1.0, 1, "score_length"),
    ],
)
def test_bad_scores_are_refused_counted_and_asked_of_another_teacher(
    make: Make, value: float, n_extra: int, reason: str
) -> None:
    driver = make()
    driver.teacher("u")
    driver.offer(0)
    driver.write("train-0-0-0", 2, final=True)
    (lease,) = driver.work
    bad = driver.work[lease][0]
    ack = driver.answer(lease, value, n_extra)
    assert (ack.statuses, ack.reasons) == (("rejected",), (reason,))
    assert driver.ledger.rejected == {reason: 1}
    ((other, _, _),) = driver.work.values()
    assert other != bad


def test_a_teacher_that_failed_an_item_gets_it_again_only_when_nobody_else_can(make: Make) -> None:
    driver = make(peers=False, max_score_attempts=3)
    driver.actor()
    driver.join("learner", "learner")
    driver.teacher("t")
    driver.teacher("u", tokens=0)
    driver.offer(0, 1)
    driver.write("train-0-0-0", 2)
    driver.refuse_work(next(iter(driver.work)))
    assert not driver.work, "it waits for `u`, which has no credit"
    driver.write("train-1-0-0", 2)
    assert [item.rollout_id for _, item, _ in driver.work.values()] == ["train-1-0-0"], "others do not wait behind it"
    driver.lose("teacher", "u")
    driver.send("teacher", "t", m.ScoreCredit(tokens=100, seq=2, items_received_total=2))
    assert {item.rollout_id for _, item, _ in driver.work.values()} == {"train-0-0-0", "train-1-0-0"}


def test_tokens_that_no_teacher_can_score_are_masked(make: Make) -> None:
    driver = make(batch=1, max_score_attempts=2)
    driver.offer(0)
    driver.write("train-0-0-0", 3)
    for _ in range(2):
        driver.refuse_work(next(iter(driver.work)))
    assert driver.ledger.tokens.masked == driver.ledger.tokens.masked == {"unscorable": 3}
    driver.write("train-0-0-0", 2, final=True)
    driver.score()
    batch = driver.batch_for(0)
    assert batch.staleness == {0: 2}, "the rest of the rollout is trained"
    driver.trained(batch)
    assert driver.ledger.rollouts.trained == 1
    assert driver.ledger.segments.masked == {"unscorable": 1}


def test_a_teacher_that_came_back_is_sent_nothing_before_its_next_credit(make: Make) -> None:
    driver = make()
    driver.offer(0)
    driver.lose("teacher", "t")
    driver.write("train-0-0-0", 2)
    driver.join("teacher", "t", pool="default")
    assert not driver.work
    driver.send("teacher", "t", m.ScoreCredit(tokens=100, seq=2, items_received_total=0))
    assert len(driver.work) == 1


def test_evaluation_is_scored_first_then_the_oldest_ticket(make: Make) -> None:
    driver = make(peers=False, batch=4)
    driver.actor()
    driver.join("learner", "learner")
    driver.offer(0, 1)
    driver.offer(9, kind="eval", eval_id="e")
    for rollout_id in ("train-1-0-0", "train-0-0-0", "eval-9-0-0"):
        driver.write(rollout_id, 2)
    driver.teacher()
    items = work_of(driver, "t")
    assert [item.rollout_id for item in items] == ["eval-9-0-0", "train-0-0-0", "train-1-0-0"]


def test_a_teachers_prompt_stands_in_place_of_the_students(make: Make) -> None:
    """In every segment's frame, which is what counts towards the credit; the rollout itself is the student's."""
    driver = with_teachers(make, t=7)
    own = [7, 8, 9, 7]
    task = m.Task(0, "train", 1, m.Sampling(max_new_tokens=10), teacher_prompt_tokens=len(own))
    out = driver.send("learner", "learner", m.TasksOffered((task,)), np.array([*PROMPT, *own], np.int32))
    assert [a.tolist() for o in out if isinstance(o.message, m.Tickets) for a in o.arrays] == [[*PROMPT]]
    driver.write("train-0-0-0", 2)
    ((item, frame),) = [(item, ids.tolist()) for _, item, ids in driver.work.values()]
    assert frame == [*own, 10, 11] and item.context_tokens == 6
    assert (item.start, item.end, item.first, item.shift) == (0, 4, 2, 2)
    driver.write("train-0-0-0", 2, final=True)
    assert len(driver.work) == 1, "two more do not fit in 7 - 6"
    driver.send("teacher", "t", m.ScoreCredit(tokens=9, seq=2, items_received_total=1))
    _, item, ids = driver.work[max(driver.work)]
    assert ids.tolist() == [*own, 10, 11, 10, 11] and item.first == 4 and item.known_tokens == 6
    driver.score()
    assert driver.state.snapshot(0.0).queues["tokens_scored"] == 4


def test_teachers_are_told_which_segment_of_a_rollout_is_the_last(make: Make) -> None:
    """Also where an earlier one is leased again behind it."""
    driver = make(staleness=1, batch=4)
    driver.offer(0)
    driver.write("train-0-0-0", 2)
    driver.write("train-0-0-0", 2)
    driver.write("train-0-0-0", 2, final=True)
    assert [(item.end, item.last) for _, item, _ in driver.work.values()] == [(4, False), (6, False), (8, True)]
    first = min(driver.work)
    driver.send("teacher", "t", m.ScoreFailed((first,), "out of memory"))
    _, item, _ = driver.work[max(driver.work)]
    assert (item.end, item.last) == (4, False)


@pytest.mark.parametrize("n", [-1, 4, 5])
def test_a_teachers_prompt_that_leaves_none_for_the_student_is_refused(make: Make, n: int) -> None:
    driver = make()
    task = m.Task(0, "train", 1, m.Sampling(), teacher_prompt_tokens=n)
    driver.send("learner", "learner", m.TasksOffered((task,)), np.array([1, 2, 3, 4], np.int32))
    (refused,) = driver.take(m.Refused)
    assert refused.got == f"teacher_prompt_tokens {n} of 4"
