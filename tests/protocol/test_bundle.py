"""Several small messages in one frame. The check reads and writes bundles with another MessagePack library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from stillhouse.protocol import messages as m
from stillhouse.protocol.bundle import BUNDLE_BYTES, BUNDLE_MESSAGES, SMALL_BYTES, bundled, unbundled
from stillhouse.protocol.codec import Frame, decode, encode
from stillhouse.protocol.errors import MalformedMessage
from stillhouse.protocol.server import PeerServer
from stillhouse.protocol.server_events import Event, FromPeer, PeerDown, PeerUp
from stillhouse.protocol.sockets import CHECKSUM_BYTES, checksum, new_socket, receive_frames, send_frames
from tests.patience import Limit
from tests.sim.messages import EXAMPLES
from tests.wire import RUN, VOCAB

HELLO = m.Hello("actor", "actor-0", "first", RUN, VOCAB)
Said = tuple[m.Message, tuple[np.ndarray[Any, Any], ...]]


def segment(index: int, n: int = 4) -> Said:
    arrays = (np.arange(n, dtype=np.int32), np.zeros(n, dtype=np.float32), np.ones(n, dtype=np.uint8))
    return m.Segment("train-0-0-0", index, index * n, index * n + n, (), False), arrays


def packed(*messages: list[Frame]) -> bytes:
    """A bundle, made by an independent encoder."""
    body = msgpack.packb([[bytes(frame) for frame in frames] for frames in messages])
    assert isinstance(body, bytes)
    return body


def test_a_bundle_is_messagepack_that_any_library_reads() -> None:
    messages = [encode(message, arrays) for message, arrays in EXAMPLES]
    (frame,) = bundled(messages)
    assert msgpack.unpackb(frame) == [[bytes(part) for part in frames] for frames in messages]
    assert list(unbundled([packed(*messages)])) == [[bytes(part) for part in frames] for frames in messages]


def test_one_message_is_bundled_only_if_that_saves_frames() -> None:
    header_only, small = encode(m.TicketCredit(1, 1, 0)), encode(*segment(0))
    large = encode(*segment(0, SMALL_BYTES))
    assert bundled([header_only]) is header_only
    assert bundled([large]) is large
    assert len(bundled([small])) == 1 and len(small) == 4


@given(st.lists(st.lists(st.binary(max_size=70_000), max_size=5), max_size=70))
def test_what_is_no_bundle_stays_as_it_is(messages: list[list[bytes]]) -> None:
    frame = packed(*map(list[Frame], messages))
    n_bytes = sum(len(part) for frames in messages for part in frames)
    if 1 <= len(messages) <= BUNDLE_MESSAGES and n_bytes <= BUNDLE_BYTES:
        assert list(unbundled([frame])) == messages
    elif not 1 <= len(messages) <= BUNDLE_MESSAGES or n_bytes > 2 * BUNDLE_BYTES:
        assert list(unbundled([frame])) == [[frame]]
        with pytest.raises(MalformedMessage):
            decode([frame])
    assert list(unbundled([frame, b""])) == [[frame, b""]]
    assert list(unbundled([frame[:-1]])) == [[frame[:-1]]]


def test_more_messages_than_a_bundle_may_have_are_none() -> None:
    message: list[Frame] = [b"\x80"]
    assert len(unbundled([packed(*[message] * BUNDLE_MESSAGES)])) == BUNDLE_MESSAGES
    frame = packed(*[message] * (BUNDLE_MESSAGES + 1))
    assert list(unbundled([frame])) == [[frame]]


@pytest.mark.parametrize(
    "frame", [b"", b"\x90", b"\x91\x81", b"\xdd\xff\xff\xff\xff", msgpack.packb([["text"]]), msgpack.packb([1])]
)
def test_hostile_arrays_are_no_bundle(frame: bytes) -> None:
    assert list(unbundled([frame])) == [[frame]]


class Connection:
    """One actor's connection, written by hand."""

    def __init__(self) -> None:
        self.server = PeerServer(
            "tcp://127.0.0.1:0", run_id=RUN, vocab_fingerprint=VOCAB, heartbeat_s=60.0, peer_timeout_s=600.0
        )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = new_socket(self.context, zmq.DEALER)
        self.socket.connect(self.server.address)
        send_frames(self.socket, encode(HELLO))
        assert isinstance(self.events(1)[0], PeerUp)

    def events(self, n: int) -> list[Event]:
        """The next n events, whatever number of polls they take."""
        events: list[Event] = []
        limit = Limit()
        while len(events) < n and not limit.passed:
            events += self.server.poll(0.02)
        assert len(events) == n, events
        return events

    def until(self, condition: Callable[[], bool]) -> list[Event]:
        events: list[Event] = []
        limit = Limit()
        while not condition():
            assert not limit.passed, self.server
            events += self.server.poll(0.02)
        return events

    def heard(self) -> list[m.Message]:
        """What the buffer has said by now."""
        said: list[m.Message] = []
        while self.socket.poll(200):
            said.append(decode(receive_frames(self.socket) or []).message)
        return said

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.server.close(linger_s=0)


