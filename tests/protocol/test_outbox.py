"""The client's memory of what it sent, driven without sockets."""

from __future__ import annotations

import math

from stillhouse.protocol.bundle import BUNDLE_MESSAGES, SMALL_BYTES
from stillhouse.protocol.flow import AckKey
from stillhouse.protocol.outbox import ClientOutbox, Entry


def key(n: int) -> frozenset[AckKey]:
    return frozenset((("segment", "r", n),))


def put(outbox: ClientOutbox, *messages: tuple[bytes, frozenset[AckKey]]) -> None:
    for frame, keys in messages:
        outbox.put([frame], keys)


def send_all(outbox: ClientOutbox, *, now_s: float = 0.0, heartbeats_sent: int = 0) -> list[bytes]:
    sent: list[bytes] = []
    while entries := outbox.next_queued():
        sent += [bytes(entry.frames[0]) for entry in entries]
        outbox.sent(entries, now_s=now_s, heartbeats_sent=heartbeats_sent)
    assert not outbox.any_queued
    return sent


def test_an_acknowledgement_forgets_its_message_and_may_come_twice() -> None:
    outbox = ClientOutbox(resend_s=5.0)
    put(outbox, (b"a", key(0)), (b"b", key(1)))
    send_all(outbox)
    outbox.acknowledged(key(0))
    outbox.acknowledged(key(0))
    assert (outbox.unacked, outbox.unconfirmed_bytes) == (1, 1)
    outbox.acknowledged(key(1))
    assert outbox.empty


def test_a_message_is_acknowledged_when_all_its_parts_are() -> None:
    outbox = ClientOutbox(resend_s=5.0)
    put(outbox, (b"a", key(0) | key(1)))
    send_all(outbox)
    outbox.acknowledged(key(0))
    assert outbox.unacked == 1
    outbox.acknowledged(key(1))
    assert outbox.empty


def test_one_acknowledgement_serves_all_messages_of_its_key() -> None:
    outbox = ClientOutbox(resend_s=5.0)
    put(outbox, (b"a", key(0)), (b"again", key(0)))
    send_all(outbox)
    outbox.acknowledged(key(0))
    assert outbox.empty


def test_overdue_messages_are_sent_again_and_wait_longer_each_time() -> None:
    outbox = ClientOutbox(resend_s=5.0)
    put(outbox, (b"a", key(0)), (b"plain", frozenset()))
    send_all(outbox)
    assert outbox.requeue_overdue(4.9) == 5.0
    assert send_all(outbox) == []
    outbox.requeue_overdue(5.0)
    assert send_all(outbox, now_s=5.0) == [b"a"]
    assert outbox.requeue_overdue(14.9) == 15.0
    outbox.requeue_overdue(15.0)
    assert send_all(outbox, now_s=15.0) == [b"a"]
    outbox.acknowledged(key(0))
    outbox.requeue_overdue(100.0)
    assert outbox.requeue_overdue(100.0) == math.inf


def test_a_heartbeat_reply_confirms_only_what_was_sent_before_that_heartbeat() -> None:
    outbox = ClientOutbox(resend_s=5.0)
    put(outbox, (b"a", frozenset()))
    send_all(outbox, heartbeats_sent=0)
    put(outbox, (b"b", frozenset()))
    send_all(outbox, heartbeats_sent=1)
    put(outbox, (b"queued", frozenset()), (b"acked", key(0)))
    outbox.heartbeat_answered(1)
    assert outbox.unconfirmed_bytes == len(b"b" + b"queued" + b"acked")


def test_a_new_connection_gets_everything_unconfirmed_in_the_order_of_putting() -> None:
    outbox = ClientOutbox(resend_s=5.0)
    put(outbox, (b"a", key(0)), (b"b", frozenset()), (b"c", key(2)))
    send_all(outbox)
    outbox.requeue_overdue(5.0)
    put(outbox, (b"d", key(3)))
    outbox.acknowledged(key(2))
    outbox.connection_replaced()
    assert send_all(outbox) == [b"a", b"b", b"d"]


def test_entries_stay_queued_when_the_socket_had_no_room() -> None:
    outbox = ClientOutbox(resend_s=5.0)
    put(outbox, (b"a", key(0)), (b"b", key(1)))
    first: list[Entry] = outbox.next_queued()
    assert len(first) == 2
    assert outbox.next_queued() == first
    put(outbox, (b"c", key(2)))
    outbox.sent(first, now_s=0.0, heartbeats_sent=0)
    assert send_all(outbox) == [b"c"]


def test_small_messages_leave_together_and_large_ones_alone() -> None:
    outbox = ClientOutbox(resend_s=5.0)
    large, half = bytes(SMALL_BYTES + 1), bytes(SMALL_BYTES)
    put(outbox, *[(frame, frozenset()) for frame in (b"a", b"b", large, b"c", half, half, half, half, b"d")])
    sizes: list[list[int]] = []
    while entries := outbox.next_queued():
        sizes.append([entry.n_bytes for entry in entries])
        outbox.sent(entries, now_s=0.0, heartbeats_sent=0)
    assert sizes == [[1, 1], [SMALL_BYTES + 1], [1, *[SMALL_BYTES] * 3], [SMALL_BYTES, 1]]
    put(outbox, *[(b"x", frozenset())] * (BUNDLE_MESSAGES + 1))
    assert len(outbox.next_queued()) == BUNDLE_MESSAGES


def test_a_message_acknowledged_between_two_others_is_left_out_of_their_bundle() -> None:
    outbox = ClientOutbox(resend_s=5.0)
    put(outbox, (b"a", key(0)), (b"b", key(1)), (b"c", key(2)))
    send_all(outbox)
    outbox.requeue_overdue(5.0)
    outbox.acknowledged(key(1))
    assert send_all(outbox, now_s=5.0) == [b"a", b"c"]
    outbox.acknowledged(key(0) | key(2))
    assert outbox.empty
