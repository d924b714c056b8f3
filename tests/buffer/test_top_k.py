"""Top-k payloads in the buffer: which range is asked for, what is refused, what leaves, and when it is freed."""

from __future__ import annotations

import numpy as np
import pytest

from stillhouse.buffer.core import Core, Turn, decode_turn, encode_turn
from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import Received
from stillhouse.protocol.payloads.hidden import encode_hidden
from stillhouse.protocol.server_events import FromPeer
from stillhouse.protocol.topk_codec import encode_top_k
from tests.buffer.driver import Driver, v
from tests.buffer.shadow import no_blobs, restored

Make = type[Driver]


def payload(n: int, k: int = 2) -> bytes:
    ids = np.tile(np.arange(k), (n, 1))
    return encode_top_k(ids, np.full((n, k), -8.0, np.float32), vocab_size=99)


def states(n: int, size: int = 4) -> bytes:
    return encode_hidden(np.full((n, size), 0x3F80, np.uint16))


def ranges(driver: Driver) -> dict[int, tuple[int, int]]:
    return {lease: (item.top_start, item.top_end) for lease, (_, item, _) in driver.work.items()}


def test_the_range_reaches_from_the_first_sampled_token_to_the_last(make: Make) -> None:
    driver = make()
    driver.offer(0)
    driver.write("train-0-0-0", 3, context=4)  # two of the prompt, three sampled, four of the environment
    assert list(ranges(driver).values()) == [(2, 5)]
    driver.score()
    driver.write("train-0-0-0", 2)
    assert list(ranges(driver).values()) == [(9, 11)]


def test_evaluation_asks_for_no_sets_and_its_payloads_are_not_kept(make: Make) -> None:
    driver = make()
    driver.offer(0, kind="eval", eval_id="e")
    driver.write("eval-0-0-0", 3, final=True)
    ((lease, (start, end)),) = ranges(driver).items()
    assert start == end
    assert driver.answer_top_k(lease, payload(0)).statuses == ("accepted",)
    driver.send("learner", "learner", m.EvalWanted("e", ()))
    (result,) = driver.take(m.EvalResult)
    assert result.items[0].top_k == ()


def test_payloads_leave_with_the_tokens_to_train_and_are_freed_when_these_are_trained(make: Make) -> None:
    driver = make(batch=1)
    driver.teacher("x", pool="expert")
    driver.offer(0, teachers=("expert", "default"))
    driver.write("train-0-0-0", 2)
    driver.write("train-0-0-0", 3, final=True)
    sent: dict[tuple[int, int], bytes] = {}
    for lease, (name, item, _) in list(driver.work.items()):
        told = payload(item.top_end - item.top_start, k=3 if name == "x" else 4)
        sent[0 if name == "x" else 1, item.top_start] = told
        assert driver.answer_top_k(lease, told).statuses == ("accepted",)
    assert driver.snapshot.queues["top_k_bytes"] == sum(map(len, sent.values()))
    driver.send("learner", "learner", m.BatchWanted(v(0)))
    frames = driver.frames(driver.sent)
    batch = driver.batch()
    assert batch is not None
    pieces = batch.items[0].top_k
    assert [(p.teacher, p.start, p.end) for p in pieces] == [(0, 2, 4), (1, 2, 4), (0, 4, 7), (1, 4, 7)]
    assert frames[4].tobytes() == b"".join(sent[p.teacher, p.start] for p in pieces)
    assert [p.n_bytes for p in pieces] == [len(sent[p.teacher, p.start]) for p in pieces]
    driver.trained(batch)
    assert driver.snapshot.queues["top_k_bytes"] == 0


def test_a_payload_goes_once_and_context_trained_before_brings_none(make: Make) -> None:
    driver = make(batch=1, release="segment", staleness=3)
    driver.offer(0, last=True)
    batches: list[m.Batch] = []
    for step, final in ((0, False), (1, True)):
        driver.write("train-0-0-0", 10, final=final)
        ((lease, (start, end)),) = ranges(driver).items()
        driver.answer_top_k(lease, payload(end - start))
        batch = driver.batch_for(step)
        driver.trained(batch)
        batches.append(batch)
    assert [[(p.start, p.end) for p in batch.items[0].top_k] for batch in batches] == [[(2, 12)], [(12, 22)]]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (payload(2, k=60), "top_k_size"),
        (payload(3), "top_k_malformed"),
        (payload(2)[:-1], "top_k_malformed"),
        (b"nothing of the kind", "top_k_malformed"),
        (states(2, size=60), "top_k_size"),
        (states(3), "top_k_malformed"),
        (states(2)[:-1], "top_k_malformed"),
    ],
)
def test_what_is_too_large_or_no_payload_is_refused_by_name_and_counted(make: Make, told: bytes, reason: str) -> None:
    driver = make(max_top_k_bytes=100)
    driver.offer(0)
    driver.write("train-0-0-0", 2, final=True)
    (lease,) = driver.work
    ack = driver.answer_top_k(lease, told)
    assert (ack.statuses, ack.reasons) == (("rejected",), (reason,))
    assert driver.ledger.rejected == {reason: 1}
    (again,) = driver.work
    assert driver.answer_top_k(again, payload(2)).statuses == ("accepted",), "a refusal does not end the segment"
    assert driver.snapshot.queues["top_k_bytes"] == len(payload(2))


def test_masked_and_dropped_segments_free_their_payloads(make: Make) -> None:
    driver = make(staleness=1, batch=2)
    driver.offer(0, 1)
    for task in (0, 1):
        driver.write(f"train-{task}-0-0", 2, final=task == 0)
        (lease,) = driver.work
        driver.answer_top_k(lease, payload(2))
    assert driver.snapshot.queues["top_k_bytes"] > 0
    driver.lose("actor", "a")  # drops the second attempt
    assert driver.snapshot.queues["top_k_bytes"] == len(payload(2))
    driver.restart_learner(5, 1)
    driver.want(5, 1)
    driver.wait(100.0)
    driver.send("learner", "learner", m.RunFinished(True, "enough"))
    assert driver.snapshot.queues["top_k_bytes"] == 0


@pytest.mark.parametrize("sent", [payload(2), states(2)], ids=["top-k", "hidden"])
def test_payloads_survive_a_restart_from_an_image_and_from_turns(make: Make, sent: bytes) -> None:
    driver = make(batch=1)
    driver.offer(0)
    driver.write("train-0-0-0", 2, final=True)
    (lease,) = driver.work
    driver.answer_top_k(lease, sent)
    driver.state = restored(Core(driver.state), 1.0).state
    assert driver.snapshot.queues["top_k_bytes"] == len(sent)
    driver.send("learner", "learner", m.BatchWanted(v(0)))
    assert driver.frames(driver.sent)[4].tobytes() == sent
    said = Received(m.Scores((1,), True), (np.zeros(2, np.float32), np.frombuffer(sent, np.uint8)))
    (entry,) = decode_turn(encode_turn(Turn(1.0, (FromPeer("teacher", "t", said),)), 0).body, no_blobs).entries
    assert isinstance(entry, FromPeer) and entry.received.message == said.message
    assert entry.received.arrays[1].tobytes() == sent