@pytest.fixture
def connection() -> Any:
    connection = Connection()
    yield connection
    connection.close()


def test_the_messages_of_a_bundle_arrive_one_by_one_in_their_order(connection: Connection) -> None:
    said = [segment(0), (m.TicketCredit(3, 1, 0), ()), segment(1)]
    send_frames(connection.socket, [packed(*[encode(message, arrays) for message, arrays in said])])
    events = connection.events(3)
    for event, (message, arrays) in zip(events, said, strict=True):
        assert isinstance(event, FromPeer)
        assert event.received.message == message
        assert all(map(np.array_equal, event.received.arrays, arrays))
        assert not any(array.flags.writeable for array in event.received.arrays)


def test_a_bad_message_in_a_bundle_is_refused_alone(connection: Connection) -> None:
    wrong_role = encode(m.BatchTrained(1, m.WeightVersion(0, 1)))
    cut = encode(*segment(1))[:-1]
    nested: list[Frame] = [packed(encode(*segment(7)))]
    messages: list[list[Frame]] = [encode(*segment(0)), [b"junk"], [], cut, wrong_role, nested, encode(*segment(2))]
    send_frames(connection.socket, [packed(*messages)])
    taken = connection.until(lambda: sum(connection.server.refused.values()) == 5)
    taken += connection.events(2 - len(taken))
    indices = [
        e.received.message.index for e in taken if isinstance(e, FromPeer) and isinstance(e.received.message, m.Segment)
    ]
    assert indices == [0, 2]
    assert connection.server.refused == {"malformed": 4, "role": 1}


def test_a_damaged_bundle_is_refused_whole_and_its_connection_ends(connection: Connection) -> None:
    bundle = bytearray(packed(encode(*segment(0)), encode(*segment(1))))
    digest = checksum([bytes(bundle)])
    assert len(digest) == CHECKSUM_BYTES
    bundle[-1] ^= 1  # in the loss mask of the second
    connection.socket.send_multipart([bytes(bundle), digest])
    send_frames(connection.socket, encode(*segment(2)))
    assert connection.until(lambda: connection.server.overtaken == 1) == []
    assert connection.server.refused == {"damaged": 1}
    assert [type(said) for said in connection.heard()] == [m.Welcome, m.Refused]


def test_a_goodbye_in_a_bundle_ends_the_events_of_its_poll(connection: Connection) -> None:
    messages = [encode(*segment(0)), encode(m.Goodbye("over")), encode(*segment(1))]
    send_frames(connection.socket, [packed(*messages)])
    first: list[Event] = []
    limit = Limit()
    while not first and not limit.passed:
        first = connection.server.poll(0.02)
    assert [type(event) for event in first] == [FromPeer, FromPeer, PeerDown]

    def wait(timeout_s: float) -> None:
        raise AssertionError("nothing more will come: the rest of the bundle is here")

    connection.server._router.wait = wait  # pyright: ignore[reportPrivateUsage]
    assert connection.server.poll(1.0) == []
    assert connection.server.refused == {"not_hello_first": 1}  # segment 1, from nobody


def test_a_hello_in_a_bundle_begins_a_batch_of_events(connection: Connection) -> None:
    again = msgspec.structs.replace(HELLO, incarnation="second")
    messages = [encode(*segment(0)), encode(again), encode(*segment(1))]
    send_frames(connection.socket, [packed(*messages)])
    batches: list[list[str]] = []
    limit = Limit()
    while sum(map(len, batches)) < 4 and not limit.passed:
        if events := connection.server.poll(0.02):
            batches.append([type(event).__name__ for event in events])
    assert batches == [["FromPeer"], ["PeerDown", "PeerUp", "FromPeer"]]


def test_more_messages_than_one_poll_takes_wait_for_the_next_without_a_pause(connection: Connection) -> None:
    n = 6 * BUNDLE_MESSAGES  # POLL_MESSAGES falls into the middle of a bundle
    for start in range(0, n, BUNDLE_MESSAGES):
        send_frames(connection.socket, bundled([encode(*segment(start + i)) for i in range(BUNDLE_MESSAGES)]))
    events = connection.events(n)
    indices = [
        e.received.message.index
        for e in events
        if isinstance(e, FromPeer) and isinstance(e.received.message, m.Segment)
    ]
    assert indices == list(range(n))
