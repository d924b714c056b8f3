"""Sessions that outlive the process of the buffer: replayed, restored from an image, taken over by a server."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.core import Core, Entry, Joined, Left, Turn, replay
from stillhouse.buffer.state import BufferState
from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import Frame, Received, decode, encode
from stillhouse.protocol.handshake import PeerId
from stillhouse.protocol.messages import WeightVersion
from stillhouse.protocol.server import PeerServer
from stillhouse.protocol.server_events import Event, FromPeer, PeerDown, PeerUp
from stillhouse.protocol.session import SessionBook
from stillhouse.protocol.sockets import receive_frames, send_frames
from tests.buffer.shadow import new_book
from tests.patience import PATIENCE_S

ACTOR = PeerId("actor", "a")
WAIT_S = PATIENCE_S


def hello(incarnation: str = "1", *, received_total: int = 0, connection: int = 0) -> m.Hello:
    return m.Hello("actor", "a", incarnation, "run-1", "ab" * 32, "", received_total, connection)


def new_core() -> Core:
    return Core(BufferState(BufferConfig(), version=WeightVersion(0, 0)))


def turn(*entries: Entry) -> Turn:
    return Turn(1.0, entries)


def said(message: m.Message) -> FromPeer:
    return FromPeer("actor", "a", Received(message, ()))


def asked(n: int) -> list[Turn]:
    return [turn(said(m.SnapshotWanted())) for _ in range(n)]


def test_replayed_turns_leave_the_messages_that_the_peer_has_not_confirmed() -> None:
    book, core = new_book(), new_core()
    replay(core, book, [turn(Joined(hello(received_total=5))), *asked(3)])
    replay(core, book, [turn(said(m.Heartbeat(None, {}, received_total=7)))])
    session = book.sessions[ACTOR]
    assert (session.confirmed_total, session.sent_total, session.unconfirmed) == (7, 8, 1)
    assert isinstance(decode(session.unconfirmed_frames()[0]).message, m.Snapshot)


def test_a_peer_that_left_has_no_session_and_one_that_was_replaced_may_not_come_back() -> None:
    book = new_book()
    replay(new_core(), book, [turn(Joined(hello("1"))), turn(Left("actor", "a"), Joined(hello("2")))])
    refused = book.door.objection(hello("1"))
    assert refused is not None and refused.code == "duplicate_name"
    assert book.sessions[ACTOR].hello.incarnation == "2" and book.opened_total == 2
    replay(new_core(), book, [turn(Left("actor", "a"))])
    assert not book.sessions and book.door.objection(hello("2")) is None, "it was only lost"


def test_an_image_of_the_sessions_restores_them_and_the_door() -> None:
    book = new_book()
    learner = m.Hello("learner", "l", "1", "run-1", "ab" * 32)  # whose vocabulary is the run's where none is configured
    joined = [turn(Joined(learner)), turn(Joined(hello("1"))), turn(Left("actor", "a"), Joined(hello("2")))]
    replay(new_core(), book, [*joined, *asked(2)])
    again = new_book()
    again.restore(book.image())
    assert again.image() == book.image()
    assert again.door.objection(hello("1")) == book.door.objection(hello("1"))
    other = m.Hello("actor", "b", "1", "run-1", "cd" * 32)
    objection = again.door.objection(other)
    assert objection is not None and objection.code == "vocab_fingerprint"


def kept(book: SessionBook, *messages: m.Message) -> None:
    for message in messages:
        frames: list[Frame] = encode(message)
        book.keep(ACTOR, frames)


def taken_over(book: SessionBook) -> PeerServer:
    return PeerServer(
        "tcp://127.0.0.1:0",
        run_id="run-1",
        vocab_fingerprint=None,
        heartbeat_s=0.1,
        peer_timeout_s=PATIENCE_S,
        restored=book,
    )


class RawPeer:
    """A DEALER that says what it is told to."""

    def __init__(self, server: PeerServer) -> None:
        self.server = server
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(server.address)

    def say(self, message: m.Message) -> None:
        send_frames(self.socket, encode(message))

    def hear(self, n: int) -> list[m.Message]:
        got: list[m.Message] = []
        deadline_s = time.monotonic() + WAIT_S
        while len(got) < n and time.monotonic() < deadline_s:
            assert self.server.poll(0.02) == [], "coming back is no event"
            while self.socket.poll(0):
                frames = receive_frames(self.socket)
                assert frames is not None
                got.append(decode(frames).message)
        return got

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def peer() -> Iterator[RawPeer]:
    """Of a server that took over a session with three messages, the first of which was confirmed."""
    book = new_book()
    book.open(hello())
    kept(book, *[m.CancelRollout(f"r{i}", "why") for i in range(3)])
    book.confirm(ACTOR, 1)
    server = taken_over(book)
    peer = RawPeer(server)
    yield peer
    peer.close()
    server.close()


def test_a_server_goes_on_behind_what_the_peer_has(peer: RawPeer) -> None:
    assert peer.server.peers == (ACTOR,)
    peer.server.send("actor", "a", m.CancelRollout("r3", "while it was away"))
    peer.say(hello(received_total=2, connection=1))
    welcome, *rest = peer.hear(3)
    assert isinstance(welcome, m.Welcome)
    assert rest == [m.CancelRollout("r2", "why"), m.CancelRollout("r3", "while it was away")]


def test_a_message_on_a_connection_of_the_former_process_is_no_refusal(peer: RawPeer) -> None:
    peer.say(m.Heartbeat(None, {}))
    (told,) = peer.hear(1)
    assert isinstance(told, m.Refused) and told.code == "not_hello_first"
    assert peer.server.refused == {} and peer.server.overtaken == 1


def test_a_peer_that_has_more_than_the_journal_is_refused_and_counted_and_the_server_goes_on(peer: RawPeer) -> None:
    peer.say(hello(received_total=4, connection=1))
    (told,) = peer.hear(1)
    assert isinstance(told, m.Refused) and told.code == "peer_ahead"
    assert (told.got, told.expected) == ("4 messages received", "at most 3")
    assert peer.server.refused == {"peer_ahead": 1}
    assert peer.server.peers == (ACTOR,), "what it says is no proof: an honest one may still come back"
    peer.say(hello(received_total=3, connection=2))
    (told,) = peer.hear(1)
    assert isinstance(told, m.Welcome)


def test_after_it_was_refused_its_next_process_begins_anew(peer: RawPeer) -> None:
    peer.say(hello(received_total=4, connection=1))
    peer.hear(1)
    peer.say(hello("2"))
    events: list[Event] = []
    deadline_s = time.monotonic() + WAIT_S
    while len(events) < 2 and time.monotonic() < deadline_s:
        events += peer.server.poll(0.02)
    assert [type(event) for event in events] == [PeerDown, PeerUp]
