"""The door for segments: order, duplicates, and everything that is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from stillhouse.buffer.ledger import RejectReason as Reason
from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import VersionSpan
from tests.buffer.driver import Array, Driver, v

Make = type[Driver]
Columns = dict[str, Any]


def test_an_accepted_segment_is_acknowledged_counted_and_offered_to_a_teacher(make: Make) -> None:
    driver = make()
    driver.offer(0)
    ack = driver.write("train-0-0-0", 3)
    assert ack == m.SegmentAck("train-0-0-0", 0, "accepted")
    (_, item, ids) = next(iter(driver.work.values()))
    assert (item.start, item.end, list(ids)) == (0, 5, [1, 2, 10, 11, 12])
    ledger = driver.ledger
    assert (ledger.rollouts.accepted, ledger.segments.accepted, ledger.tokens.accepted) == (1, 1, 3)
    assert ledger.tokens.in_flight == 3, "leased to the teacher"


def test_a_repeated_segment_is_a_duplicate_and_counted_once(make: Make) -> None:
    driver = make()
    driver.offer(0)
    segment = driver.make("train-0-0-0", 2)
    assert driver.submit(*segment) == m.SegmentAck("train-0-0-0", 0, "accepted")
    assert driver.submit(*segment) == m.SegmentAck("train-0-0-0", 0, "duplicate")
    assert driver.ledger.tokens.accepted == 2


def test_a_segment_repeated_after_its_rollout_was_trained_is_still_a_duplicate(make: Make) -> None:
    driver = make(batch=1)
    driver.offer(0)
    segment = driver.make("train-0-0-0", 2, final=True)
    driver.submit(*segment)
    driver.score()
    batch = driver.batch_for(0)
    driver.trained(batch)
    ack = driver.submit(*segment)
    assert ack is not None and ack.status == "duplicate"
    assert driver.ledger.tokens.trained == 2


def test_segments_ahead_of_a_missing_one_wait_for_it(make: Make) -> None:
    driver = make()
    driver.offer(0)
    first, second, third = (driver.make("train-0-0-0", 1, final=i == 2) for i in range(3))
    assert driver.submit(*third) is None
    assert driver.submit(*second) is None
    assert driver.ledger.tokens.accepted == 0, "what is held is neither counted nor acknowledged"
    driver.take(m.SegmentAck)
    driver.submit(*first)
    assert [(ack.index, ack.status) for ack in driver.take(m.SegmentAck)] == [
        (0, "accepted"),
        (1, "accepted"),
        (2, "accepted"),
    ]
    assert driver.ledger.tokens.accepted == 3


def test_too_many_segments_ahead_of_a_missing_one_end_the_rollout(make: Make) -> None:
    driver = make(max_held_segments=1)
    driver.offer(0)
    _, second, third = (driver.make("train-0-0-0", 1) for _ in range(3))
    driver.submit(*second)
    driver.take(m.SegmentAck)
    driver.submit(*third)
    reasons = {ack.index: ack.reason for ack in driver.take(m.SegmentAck)}
    assert reasons == {2: Reason.OUT_OF_ORDER, 1: Reason.ROLLOUT_ENDED}
    assert "train-0-0-1" in driver.tickets, "the sample is tried again"


def test_a_held_segment_that_is_sent_again_does_no_harm_when_as_many_are_held_as_may_be(make: Make) -> None:
    driver = make(max_held_segments=1)
    driver.offer(0)
    first, second = (driver.make("train-0-0-0", 1, final=i == 1) for i in range(2))
    assert driver.submit(*second) is None
    assert driver.submit(*second) is None, "it is held already"
    assert driver.take(m.SegmentAck) == [] and "train-0-0-1" not in driver.tickets
    driver.submit(*first)
    assert [(ack.index, ack.status) for ack in driver.take(m.SegmentAck)] == [(0, "accepted"), (1, "accepted")]
    assert driver.ledger.tokens.accepted == 2 and driver.ledger.rejected == {}


def test_nothing_may_follow_the_final_segment(make: Make) -> None:
    driver = make()
    driver.offer(0)
    driver.write("train-0-0-0", 1, final=True)
    ack = driver.write("train-0-0-0", 1)
    assert ack is not None and ack.reason == Reason.AFTER_FINAL
    driver.score()
    assert driver.ledger.tokens.waiting == 1, "the finished rollout is not harmed"


def test_a_segment_without_a_ticket_or_of_another_actor_is_refused(make: Make) -> None:
    driver = make()
    driver.offer(0)
    driver.actor("b")
    unknown = driver.submit(*driver.make("train-7-0-0"))
    assert unknown is not None and unknown.reason == Reason.UNKNOWN_ROLLOUT
    segment = driver.make("train-0-0-0", 1)
    foreign = driver.submit(*segment, actor="b")
    assert foreign is not None and foreign.reason == Reason.WRONG_ACTOR
    mine = driver.submit(*segment, actor="a")
    assert mine is not None and mine.status == "accepted"


def _set(name: str, at: int, value: Any) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        columns[name][at] = value

    return change


def _replace(**fields: Any) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        columns["message"] = msgspec.structs.replace(columns["message"], **fields)

    return change


def _shorten(columns: Columns) -> None:
    columns["sampled"] = columns["sampled"][:-1]


def _retype(columns: Columns) -> None:
    columns["logprobs"] = columns["logprobs"].astype(np.float64)


def _spans(*spans: tuple[int, int, int]) -> Callable[[Columns], None]:
    return _replace(spans=tuple(VersionSpan(v(step), start, end) for step, start, end in spans))


def _own_prompt(n: int) -> Callable[[Columns], None]:
    return _replace(own_prompt_tokens=n)


# Segment 0 of a rollout with prompt [1, 2] and four sampled tokens at [2, 6).
FAULTS: list[tuple[Callable[[Columns], None], Reason]] = [
    (_replace(start=1, end=7), Reason.OFFSET_GAP),
    (_replace(end=5), Reason.LENGTH_MISMATCH),
    (_replace(end=-1), Reason.LENGTH_MISMATCH),
    (_shorten, Reason.LENGTH_MISMATCH),
    (_retype, Reason.LENGTH_MISMATCH),
    (_set("ids", 3, -1), Reason.TOKEN_ID_OUT_OF_RANGE),
    (_set("ids", 3, 50), Reason.TOKEN_ID_OUT_OF_RANGE),
    (_set("ids", 0, 2), Reason.PROMPT_MISMATCH),
    (_own_prompt(3), Reason.BAD_MASK),
    (_own_prompt(7), Reason.OWN_PROMPT),
    (_own_prompt(-1), Reason.OWN_PROMPT),
    (_set("sampled", 0, 1), Reason.BAD_MASK),
    (_set("sampled", 3, 2), Reason.BAD_MASK),
    (_set("logprobs", 4, np.nan), Reason.NAN_LOGPROB),
    (_set("logprobs", 0, np.nan), Reason.NAN_LOGPROB),
    (_set("logprobs", 4, -np.inf), Reason.INF_LOGPROB),
    (_set("logprobs", 4, np.inf), Reason.INF_LOGPROB),
    (_set("logprobs", 4, 2e-3), Reason.POSITIVE_LOGPROB),
    (_spans(), Reason.BAD_SPANS),
    (_spans((0, 2, 5)), Reason.BAD_SPANS),
    (_spans((0, 2, 7)), Reason.BAD_SPANS),
    (_spans((0, -1, 6)), Reason.BAD_SPANS),
    (_spans((0, 2, 5), (0, 4, 6)), Reason.BAD_SPANS),
    (_spans((0, 4, 6), (0, 2, 4)), Reason.BAD_SPANS),
    (_spans((0, 2, 6), (0, 6, 6)), Reason.BAD_SPANS),
    (_spans((0, 2, 4), (2, 4, 6)), Reason.FUTURE_VERSION),
    (_spans((-1, 2, 6)), Reason.UNKNOWN_VERSION),
]


@pytest.mark.parametrize(("spoil", "reason"), FAULTS)
def test_a_bad_segment_is_refused_by_its_reason_and_ends_its_rollout(
    make: Make, spoil: Callable[[Columns], None], reason: Reason
) -> None:
    driver = make(vocab_size=50, max_attempts=2)
    driver.offer(0)
    message, (ids, logprobs, sampled) = driver.make("train-0-0-0", 4)
    columns: Columns = {"message": message, "ids": ids, "logprobs": logprobs, "sampled": sampled}
    spoil(columns)
    ack = driver.submit(columns["message"], (columns["ids"], columns["logprobs"], columns["sampled"]))
    assert ack == m.SegmentAck("train-0-0-0", 0, "rejected", reason.value)
    assert driver.ledger.rejected == {reason.value: 1}
    assert driver.ledger.tokens.accepted == 0
    assert "train-0-0-1" in driver.tickets, "the sample is tried again"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"max_segment_tokens": 5}, Reason.SEGMENT_TOO_LONG), ({"max_rollout_tokens": 9, "max_segment_tokens": 9}, None)],
)
def test_segments_and_rollouts_have_a_greatest_length(
    make: Make, settings: dict[str, Any], reason: Reason | None
) -> None:
    driver = make(**settings)
    driver.offer(0)
    ack = driver.write("train-0-0-0", 4)
    assert ack is not None and ack.reason == reason
    if reason is None:
        ack = driver.write("train-0-0-0", 4)
        assert ack is not None and ack.reason == Reason.ROLLOUT_TOO_LONG


def test_without_a_vocabulary_size_only_negative_ids_are_refused(make: Make) -> None:
    driver = make(vocab_size=None)
    driver.offer(0)
    message, (ids, logprobs, sampled) = driver.make("train-0-0-0", 1)
    ids[-1] = 1_000_000
    ack = driver.submit(message, (ids, logprobs, sampled))
    assert ack is not None and ack.status == "accepted"


def test_what_was_accepted_before_the_bad_segment_is_dropped_under_its_reason(make: Make) -> None:
    driver = make()
    driver.offer(0)
    driver.write("train-0-0-0", 3)
    message, (ids, logprobs, sampled) = driver.make("train-0-0-0", 2)
    logprobs[0] = np.nan
    driver.submit(message, (ids, logprobs, sampled))
    ledger = driver.ledger
    assert ledger.tokens.dropped == {"invalid:nan_logprob": 3}
    assert ledger.segments.dropped == ledger.rollouts.dropped == {"invalid:nan_logprob": 1}


def test_a_final_segment_may_be_empty_and_no_other(make: Make) -> None:
    driver = make()
    driver.offer(0, 1)
    for task_id, final in ((0, True), (1, False)):
        driver.write(f"train-{task_id}-0-0", 2)
        empty: tuple[Array, ...] = (np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8))
        ack = driver.submit(m.Segment(f"train-{task_id}-0-0", 1, 4, 4, (), final, "env_done" if final else None), empty)
        assert ack is not None and ack.reason == (None if final else Reason.EMPTY_SEGMENT)


def branched(driver: Driver, **changes: Any) -> m.SegmentAck | None:
    """Segment 1 of `train-0-0-0` (2 prompt tokens, 2 sampled): a context and a sampled token behind token 2."""
    driver.write("train-0-0-0", 2)
    fields: dict[str, Any] = {"follows": 3, "final": True, "finish_reason": "stop", "reward": 1.0} | changes
    message = m.Segment("train-0-0-0", 1, 4, 6, (VersionSpan(v(0), 5, 6),), **fields)
    sampled = np.array([0, 1], np.uint8)
    return driver.submit(message, (np.array([7, 8], np.int32), -0.5 * sampled.astype(np.float32), sampled))


def test_teachers_read_a_branch_behind_the_token_that_it_follows(make: Make) -> None:
    driver = make(batch=1)
    driver.offer(0)
    assert branched(driver) == m.SegmentAck("train-0-0-0", 1, "accepted")
    (_, first, first_ids), (_, item, ids) = driver.work.values()
    assert (first.start, first.end, first_ids.tolist()) == (0, 4, [1, 2, 10, 11])
    assert (item.start, item.end, item.shift, ids.tolist()) == (4, 6, -1, [1, 2, 10, 7, 8])
    driver.score()
    batch = driver.batch_for(0)
    assert batch.items[0].branches == (m.Branch(4, 3),)


@pytest.mark.parametrize("release", ["rollout", "segment"])
def test_rewards_of_turns_leave_with_the_rollout_s_own(make: Make, release: Any) -> None:
    driver = make(batch=1, release=release)
    driver.offer(0)
    branched(driver, turn_rewards=(m.TurnReward(4, -0.5), m.TurnReward(6, 1.5)))
    driver.score()
    batch = driver.batch_for(0)
    assert [(one.end, one.reward) for one in batch.items[0].turn_rewards] == [(4, -0.5), (6, 1.5)]


@pytest.mark.parametrize(
    "changes",
    [{"reward": 1.1e4}, {"reward": -1e308}, {"turn_rewards": (m.TurnReward(4, 1e19), m.TurnReward(6, -1e19))}],
)
def test_a_reward_out_of_range_leaves_the_rollout_unscored_and_counted(
    make: Make, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    driver = make(batch=1)
    driver.offer(0)
    ack = branched(driver, **changes)
    assert ack is not None and ack.status == "accepted"
    driver.score()
    batch = driver.batch_for(0)
    assert (batch.items[0].reward, batch.items[0].turn_rewards) == (None, ())
    assert driver.snapshot.queues["reward_out_of_range_total"] == 1
    assert "rollout train-0-0-0: the reward" in caplog.text


def test_a_root_is_read_without_context_and_its_first_token_gets_no_score(make: Make) -> None:
    driver = make(batch=1)
    driver.offer(0)
    branched(driver, follows=0)
    *_, (_, item, ids) = driver.work.values()
    assert (item.first, item.first + item.shift, ids.tolist()) == (5, 1, [7, 8])


def test_a_response_that_nobody_went_on_from_is_masked_and_not_scored(make: Make) -> None:
    driver = make(batch=1)
    driver.offer(0)
    branched(driver, dropped=(m.Dropped(2, 4, "retried"),))
    driver.score()
    batch = driver.batch_for(0)
    driver.trained(batch)
    ledger = driver.ledger
    assert (ledger.tokens.trained, ledger.tokens.masked) == (1, {"retried": 2})
    assert ledger.segments.masked == {"retried": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"follows": -1}, Reason.BAD_BRANCH),
        ({"follows": 4}, Reason.BAD_BRANCH),
        ({"dropped": (m.Dropped(5, 7, "retried"),)}, Reason.BAD_BRANCH),
        ({"dropped": (m.Dropped(3, 3, "retried"),)}, Reason.BAD_BRANCH),
        ({"dropped": (m.Dropped(3, 5, "retried"), m.Dropped(4, 6, "retried"))}, Reason.BAD_BRANCH),
        ({"dropped": (m.Dropped(2, 4, "retried"),), "final": False, "reward": None}, Reason.BAD_BRANCH),
        ({"turn_rewards": (m.TurnReward(7, 1.0),)}, Reason.BAD_REWARD),
        ({"turn_rewards": (m.TurnReward(0, 1.0),)}, Reason.BAD_REWARD),
        ({"turn_rewards": (m.TurnReward(4, 0.5), m.TurnReward(4, 0.5))}, Reason.BAD_REWARD),
        ({"turn_rewards": (m.TurnReward(6, 0.5), m.TurnReward(4, 0.5))}, Reason.BAD_REWARD),
        ({"turn_rewards": (m.TurnReward(4, math.inf),)}, Reason.BAD_REWARD),
        ({"turn_rewards": (m.TurnReward(4, 1.0),), "reward": None}, Reason.BAD_REWARD),
        ({"turn_rewards": (m.TurnReward(4, 1.0),), "final": False}, Reason.BAD_REWARD),
        ({"reward": math.nan}, Reason.BAD_REWARD),
        ({"final": False}, Reason.BAD_REWARD),
    ],
)
def test_a_branch_a_dropped_response_or_a_reward_that_cannot_be_is_refused(
    make: Make, changes: dict[str, Any], reason: Reason
) -> None:
    driver = make()
    driver.offer(0)
    ack = branched(driver, **changes)
    assert ack is not None and (ack.status, ack.reason) == ("rejected", reason)


def test_a_root_that_begins_with_a_sampled_token_is_refused(make: Make) -> None:
    driver = make()
    driver.offer(0)
    driver.write("train-0-0-0", 2)
    message = m.Segment("train-0-0-0", 1, 4, 5, (VersionSpan(v(0), 4, 5),), True, "stop", 1.0, follows=0)
    ack = driver.submit(message, (np.array([7], np.int32), np.array([-0.5], np.float32), np.ones(1, np.uint8)))
    assert ack is not None and ack.reason == Reason.BAD_MASK


@pytest.mark.parametrize("follows", [1, 0])
def test_a_branch_that_leaves_the_prompt_is_refused_where_teachers_read_a_privileged_one(
    make: Make, follows: int
) -> None:
    driver = make()
    task = m.Task(0, "train", 1, m.Sampling(), teacher_prompt_tokens=3)
    driver.send("learner", "learner", m.TasksOffered((task,)), np.array([1, 2, 7, 1, 2], np.int32))
    ack = branched(driver, follows=follows)
    assert ack is not None and ack.reason == Reason.OWN_PROMPT_PRIVILEGED


def test_a_branch_behind_the_prompt_is_read_behind_the_privileged_one(make: Make) -> None:
    driver = make(batch=1)
    task = m.Task(0, "train", 1, m.Sampling(), teacher_prompt_tokens=3)
    driver.send("learner", "learner", m.TasksOffered((task,)), np.array([1, 2, 7, 1, 2], np.int32))
    branched(driver, follows=3)
    *_, (_, item, ids) = driver.work.values()
    assert (item.start + item.shift, ids.tolist()) == (4, [7, 1, 2, 10, 7, 8])


def own_prompt(driver: Driver, rollout_id: str = "train-0-0-0") -> m.SegmentAck | None:
    """Segment 0 of a rollout whose environment made the prompt [7, 8, 9], and two sampled tokens."""
    ids = np.array([7, 8, 9, 10, 11], np.int32)
    sampled = np.array([0, 0, 0, 1, 1], np.uint8)
    message = m.Segment(rollout_id, 0, 0, 5, (VersionSpan(v(0), 3, 5),), True, "stop", 1.0, own_prompt_tokens=3)
    return driver.submit(message, (ids, -0.5 * sampled.astype(np.float32), sampled))


def test_a_prompt_that_the_environment_made_stands_in_place_of_the_tickets(make: Make) -> None:
    driver = make(batch=1)
    driver.offer(0)
    assert own_prompt(driver) == m.SegmentAck("train-0-0-0", 0, "accepted")
    ((_, item, ids),) = driver.work.values()
    assert (item.start, item.end, item.first, ids.tolist()) == (0, 5, 1, [7, 8, 9, 10, 11])
    driver.score()
    batch = driver.batch_for(0)
    assert batch.items[0].end == 5
    driver.trained(batch)
    assert (driver.ledger.tokens.trained, driver.ledger.rejected) == (2, {})


def test_a_prompt_of_the_environments_is_refused_where_teachers_read_a_privileged_one(make: Make) -> None:
    """Which text they should read before it, nobody knows."""
    driver = make()
    task = m.Task(0, "train", 1, m.Sampling(), teacher_prompt_tokens=3)
    driver.send("learner", "learner", m.TasksOffered((task,)), np.array([1, 2, 7, 1, 2], np.int32))
    ack = own_prompt(driver)
    assert ack is not None and (ack.status, ack.reason) == ("rejected", "own_prompt_privileged")
    assert driver.ledger.rejected == {"own_prompt_privileged": 1}


def test_only_the_first_segment_begins_with_a_prompt(make: Make) -> None:
    driver = make()
    driver.offer(0)
    driver.write("train-0-0-0", 2)
    message, arrays = driver.make("train-0-0-0", 2)
    ack = driver.submit(msgspec.structs.replace(message, own_prompt_tokens=1), arrays)
    assert ack is not None and (ack.status, ack.reason) == ("rejected", "own_prompt")


def test_a_rollout_without_a_sampled_token_is_settled_as_context(make: Make) -> None:
    driver = make()
    driver.offer(0)
    driver.write("train-0-0-0", 0, context=3, final=True)
    ledger = driver.ledger
    assert ledger.rollouts.masked == ledger.segments.masked == {"context": 1}
    assert ledger.tokens.accepted == 0
    assert not driver.work, "nothing to score"


def test_a_rollout_that_begins_with_context_alone_is_counted_while_it_runs(make: Make) -> None:
    """Its first segment is settled at once; `Driver` sees the ledger balance after every message."""
    driver = make(release="segment", batch=1)
    driver.offer(0)
    for n in (0, 0, 2, 0):
        driver.write("train-0-0-0", n, context=3, final=False)
        assert driver.ledger.rollouts.in_flight == 1
        assert driver.state.counts_are_right, "an image of the journal can be written"
    driver.write("train-0-0-0", 0, context=1, final=True)
    driver.score()
    batch = driver.batch_for(0)
    driver.trained(batch)
    ledger = driver.ledger
    assert (ledger.rollouts.trained, ledger.segments.trained, ledger.segments.masked) == (1, 1, {"context": 4})


def test_an_actor_may_use_new_weights_before_the_buffer_hears_of_them(make: Make) -> None:
    driver = make(staleness=0, batch=1)
    driver.offer(0, 1)
    driver.roll(0)
    batch = driver.batch_for(0)
    driver.trained(batch)
    ack = driver.write("train-1-0-0", 2, step=2, final=True)
    assert ack is not None and ack.status == "accepted", "step 2 is one past the newest known"
    driver.score()
    assert driver.want(1) is None, "yet it is one step from this batch: never trained with a bound of 0"
    assert driver.ledger.tokens.masked == {"stale": 2}
