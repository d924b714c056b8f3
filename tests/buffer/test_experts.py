"""Experts of routers in the buffer: whoever trains a segment also gets those of all tokens before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import pytest

from stillhouse.buffer.core import Core
from stillhouse.protocol import messages as m
from stillhouse.protocol.payloads.expert_ids import ExpertIds, encode_experts
from tests.buffer.driver import Driver
from tests.buffer.shadow import restored

Make = type[Driver]
SHAPE = m.ExpertShape((0, 3), 8, 2)
ROLLOUT = "train-0-0-0"


def rows(n: int, seed: int, missing: int = 0) -> dict[int, ExpertIds]:
    rng = np.random.default_rng(seed)
    drawn = rng.permuted(np.tile(np.arange(8, dtype=np.uint16), (n, 2, 1)), axis=2)[:, :, :2]
    return dict(enumerate(drawn[missing:], missing))


def told_of(n: int, seed: int, missing: int = 0) -> bytes:
    return encode_experts(rows(n, seed, missing), n, SHAPE)


def write(
    driver: Driver, n: int, tell: Callable[[int], bytes] | None, **options: object
) -> tuple[m.SegmentAck | None, bytes]:
    """`tell`: by the number of the segment's tokens."""
    message, arrays = driver.make(ROLLOUT, n, **options)  # pyright: ignore[reportArgumentType]
    if tell is None:
        return driver.submit(message, arrays), b""
    told = tell(message.end - message.start)
    message = msgspec.structs.replace(message, experts=True)
    return driver.submit(message, (*arrays, np.frombuffer(told, np.uint8))), told


def batch(driver: Driver, step: int) -> tuple[m.BatchItem, bytes, m.Batch]:
    out = driver.send("learner", "learner", m.BatchWanted(m.WeightVersion(0, step)))
    frames = driver.frames(out)
    (found,) = (one.message for one in out if isinstance(one.message, m.Batch))
    return found.items[0], frames[4].tobytes(), found


def answer_all(driver: Driver) -> None:
    for lease in list(driver.work):
        driver.answer(lease)


def test_a_later_segment_comes_with_the_experts_of_its_context(make: Make) -> None:
    """Also after the first one was trained, and across a restart; a segment without any is left out."""
    driver = make(batch=1, release="segment", staleness=2)
    driver.offer(0, experts=SHAPE, last=True)
    ack, first = write(driver, 10, partial(told_of, seed=1, missing=1))
    assert ack is not None and ack.status == "accepted"
    assert not driver.top_ids
    answer_all(driver)
    item, payloads, found = batch(driver, 0)
    n = item.end
    assert item.top_k == (m.TopKPiece(m.EXPERT_IDS, 0, n, len(first)),) and payloads == first
    driver.trained(found)
    driver.state = restored(Core(driver.state), 1.0).state
    write(driver, 2, None)
    _, last = write(driver, 10, partial(told_of, seed=2), final=True)
    answer_all(driver)
    item, payloads, _ = batch(driver, 1)
    assert payloads == first + last
    assert item.top_k == (
        m.TopKPiece(m.EXPERT_IDS, 0, n, len(first)),
        m.TopKPiece(m.EXPERT_IDS, n + 2, n + 12, len(last)),
    )


def test_experts_and_kept_ids_travel_together(make: Make) -> None:
    from tests.buffer.test_top_ids import kept_of

    driver = make(batch=1)
    driver.offer(0, experts=SHAPE, kept=True)
    message, arrays = driver.make(ROLLOUT, 3, final=True)
    n = message.end - message.start
    kept, experts = kept_of(arrays), encode_experts(rows(n, 3), n, SHAPE)
    message = msgspec.structs.replace(message, top_ids=True, experts=True)
    ack = driver.submit(message, (*arrays, *(np.frombuffer(one, np.uint8) for one in (kept, experts))))
    assert ack is not None and ack.status == "accepted"
    answer_all(driver)
    item, payloads, _ = batch(driver, 0)
    assert [piece.teacher for piece in item.top_k] == [m.KEPT_IDS, m.EXPERT_IDS] and payloads == kept + experts


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("size", "experts_size"),
        ("tokens", "experts_malformed"),
        ("layers", "experts_malformed"),
        ("ids", "experts_malformed"),
        ("cut", "experts_malformed"),
        ("unasked", "experts_unasked"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_counted(make: Make, spoil: str, reason: str) -> None:
    driver = make(max_top_k_bytes=1 if spoil == "size" else 50)
    driver.offer(0, experts=None if spoil == "unasked" else SHAPE)

    def tell(n: int) -> bytes:
        if spoil == "layers":
            return encode_experts({0: np.array([[1, 2]], np.uint16)}, n, m.ExpertShape((0,), 8, 2))
        told = bytearray(told_of(n - (spoil == "tokens"), 1))
        if spoil == "ids":
            told[16 + (n + 7 >> 3) :] = bytes(len(told) - 16 - (n + 7 >> 3))  # expert 0 twice in each
        return bytes(told[:-1] if spoil == "cut" else told)

    ack, _ = write(driver, 20, tell)
    assert ack is not None and (ack.status, ack.reason) == ("rejected", reason)
    assert driver.ledger.rejected == {reason: 1} and not driver.work
