"""A batch that no message could hold is never formed: it is cut, and what could never be sent is masked by name."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import stillhouse.buffer.batch_size
from stillhouse.buffer.batch_size import MOST_ROLLOUTS, Room, size_of
from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import MAX_FRAME_BYTES, encode
from stillhouse.protocol.topk_codec import encode_top_k
from stillhouse.protocol.topk_layout import HEADER_BYTES
from tests.buffer.driver import Driver, rollout_ids, v

Make = type[Driver]
ROLLOUT_BYTES = 4 * (9 + 4)
"""Of two tokens of the prompt and two sampled ones, with one teacher."""


def limit(monkeypatch: pytest.MonkeyPatch, n_rollouts: int) -> None:
    monkeypatch.setattr(stillhouse.buffer.batch_size, "BATCH_BYTES", n_rollouts * ROLLOUT_BYTES)


def payload(n_tokens: int, k: int) -> bytes:
    """The same sets at every position: ids of 16 bits and log-probs of 8, so that each part is whole bytes."""
    ids, logprobs = np.arange(k)[None, :], np.full((1, k), -np.log(2.0 * k), np.float32)
    one = encode_top_k(ids, logprobs, vocab_size=65_536, mass=1.0, max_k=k, logprob_bits=8)
    at = struct.calcsize("<2sBBBBH")
    header = one[:at] + struct.pack("<I", n_tokens) + one[at + 4 : HEADER_BYTES]
    tail, ids_sent, codes = (
        one[HEADER_BYTES:][first:last] for first, last in ((0, 2), (2, 2 + 2 * k), (2 + 2 * k, None))
    )
    return header + tail * n_tokens + ids_sent * n_tokens + codes * n_tokens


def test_what_a_rollout_is_reckoned_to_take_is_never_less_than_it_takes(make: Make) -> None:
    driver = make(batch=3, staleness=3)
    driver.teacher("x", pool="expert")
    driver.offer(0, 1, 2, teachers=("expert", "default"))
    for task, n_segments in ((0, 1), (1, 5), (2, 40)):
        for index in range(n_segments):
            driver.write(f"train-{task}-0-0", 3, context=2, final=index == n_segments - 1)
    for lease, (_, item, _) in list(driver.work.items()):
        driver.answer_top_k(lease, payload(item.top_end - item.top_start, k=7))
    sizes = [size_of(rollout) for rollout in driver.state._life.rollouts.values()]  # pyright: ignore[reportPrivateUsage]
    driver.send("learner", "learner", m.BatchWanted(v(0)))
    arrays = driver.frames(driver.sent)
    batch = driver.batch()
    assert batch is not None and len(batch.items) == 3
    header, *frames = encode(batch, arrays)
    assert sum(map(len, frames)) == sum(size.array_bytes for size in sizes), "to the byte"
    assert max(map(len, frames)) == max(size.largest_frame_bytes for size in sizes)
    bare = encode(m.Batch(batch.batch_id, batch.version, (), {}, (), batch.snapshot))
    assert len(header) - len(bare[0]) <= sum(size.header_bytes for size in sizes)


def test_a_batch_that_would_be_too_large_has_fewer_rollouts_and_the_others_follow(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 3)
    driver = make(batch=4, staleness=1)
    driver.offer(0, 1, 2, 3)
    for task in range(4):
        driver.roll(task)
    first = driver.want(0)
    assert rollout_ids(first) == ["train-0-0-0", "train-1-0-0", "train-2-0-0"]
    assert first is not None
    driver.trained(first)
    driver.offer(4, 5, last=True)
    for task in (4, 5):
        driver.roll(task, step=1)
    assert rollout_ids(driver.want(1)) == ["train-3-0-0", "train-4-0-0", "train-5-0-0"]


def test_the_shortest_rollouts_do_not_fill_a_batch_with_more_than_the_number_that_the_launcher_allows(
    make: Make,
) -> None:
    driver = make()
    driver.offer(0)
    driver.write("train-0-0-0", 1, final=True)
    shortest = size_of(driver.state._life.rollouts["train-0-0-0"])  # pyright: ignore[reportPrivateUsage]
    room, n_rollouts = Room(), 0
    while room.take([shortest]):
        n_rollouts += 1
    assert 0.8 * MOST_ROLLOUTS < n_rollouts <= MOST_ROLLOUTS


def test_a_rollout_that_no_message_holds_is_masked_by_name_and_in_nobody_s_way(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 2)
    driver = make(batch=2, staleness=1)
    driver.offer(0, 1, 2)
    driver.roll(0, n=9)
    driver.roll(1)
    driver.roll(2)
    assert rollout_ids(driver.want(0)) == ["train-1-0-0", "train-2-0-0"]
    assert driver.ledger.tokens.masked == {"too_large": 9} and driver.ledger.rollouts.masked == {"too_large": 1}


def test_a_group_that_no_message_holds_is_masked_whole(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts cannot leave apart: the others' rewards would not be beside them."""
    limit(monkeypatch, 2)
    driver = make(batch=2, staleness=2, release="rollout")
    driver.offer(0, group=3)
    driver.offer(1, group=2)
    for sample in range(3):
        driver.roll(0, sample)
    for sample in range(2):
        driver.roll(1, sample)
    assert rollout_ids(driver.want(0)) == ["train-1-0-0", "train-1-1-0"]
    assert driver.ledger.rollouts.masked == {"too_large": 3}


