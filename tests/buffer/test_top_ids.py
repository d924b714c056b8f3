"""The student's likeliest tokens in the buffer: which segments need them, what is refused, who gets them, and when they
are freed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from stillhouse.buffer.core import Core
from stillhouse.protocol import messages as m
from stillhouse.protocol.payloads.student_sets import encode_top_ids
from tests.buffer.driver import Driver
from tests.buffer.shadow import restored

Make = type[Driver]
WANTED = m.TopIdsWanted(3, 0.9)


def payload(n: int, k: int = 3) -> bytes:
    return encode_top_ids([np.arange(k, dtype=np.int32)] * n)


def begin(driver: Driver, **offer: object) -> str:
    driver.offer(0, top_ids=WANTED, **offer)  # pyright: ignore[reportArgumentType]
    return "train-0-0-0"


def write(driver: Driver, rollout: str, told: bytes | None, n: int = 2, **options: object) -> m.SegmentAck | None:
    message, arrays = driver.make(rollout, n, **options)  # pyright: ignore[reportArgumentType]
    if told is not None:
        message = msgspec.structs.replace(message, top_ids=True)
        arrays = (*arrays, np.frombuffer(told, np.uint8))
    return driver.submit(message, arrays)


def test_every_teacher_that_gets_the_segment_gets_its_sets(make: Make) -> None:
    """Also the second one, after the first has failed; tokens of the environment at the end are not in them."""
    driver = make()
    driver.teacher("x", pool="expert")
    driver.teacher("y", pool="expert")
    rollout = begin(driver, teachers=("expert", "default"))
    told = payload(3)
    ack = write(driver, rollout, told, 3, context=4)
    assert ack is not None and ack.status == "accepted"
    assert [(item.top_start, item.top_end, item.top_ids) for _, item, _ in driver.work.values()] == [(2, 5, True)] * 2
    failed = next(lease for lease, (name, _, _) in driver.work.items() if name in "xy")
    driver.refuse_work(failed)
    assert len(driver.top_ids) == 3 and set(driver.top_ids.values()) == {told}


def test_they_are_freed_once_all_pools_have_scored(make: Make) -> None:
    driver = make()
    driver.teacher("x", pool="expert")
    rollout = begin(driver, teachers=("expert", "default"))
    write(driver, rollout, payload(2))
    held = []
    for lease in list(driver.work):
        held.append(driver.snapshot.queues["top_k_bytes"])
        driver.answer(lease)
    assert held == [len(payload(2))] * 2 and driver.snapshot.queues["top_k_bytes"] == 0


def test_sets_of_a_dropped_attempt_are_freed(make: Make) -> None:
    driver = make()
    write(driver, begin(driver), payload(2))
    assert driver.snapshot.queues["top_k_bytes"] == len(payload(2))
    driver.lose("actor", "a")
    assert driver.snapshot.queues["top_k_bytes"] == 0


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (None, "top_ids_missing"),
        (payload(3), "top_ids_malformed"),
        (payload(2)[:-1], "top_ids_malformed"),
        (payload(2, k=200), "top_ids_size"),
    ],
)
def test_sets_that_are_missing_or_wrong_are_refused_by_name_and_counted(
    make: Make, told: bytes | None, reason: str
) -> None:
    driver = make(max_top_k_bytes=50)
    ack = write(driver, begin(driver), told)
    assert ack is not None and (ack.status, ack.reason) == ("rejected", reason)
    assert driver.ledger.rejected == {reason: 1} and not driver.work


def test_sets_that_nobody_asked_for_are_refused(make: Make) -> None:
    driver = make()
    driver.offer(0)
    ack = write(driver, "train-0-0-0", payload(2))
    assert ack is not None and ack.reason == "top_ids_missing"


def test_a_segment_without_a_sampled_token_has_none(make: Make) -> None:
    driver = make()
    rollout = begin(driver)
    assert [write(driver, rollout, told, n, context=c) for told, n, c in ((payload(2), 2, 0), (None, 0, 3))] == [
        m.SegmentAck(rollout, index, "accepted") for index in (0, 1)
    ]


def test_they_survive_a_restart_from_an_image(make: Make) -> None:
    driver = make()
    write(driver, begin(driver), payload(2))
    driver.state = restored(Core(driver.state), 1.0).state
    driver.lose("teacher", "t")
    driver.top_ids.clear()
    driver.teacher("u")
    assert list(driver.top_ids.values()) == [payload(2)]


def begin_kept(driver: Driver) -> str:
    driver.offer(0, kept=True)
    return "train-0-0-0"


def kept_of(arrays: tuple[np.ndarray[tuple[int, ...], np.dtype[np.int32]], ...], spoil: int = 0) -> bytes:
    """Sets around the sampled tokens. `spoil`: 1 a set lacks its token, 2 it has one twice, 3 it is not in order, 4 it
    has an id that does not exist."""
    tokens = arrays[0][np.flatnonzero(arrays[2])].tolist()
    sets = [sorted({token, token + 1, token + 2}) for token in tokens]
    match spoil:
        case 1:
            sets[-1].remove(tokens[-1])
        case 2:
            sets[0].insert(0, sets[0][0])
        case 3:
            sets[0].reverse()
        case 4:
            sets[-1].append(10**6)
        case _:
            pass
    return encode_top_ids([np.array(one, np.int32) for one in sets])


def test_what_was_sampled_from_goes_to_the_learner_and_not_to_teachers(make: Make) -> None:
    driver = make(batch=1)
    rollout = begin_kept(driver)
    message, arrays = driver.make(rollout, 3, final=True)
    told = kept_of(arrays)
    driver.submit(msgspec.structs.replace(message, top_ids=True), (*arrays, np.frombuffer(told, np.uint8)))
    assert [item.top_ids for _, item, _ in driver.work.values()] == [False]
    for lease in list(driver.work):
        driver.answer(lease)
    assert driver.snapshot.queues["top_k_bytes"] == len(told)
    driver.state = restored(Core(driver.state), 1.0).state
    out = driver.send("learner", "learner", m.BatchWanted(m.WeightVersion(0, 0)))
    frames = driver.frames(out)
    (batch,) = (one.message for one in out if isinstance(one.message, m.Batch))
    (piece,) = batch.items[0].top_k
    assert (piece.teacher, piece.end - piece.start, piece.n_bytes) == (m.KEPT_IDS, 3, len(told))
    assert frames[4].tobytes() == told


@pytest.mark.parametrize("spoil", [1, 2, 3, 4])
def test_kept_sets_that_cannot_be_are_refused(make: Make, spoil: int) -> None:
    driver = make(vocab_size=1000)
    message, arrays = driver.make(begin_kept(driver), 2)
    told = kept_of(arrays, spoil)
    ack = driver.submit(msgspec.structs.replace(message, top_ids=True), (*arrays, np.frombuffer(told, np.uint8)))
    assert ack is not None and (ack.status, ack.reason) == ("rejected", "top_ids_malformed")
