"""The client's memory of what it sent, driven without sockets."""

from __future__ import annotations

import math

from protocol.flow import AckKey
from protocol.outbox import Entry, Outbox


def key(n: int) -> frozenset[AckKey]:
    return frozenset((("segment", "r", n),))


def put(outbox: Outbox, *messages: tuple[bytes, frozenset[AckKey]]) -> None:
    for frame, keys in messages:
        outbox.put([frame], keys)


def send_all(outbox: Outbox, *, now_s: float = 0.0, heartbeats_sent: int = 0) -> list[bytes]:
    sent: list[bytes] = []
    while (entry := outbox.next_queued()) is not None:
        sent.append(bytes(entry.frames[0]))
        outbox.sent(entry, now_s=now_s, heartbeats_sent=heartbeats_sent)
    return sent


def test_messages_leave_in_the_order_of_putting_and_are_kept() -> None:
    outbox = Outbox(resend_s=5.0)
    put(outbox, (b"a", key(0)), (b"bb", frozenset()), (b"c", key(1)))
    assert send_all(outbox) == [b"a", b"bb", b"c"]
    assert (outbox.unacked, outbox.unconfirmed_bytes, outbox.empty) == (2, 4, False)


def test_an_acknowledgement_forgets_its_message_and_may_come_twice() -> None:
    outbox = Outbox(resend_s=5.0)
    put(outbox, (b"a", key(0)), (b"b", key(1)))
    send_all(outbox)
    outbox.acknowledged(key(0))
    outbox.acknowledged(key(0))
    assert (outbox.unacked, outbox.unconfirmed_bytes) == (1, 1)
    outbox.acknowledged(key(1))
    assert outbox.empty


def test_a_message_is_acknowledged_when_all_its_parts_are() -> None:
    outbox = Outbox(resend_s=5.0)
    put(outbox, (b"a", key(0) | key(1)))
    send_all(outbox)
    outbox.acknowledged(key(0))
    assert outbox.unacked == 1
    outbox.acknowledged(key(1))
    assert outbox.empty


def test_one_acknowledgement_serves_all_messages_of_its_key() -> None:
    outbox = Outbox(resend_s=5.0)
    put(outbox, (b"a", key(0)), (b"again", key(0)))
    send_all(outbox)
    outbox.acknowledged(key(0))
    assert outbox.empty


def test_overdue_messages_are_sent_again_and_wait_longer_each_time() -> None:
    outbox = Outbox(resend_s=5.0)
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


def test_a_message_acknowledged_while_it_waits_for_its_second_sending_is_not_sent() -> None:
    outbox = Outbox(resend_s=5.0)
    put(outbox, (b"a", key(0)), (b"b", key(1)))
    send_all(outbox)
    outbox.requeue_overdue(5.0)
    outbox.acknowledged(key(0))
    assert send_all(outbox, now_s=5.0) == [b"b"]


def test_a_heartbeat_reply_confirms_only_what_was_sent_before_that_heartbeat() -> None:
    outbox = Outbox(resend_s=5.0)
    put(outbox, (b"a", frozenset()))
    send_all(outbox, heartbeats_sent=0)
    put(outbox, (b"b", frozenset()))
    send_all(outbox, heartbeats_sent=1)
    put(outbox, (b"queued", frozenset()), (b"acked", key(0)))
    outbox.heartbeat_answered(1)
    assert outbox.unconfirmed_bytes == len(b"b" + b"queued" + b"acked")


def test_a_new_connection_gets_everything_unconfirmed_in_the_order_of_putting() -> None:
    outbox = Outbox(resend_s=5.0)
    put(outbox, (b"a", key(0)), (b"b", frozenset()), (b"c", key(2)))
    send_all(outbox)
    outbox.requeue_overdue(5.0)
    put(outbox, (b"d", key(3)))
    outbox.acknowledged(key(2))
    outbox.connection_replaced()
    assert send_all(outbox) == [b"a", b"b", b"d"]


def test_the_entry_at_the_head_stays_queued_when_the_socket_had_no_room() -> None:
    outbox = Outbox(resend_s=5.0)
    put(outbox, (b"a", key(0)))
    first: Entry | None = outbox.next_queued()
    assert first is not None
    assert outbox.next_queued() is first