def test_sets_of_one_rollout_that_no_frame_holds_end_nothing(make: Make) -> None:
    """At the real limits: 70,000 tokens of 1,024 bytes each, as buffer.max_top_k_bytes allows. The buffer died of it,
    and again after each restart."""
    driver = make(batch=1, staleness=1)
    driver.offer(0, 1)
    for index in range(3):
        driver.write("train-0-0-0", 23_400, final=index == 2)
    n_bytes = 0
    while driver.work:
        lease, (_, item, _) = next(iter(driver.work.items()))
        told = payload(item.top_end - item.top_start, k=340)
        n_bytes += len(told)
        assert driver.answer_top_k(lease, told).statuses == ("accepted",)
    assert n_bytes > MAX_FRAME_BYTES
    driver.roll(1)
    driver.send("learner", "learner", m.BatchWanted(v(0)))
    arrays = driver.frames(driver.sent)
    batch = driver.batch()
    assert rollout_ids(batch) == ["train-1-0-0"] and batch is not None
    encode(batch, arrays)
    assert driver.ledger.tokens.masked == {"too_large": 70_200}
    assert driver.snapshot.queues["top_k_bytes"] == 0, "and its sets are freed"


def test_a_rollout_too_large_for_its_sets_goes_along_with_its_group_for_its_reward(make: Make) -> None:
    """As one that is stale altogether does: the others' advantages are measured against it, too."""
    driver = make(batch=2, staleness=1, release="rollout")
    driver.offer(0, group=2)
    for index in range(3):
        driver.write("train-0-0-0", 23_400, final=index == 2)
    for lease, (_, item, _) in list(driver.work.items()):
        driver.answer_top_k(lease, payload(item.top_end - item.top_start, k=340))
    driver.roll(0, 1)
    driver.offer(1, last=True)
    driver.send("actor", "a", m.RolloutFailed("train-1-0-0", "engine_error"))
    driver.send("learner", "learner", m.BatchWanted(v(0)))
    for attempt in (1, 2):
        driver.send("actor", "a", m.RolloutFailed(f"train-1-0-{attempt}", "engine_error"))
    arrays = driver.frames(driver.sent)
    batch = driver.batch()
    assert batch is not None and rollout_ids(batch) == ["train-0-1-0", "train-0-0-0"]
    witness = batch.items[1]
    assert (witness.reward, witness.top_k) == (1.0, ()) and not arrays[len(arrays) - 2].any()
    encode(batch, arrays)
    assert driver.ledger.tokens.masked == {"too_large": 70_200}


def test_results_of_an_evaluation_come_in_as_many_messages_as_they_need(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 2)
    driver = make()
    driver.offer(0, 1, 2, 3, kind="eval", eval_id="e")
    driver.write("eval-0-0-0", 9, final=True)
    for task in (1, 2, 3):
        driver.write(f"eval-{task}-0-0", 2, final=True)
    driver.score()
    came: list[list[str]] = []
    for _ in range(2):
        driver.send("learner", "learner", m.EvalWanted("e", ()))
        (result,) = driver.take(m.EvalResult)
        came.append([item.rollout_id for item in result.items])
        assert (result.failed, result.outstanding) == (1, 0), "one could never be sent"
    assert came == [["eval-1-0-0", "eval-2-0-0"], ["eval-3-0-0"]]
    assert driver.ledger.eval_tokens.masked == {"too_large": 9}


def test_tickets_and_leases_go_in_as_many_messages_as_they_need(make: Make) -> None:
    """At the real limits: a header of 8 MiB holds the ground truths of 30 tickets and not of 40."""
    driver = make(peers=False, batch=64, staleness=1)
    driver.join("learner", "learner")
    truth = "x" * 200_000
    for task_id in range(60):
        task = m.Task(task_id, "train", 1, m.Sampling(), ground_truth=truth)
        driver.send("learner", "learner", m.TasksOffered((task,)), np.array([1, 2], np.int32))
    driver.actor()
    tickets = driver.take(m.Tickets)
    for message in tickets:
        encode(message, [np.array([1, 2], np.int32)] * len(message.tickets))
    assert [ticket.task_id for message in tickets for ticket in message.tickets] == list(range(60))
    assert len(tickets) > 1


def test_leases_of_a_teacher_with_boundless_credit_go_in_messages_that_can_be_sent(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 1)
    driver = make(peers=False, batch=8, staleness=1)
    driver.join("learner", "learner")
    driver.actor()
    driver.offer(*range(8))
    for task_id in range(8):
        driver.write(f"train-{task_id}-0-0", 2, final=True)
    driver.teacher(tokens=2**60)
    work = driver.take(m.ScoreWork)
    assert [len(message.items) for message in work] == [3, 3, 2], "of 16 bytes each, in 52"
    driver.score()
    assert driver.ledger.tokens.waiting == 16
