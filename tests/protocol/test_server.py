"""The server against bare DEALER sockets, in one thread: what a well-behaved client would never send included."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, ValuesView
from typing import TypeAlias

import msgspec
import numpy as np
import pytest
import zmq

from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import Received, decode, encode
from stillhouse.protocol.errors import AddressUnusable
from stillhouse.protocol.handshake import PeerId
from stillhouse.protocol.server import POLL_MESSAGES, PeerServer
from stillhouse.protocol.server_events import Event, FromPeer, PeerDown, PeerUp
from stillhouse.protocol.session import PeerSession
from stillhouse.protocol.sockets import new_socket, receive_frames, send_frames
from tests.patience import PATIENCE_S, Limit

MakeServer: TypeAlias = Callable[..., PeerServer]
MakePeer: TypeAlias = Callable[..., "Peer"]

RUN, VOCAB = "run-1", "ab" * 32
HELLO = m.Hello("actor", "actor-0", "first", RUN, VOCAB)
SEGMENT = m.Segment("train-0-0-0", 0, 0, 2, (), False)
SEGMENT_ARRAYS = (np.zeros(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.uint8))


class Clock:
    """Stands still unless moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Peer:
    """One connection."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], server: PeerServer) -> None:
        self.server = server
        self.socket = new_socket(context, zmq.DEALER)
        self.socket.connect(server.address)

    def send(self, message: m.Message, arrays: tuple[np.ndarray, ...] = ()) -> None:
        send_frames(self.socket, encode(message, arrays))

    def read(self) -> Received | None:
        """The next message, while the server does nothing."""
        if not self.socket.poll(int(PATIENCE_S * 1000)):
            return None
        frames = receive_frames(self.socket)
        assert frames is not None
        return decode(frames)

    def read_n(self, n: int) -> list[m.Message]:
        """The next n messages, while nothing happens at the server; and no more than those."""
        messages: list[m.Message] = []
        limit = Limit()
        while not limit.passed:
            assert self.server.poll(0.01) == []
            while (frames := receive_frames(self.socket)) is not None:
                messages.append(decode(frames).message)
            if len(messages) >= n:
                break
        assert len(messages) == n
        return messages

    def greet(self, **fields: object) -> list[Event]:
        """Hello; returns the events it caused."""
        self.send(msgspec.structs.replace(HELLO, **fields))
        return events_until_one(self.server)

    def refused(self) -> m.Refused:
        """What the server answers to what was just sent."""
        limit = Limit()
        while not limit.passed:
            assert self.server.poll(0.05) == []
            if self.socket.poll(0):
                break
        received = self.read()
        assert received is not None
        assert isinstance(received.message, m.Refused)
        return received.message


def events_until_one(server: PeerServer) -> list[Event]:
    limit = Limit()
    while not limit.passed:
        if events := server.poll(0.05):
            return events
    raise AssertionError("nothing happened")


def nothing_happens(server: PeerServer) -> None:
    for _ in range(3):
        assert server.poll(0.02) == []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_server(clock: Clock) -> Iterator[MakeServer]:
    servers: list[PeerServer] = []

    def make(
        bind: str = "tcp://127.0.0.1:0", *, vocab: str | None = VOCAB, max_unconfirmed_bytes: int = 1 << 20
    ) -> PeerServer:
        servers.append(
            PeerServer(
                bind,
                run_id=RUN,
                vocab_fingerprint=vocab,
                heartbeat_s=1.0,
                peer_timeout_s=10.0,
                max_unconfirmed_bytes=max_unconfirmed_bytes,
                clock=clock,
            )
        )
        return servers[-1]

    yield make
    for server in servers:
        server.close(linger_s=0)


@pytest.fixture
def server(make_server: MakeServer) -> PeerServer:
    return make_server()


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[MakePeer]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peers: list[Peer] = []

    def make(to: PeerServer | None = None) -> Peer:
        peers.append(Peer(context, to or request.getfixturevalue("server")))
        return peers[-1]

    yield make
    for peer in peers:
        peer.socket.close(linger=0)
    context.term()


# ------------------------------------------------------------------------------------------------------ handshake


def test_a_hello_is_welcomed_with_the_newest_version_and_told_as_an_event(
    server: PeerServer, connect: MakePeer
) -> None:
    server.set_published(m.WeightVersion(0, 4))
    peer = connect()
    assert peer.greet() == [PeerUp("actor", "actor-0", "first", "")]
    received = peer.read()
    assert received is not None
    assert received.message == m.Welcome(1.0, 10.0, m.WeightVersion(0, 4), RUN)
    assert server.peers == (("actor", "actor-0"),)


@pytest.mark.parametrize(
    ("fields", "code", "expected"),
    [
        ({"protocol_version": 99}, "protocol_version", str(m.PROTOCOL_VERSION)),
        ({"run_id": "another"}, "run_id", RUN),
        ({"vocab_fingerprint": "cd" * 32}, "vocab_fingerprint", VOCAB),
        ({"vocab_fingerprint": ""}, "vocab_fingerprint", "a vocabulary fingerprint"),
        ({"name": "../etc/passwd"}, "malformed", "a name like"),
        ({"incarnation": ""}, "malformed", "an incarnation"),
    ],
)
def test_who_does_not_belong_here_is_refused_by_name(
    server: PeerServer, connect: MakePeer, fields: dict[str, object], code: str, expected: str
) -> None:
    peer = connect()
    peer.send(msgspec.structs.replace(HELLO, **fields))
    refused = peer.refused()
    assert refused.code == code
    assert expected in refused.expected
    assert server.refused == {code: 1}
    assert server.peers == ()


def test_a_hello_of_another_protocol_is_refused_for_its_version_not_its_shape(connect: MakePeer) -> None:
    peer = connect()
    peer.socket.send(
        msgspec.msgpack.encode({"type": "Hello", "protocol_version": m.PROTOCOL_VERSION + 1, "who": "actor-0"})
    )
    assert peer.refused().code == "protocol_version"


def test_a_launcher_needs_no_vocabulary(connect: MakePeer) -> None:
    assert connect().greet(role="launcher", name="launcher", vocab_fingerprint="") == [
        PeerUp("launcher", "launcher", "first", "")
    ]


def test_a_launcher_alone_may_ask_which_run_this_is(server: PeerServer, connect: MakePeer) -> None:
    asking = connect()
    assert asking.greet(role="launcher", name="joiner", vocab_fingerprint="", run_id="")
    received = asking.read()
    assert received is not None and isinstance(received.message, m.Welcome) and received.message.run_id == RUN
    actor = connect()
    actor.send(msgspec.structs.replace(HELLO, run_id=""))
    assert actor.refused().code == "run_id"


def test_a_launcher_that_is_there_is_not_pushed_out_by_another_of_its_name(
    server: PeerServer, connect: MakePeer
) -> None:
    first, other = connect(), connect()
    assert first.greet(role="launcher", name="launcher", vocab_fingerprint="")
    other.send(msgspec.structs.replace(HELLO, role="launcher", name="launcher", vocab_fingerprint="", incarnation="b"))
    assert other.refused().code == "duplicate_name"
    assert server.peers == (("launcher", "launcher"),)


def test_the_learner_s_vocabulary_decides_when_none_is_given(make_server: MakeServer, connect: MakePeer) -> None:
    server = make_server(vocab=None)
    assert connect(server).greet(role="launcher", name="launcher", vocab_fingerprint="")
    assert connect(server).greet(vocab_fingerprint="22" * 32)
    events = connect(server).greet(role="learner", name="learner-0", vocab_fingerprint="11" * 32)
    assert [type(event) for event in events] == [PeerDown, PeerUp]
    other = connect(server)
    other.send(msgspec.structs.replace(HELLO, name="actor-1", vocab_fingerprint="22" * 32))
    assert other.refused().expected == "11" * 32
    assert server.peers == (("launcher", "launcher"), ("learner", "learner-0"))


def test_messages_before_hello_are_refused(connect: MakePeer) -> None:
    peer = connect()
    peer.send(SEGMENT, SEGMENT_ARRAYS)
    assert peer.refused().code == "not_hello_first"


def test_a_role_may_send_its_own_messages_only(server: PeerServer, connect: MakePeer) -> None:
    peer = connect()
    peer.greet()
    peer.read()
    for message in (m.BatchWanted(m.WeightVersion(0, 0)), m.Shutdown(True, "mine")):
        peer.send(message)
    assert peer.refused().code == "role"
    nothing_happens(server)
    assert server.refused == {"role": 2}


def test_a_second_hello_on_one_connection_is_welcomed_again_without_event_or_resend(
    server: PeerServer, connect: MakePeer
) -> None:
    peer = connect()
    peer.greet()
    server.send("actor", "actor-0", m.CancelRollout("r", "x"))
    peer.send(HELLO)
    assert [type(message).__name__ for message in peer.read_n(3)] == ["Welcome", "CancelRollout", "Welcome"]


def test_a_connection_cannot_become_another_peer(server: PeerServer, connect: MakePeer) -> None:
    peer = connect()
    peer.greet()
    peer.read()
    peer.send(msgspec.structs.replace(HELLO, name="actor-1"))
    assert peer.refused().code == "role"
    assert server.peers == (("actor", "actor-0"),)


# --------------------------------------------------------------------------------------- incarnations, connections


def test_a_new_incarnation_replaces_the_former_which_may_not_come_back(server: PeerServer, connect: MakePeer) -> None:
    former, later = connect(), connect()
    former.greet()
    former.read()
    assert later.greet(incarnation="second") == [
        PeerDown("actor", "actor-0", "replaced by incarnation second"),
        PeerUp("actor", "actor-0", "second", ""),
    ]
    former.send(SEGMENT, SEGMENT_ARRAYS)
    assert former.refused().code == "not_hello_first"
    again = connect()
    again.send(HELLO)
    refused = again.refused()
    assert (refused.code, refused.expected) == ("duplicate_name", "a new incarnation")
    later.send(SEGMENT, SEGMENT_ARRAYS)
    assert isinstance(events_until_one(server)[0], FromPeer)


def test_a_late_hello_of_one_that_fell_silent_does_not_put_its_successor_out(
    server: PeerServer, connect: MakePeer, clock: Clock
) -> None:
    former, later, late = connect(), connect(), connect()
    former.greet()
    gone: list[Event] = []
    for _ in range(12):  # step by step: a pause of the server would be no silence of the peer
        clock.now_s += 0.9
        gone += server.poll(0.0)
    assert [type(event) for event in gone] == [PeerDown]
    assert later.greet(incarnation="second") == [PeerUp("actor", "actor-0", "second", "")]
    late.send(msgspec.structs.replace(HELLO, connection=2))  # it was on its way when its process was killed
    assert late.refused().code == "duplicate_name"
    later.send(SEGMENT, SEGMENT_ARRAYS)
    assert isinstance(events_until_one(server)[0], FromPeer), "the living one stays"


def test_a_replacement_comes_in_a_poll_of_its_own_so_that_replies_reach_the_former(
    server: PeerServer, connect: MakePeer
) -> None:
    former = connect()
    former.greet()
    former.read()
    later = connect()
    former.send(SEGMENT, SEGMENT_ARRAYS)
    assert former.socket.poll(0) == 0
    later.send(msgspec.structs.replace(HELLO, incarnation="second"))
    events = events_until_one(server)
    if isinstance(events[0], FromPeer):  # the two connections may be read in either order
        assert len(events) == 1
        server.send("actor", "actor-0", m.SegmentAck("train-0-0-0", 0, "accepted"))
        received = former.read()
        assert received is not None
        assert isinstance(received.message, m.SegmentAck)
        events = events_until_one(server)
    assert [type(event) for event in events[:2]] == [PeerDown, PeerUp]


def test_the_same_incarnation_on_a_new_connection_resumes_where_it_stopped(
    server: PeerServer, connect: MakePeer
) -> None:
    peer = connect()
    peer.greet()
    for n in range(4):
        server.send("actor", "actor-0", m.CancelRollout(f"r{n}", "x"))
    peer.read_n(5)
    peer.socket.close(linger=0)
    server.send("actor", "actor-0", m.CancelRollout("r4", "while away"))
    again = connect()
    again.send(msgspec.structs.replace(HELLO, received_total=3))
    welcome, *rest = again.read_n(3)
    assert isinstance(welcome, m.Welcome)
    assert rest == [m.CancelRollout("r3", "x"), m.CancelRollout("r4", "while away")]


def test_the_hello_of_an_older_connection_takes_nothing_from_a_newer_one(server: PeerServer, connect: MakePeer) -> None:
    """It was on its way for longer."""
    newer, older = connect(), connect()
    newer.greet(connection=7)
    newer.read_n(1)
    older.send(msgspec.structs.replace(HELLO, connection=3))
    limit = Limit()
    while not server.overtaken and not limit.passed:
        assert server.poll(0.01) == [] and not older.socket.poll(0), "it was welcomed"
    server.send("actor", "actor-0", m.CancelRollout("r", "x"))
    assert newer.read_n(1) == [m.CancelRollout("r", "x")]


def test_hellos_of_one_incarnation_count_in_the_order_of_its_connections(server: PeerServer, connect: MakePeer) -> None:
    """After a long pause of the server its peer has tried several connections, and ROUTER reads them in any order."""
    connections = [connect() for _ in range(8)]
    for number in (3, 7, 1, 0, 6, 5, 2, 4):
        connections[number].send(msgspec.structs.replace(HELLO, connection=number))
    events_until_one(server)
    limit = Limit()
    while not limit.passed:  # until all Hellos are read: welcomed, or counted as overtaken
        welcomed = sum(connection.socket.poll(0) > 0 for connection in connections)
        if welcomed + server.overtaken == 8:
            break
        assert server.poll(0.01) == []
    server.send("actor", "actor-0", m.CancelRollout("r", "x"))
    assert connections[7].read_n(2)[-1] == m.CancelRollout("r", "x")


def test_a_peer_that_goes_on_with_a_connection_it_had_replaced_is_told_to_say_hello(
    server: PeerServer, connect: MakePeer
) -> None:
    replaced, newest = connect(), connect()
    replaced.greet()
    newest.send(HELLO)
    newest.read_n(1)
    replaced.read_n(1)
    replaced.send(SEGMENT, SEGMENT_ARRAYS)
    assert replaced.refused().code == "not_hello_first"
    assert (server.overtaken, server.refused) == (1, {})


def test_heartbeats_confirm_what_need_not_be_kept(server: PeerServer, connect: MakePeer) -> None:
    lost = connect()
    lost.greet()
    lost.send(m.Goodbye("it was counted as lost, with seven messages"))
    events_until_one(server)
    peer = connect()
    peer.greet(received_total=7)
    for n in range(3):
        server.send("actor", "actor-0", m.CancelRollout(f"r{n}", "x"))
    assert server.unconfirmed("actor", "actor-0") == 3
    peer.send(m.Heartbeat(None, {}, 9))
    assert len(events_until_one(server)) == 1
    assert server.unconfirmed("actor", "actor-0") == 1
    peer.read_n(4)
    peer.send(m.Heartbeat(None, {}, 99))
    assert peer.refused().code == "malformed"


def test_who_has_messages_of_a_buffer_that_this_one_knows_nothing_of_is_refused(
    server: PeerServer, connect: MakePeer
) -> None:
    """It would go on with numbers of leases and batches that are given out anew here."""
    peer = connect()
    peer.send(msgspec.structs.replace(HELLO, received_total=7))
    refused = peer.refused()
    assert (refused.code, refused.got, refused.expected) == ("peer_ahead", "7 messages received", "at most 0")
    assert server.peers == () and server.refused == {"peer_ahead": 1}
    assert [type(event) for event in connect().greet(incarnation="its next process")] == [PeerUp]


def test_an_impossible_count_in_a_hello_starts_anew(server: PeerServer, connect: MakePeer) -> None:
    connect().greet()
    events = connect().greet(received_total=5)
    assert [type(event) for event in events] == [PeerDown, PeerUp]


def test_messages_for_one_who_left_are_logged(
    server: PeerServer, connect: MakePeer, caplog: pytest.LogCaptureFixture
) -> None:
    peer = connect()
    peer.greet()
    peer.send(m.Goodbye("done"))
    goodbye = FromPeer("actor", "actor-0", Received(m.Goodbye("done"), ()))
    assert events_until_one(server) == [goodbye, PeerDown("actor", "actor-0", "goodbye: done")]
    server.send("actor", "actor-0", m.CancelRollout("r", "x"))
    assert "CancelRollout for actor actor-0 has no receiver: the peer has left" in caplog.text


# ------------------------------------------------------------------------------------------------------- liveness


def test_a_silent_peer_is_lost_after_the_peer_timeout(server: PeerServer, connect: MakePeer, clock: Clock) -> None:
    silent, lively = connect(), connect()
    silent.greet()
    lively.greet(name="actor-1")
    events: list[Event] = []
    for _ in range(11):
        clock.now_s += 1.0
        lively.send(m.Heartbeat(None, {}))
        while True:
            events += events_until_one(server)
            if isinstance(events[-1], FromPeer):
                break
    assert [event for event in events if isinstance(event, PeerDown)] == [
        PeerDown("actor", "actor-0", "silent for 11.0 s")
    ]
    assert server.peers == (("actor", "actor-1"),)
    silent.read_n(1)
    silent.send(m.Heartbeat(None, {}))
    assert silent.refused().code == "not_hello_first"
    assert silent.greet() == [PeerUp("actor", "actor-0", "first", "")]


def test_a_poll_does_not_look_at_all_peers(server: PeerServer, connect: MakePeer, clock: Clock) -> None:
    connect().greet()

    class Counted(dict[PeerId, PeerSession]):
        looks = 0

        def values(self) -> ValuesView[PeerSession]:  # pyright: ignore[reportIncompatibleMethodOverride]
            Counted.looks += 1
            return super().values()

    server.book.sessions = Counted(server.book.sessions)
    for _ in range(90):
        clock.now_s += 0.1
        server.poll(0)
    assert server.peers and Counted.looks <= 4
    clock.now_s += 0.9
    server.poll(0)
    clock.now_s += 0.2
    assert [type(event) for event in server.poll(0)] == [PeerDown], "silent for 10.1 s, of at most 10"


def test_a_pause_of_the_server_is_not_the_silence_of_its_peers(
    server: PeerServer, connect: MakePeer, clock: Clock
) -> None:
    connect().greet()
    clock.now_s += 1000.0
    nothing_happens(server)
    assert server.peers == (("actor", "actor-0"),)


def test_a_peer_too_far_behind_is_lost(make_server: MakeServer, connect: MakePeer) -> None:
    server = make_server(max_unconfirmed_bytes=1000)
    connect(server).greet()
    for _ in range(20):
        server.send("actor", "actor-0", m.CancelRollout("r" * 100, "x"))
    (down,) = server.poll(0)
    assert isinstance(down, PeerDown)
    assert "bytes behind" in down.reason


# ----------------------------------------------------------------------------------------------- floods and garbage


def test_a_flood_of_one_peer_neither_starves_the_others_nor_the_owner(server: PeerServer, connect: MakePeer) -> None:
    flood, calm = connect(), connect()
    flood.greet()
    calm.greet(name="actor-1")
    flood.socket.linger = -1
    for _ in range(900):
        flood.send(SEGMENT, SEGMENT_ARRAYS)
    assert isinstance(events_until_one(server)[0], FromPeer)  # the flood has arrived
    calm.send(m.Heartbeat(None, {}))
    polls, seen = 0, 0
    while True:
        events = events_until_one(server)
        polls += 1
        assert len(events) <= POLL_MESSAGES
        if any(event[1] == "actor-1" for event in events):
            break
        seen += len(events)
        assert seen < 900, "the calm peer was heard only after the whole flood"


def test_garbage_is_counted_and_harms_nobody(server: PeerServer, connect: MakePeer) -> None:
    good, bad = connect(), connect()
    good.greet()
    good.read()
    generator = random.Random(0)
    n_garbage = 300
    for _ in range(n_garbage):
        bad.socket.send_multipart(
            [generator.randbytes(generator.randrange(40)) for _ in range(generator.randrange(1, 5))]
        )
    limit = Limit()
    while not limit.passed:
        assert server.poll(0.01) == []
        if sum(server.refused.values()) == n_garbage:
            break
    assert server.refused == {"damaged": n_garbage}
    bad.read_n(1)  # told once, not three hundred times
    good.send(SEGMENT, SEGMENT_ARRAYS)
    (event,) = events_until_one(server)
    assert isinstance(event, FromPeer)
    assert event.received.message == SEGMENT


def test_malformed_messages_of_a_known_peer_are_refused_and_it_stays(server: PeerServer, connect: MakePeer) -> None:
    peer = connect()
    peer.greet()
    peer.read()
    send_frames(peer.socket, [msgspec.msgpack.encode(SEGMENT), b"123"])
    refused = peer.refused()
    assert (refused.code, refused.got) == ("malformed", "1 arrays")
    peer.send(SEGMENT, SEGMENT_ARRAYS)
    assert isinstance(events_until_one(server)[0], FromPeer)


def test_behind_a_damaged_message_nothing_is_read_until_a_new_connection(server: PeerServer, connect: MakePeer) -> None:
    peer, again = connect(), connect()
    peer.greet()
    peer.read_n(1)
    peer.socket.send_multipart([*map(bytes, encode(SEGMENT, SEGMENT_ARRAYS)), b"not its sum"])
    peer.send(SEGMENT, SEGMENT_ARRAYS)  # in order: the one behind may not be read before that one has come again
    assert peer.refused().code == "damaged"
    nothing_happens(server)
    assert (server.refused, server.overtaken) == ({"damaged": 1}, 1)
    again.send(msgspec.structs.replace(HELLO, connection=1))
    again.send(SEGMENT, SEGMENT_ARRAYS)
    assert [type(event) for event in events_until_one(server)] == [FromPeer], "the session was kept"


def test_an_address_in_use_is_told(make_server: MakeServer, server: PeerServer) -> None:
    with pytest.raises(AddressUnusable, match="cannot bind"):
        make_server(server.address)
