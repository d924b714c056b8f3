"""The client against a real server in another thread, over real TCP: also through a proxy that cuts connections."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from stillhouse.protocol import messages as m
from stillhouse.protocol.client import Client, worker_client
from stillhouse.protocol.codec import Received, decode, encode
from stillhouse.protocol.context import RoleContext
from stillhouse.protocol.errors import (
    ConnectTimeout,
    HandshakeRefused,
    LocalProtocolError,
    MalformedMessage,
    MessageRefused,
    NotConnected,
    PeerLost,
    SendTimeout,
)
from stillhouse.protocol.link import UNREADABLE_IN_WINDOW
from stillhouse.protocol.server import PeerServer
from stillhouse.protocol.server_events import Event, FromPeer, PeerDown, PeerUp
from stillhouse.protocol.sockets import NO_WAIT_MORE, new_socket, receive_from_router, send_frames
from tests.patience import PATIENCE_S

RUN, VOCAB = "run-1", "ab" * 32
HELLO = m.Hello("actor", "actor-0", "first", RUN, VOCAB)
LEARNER = msgspec.structs.replace(HELLO, role="learner", name="learner-0")
TEACHER = msgspec.structs.replace(HELLO, role="teacher", name="teacher-0", pool="default")
VERSION = m.WeightVersion(0, 1)
ARRAYS = (np.zeros(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.uint8))
WAIT_S = PATIENCE_S
"""How long a test waits for what must come; never for what must not."""


def segment(n: int) -> m.Segment:
    return m.Segment(f"train-{n}-0-0", 0, 0, 2, (), False)


def ack_of(message: m.Message) -> m.Message | None:
    """What a buffer that likes everything says."""
    match message:
        case m.Segment(rollout_id=rollout_id, index=index):
            return m.SegmentAck(rollout_id, index, "accepted")
        case m.RolloutFailed(rollout_id=rollout_id):
            return m.RolloutFailedAck(rollout_id)
        case m.Heartbeat():
            return m.HeartbeatReply(VERSION)
        case _:
            return None


class Buffer:
    """A Server in a thread. `answer` decides what each message is answered with; `events` is all that happened."""

    def __init__(
        self, bind: str = "tcp://127.0.0.1:0", *, heartbeat_s: float = 0.05, peer_timeout_s: float = 30.0
    ) -> None:
        self.server = PeerServer(
            bind, run_id=RUN, vocab_fingerprint=VOCAB, heartbeat_s=heartbeat_s, peer_timeout_s=peer_timeout_s
        )
        self.address = self.server.address
        self.answer: Callable[[m.Message], m.Message | None] = ack_of
        self.events: list[Event] = []
        self._changed = threading.Condition()
        self._to_send: list[tuple[m.Role, str, m.Message]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="buffer")
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            events = self.server.poll(0.01)
            with self._changed:  # before the answers: who waited for an answer finds the message here
                self.events += events
            for event in events:
                if isinstance(event, FromPeer):
                    reply = self.answer(event.received.message)
                    if reply is not None:
                        self.server.send(event.role, event.name, reply)
            with self._changed:
                for role, name, message in self._to_send:
                    self.server.send(role, name, message)
                self._to_send.clear()
                self._changed.notify_all()
        self.server.close(linger_s=0.2)

    def send(self, role: m.Role, name: str, message: m.Message) -> None:
        with self._changed:
            self._to_send.append((role, name, message))

    def got(self, kind: type[m.Message]) -> list[m.Message]:
        with self._changed:
            return self._got(kind)

    def _got(self, kind: type[m.Message]) -> list[m.Message]:
        messages = [event.received.message for event in self.events if isinstance(event, FromPeer)]
        return [message for message in messages if isinstance(message, kind)]

    def wait_for(self, true: Callable[[list[Event]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: true(self.events), WAIT_S), f"it never came: {self.events}"

    def wait_for_messages(self, kind: type[m.Message], n: int) -> list[m.Message]:
        self.wait_for(lambda _: len(self._got(kind)) >= n)
        return self.got(kind)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


MakeBuffer: TypeAlias = Callable[..., Buffer]
MakeClient: TypeAlias = Callable[..., Client]


@pytest.fixture
def make_buffer() -> Iterator[MakeBuffer]:
    buffers: list[Buffer] = []

    def make(bind: str = "tcp://127.0.0.1:0", **settings: float) -> Buffer:
        buffers.append(Buffer(bind, **settings))
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.stop()


@pytest.fixture
def buffer(make_buffer: MakeBuffer) -> Buffer:
    return make_buffer()


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    """Clients in need of no network patience; closed after the test, before the buffer."""
    clients: list[Client] = []

    def make(address: str, hello: m.Hello = HELLO, **settings: float) -> Client:
        clients.append(Client(address, hello, **{"connect_timeout_s": WAIT_S, "resend_s": 60.0, **settings}))  # pyright: ignore[reportArgumentType]
        return clients[-1]

    yield make
    for client in clients:
        client.close("test over")


def receive(client: Client) -> m.Message:
    received = client.recv(WAIT_S)
    assert received is not None, "nothing came"
    return received.message


# ------------------------------------------------------------------------------------------------- the plain way


def test_connect_gives_the_welcome(buffer: Buffer, make_client: MakeClient) -> None:
    client = make_client(buffer.address)
    welcome = client.connect()
    assert (welcome.heartbeat_s, welcome.peer_timeout_s) == (0.05, 30.0)
    assert client.published is not None


def test_acknowledgements_are_taken_care_of_and_messages_are_received(buffer: Buffer, make_client: MakeClient) -> None:
    client = make_client(buffer.address)
    client.connect()
    for n in range(300):
        client.send(segment(n), ARRAYS)
    assert client.flush(WAIT_S)
    assert client.unacked == 0
    assert buffer.got(m.Segment) == [segment(n) for n in range(300)]
    buffer.send("actor", "actor-0", m.CancelRollout("r", "x"))
    assert receive(client) == m.CancelRollout("r", "x")
    assert client.recv(0.0) is None


@pytest.mark.parametrize(
    ("hello", "sent", "arrays", "ack"),
    [
        (HELLO, segment(0), ARRAYS, m.SegmentAck("train-0-0-0", 0, "rejected", "nan_logprob")),
        (TEACHER, m.Scores((1,)), ARRAYS[1:2], m.ScoresAck((1,), ("expired",), (None,))),
        (TEACHER, m.ScoreFailed((1,), "x"), (), m.ScoresAck((1,), ("rejected",), ("x",))),
        (LEARNER, m.TasksOffered((m.Task(3, "train", 8, m.Sampling()),)), ARRAYS[:1], m.TasksAck((3,), "train", 5)),
        (LEARNER, m.BatchTrained(4, VERSION), (), m.BatchTrainedAck(4, VERSION)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_acknowledgements_that_say_more_than_arrived_reach_the_caller(
    buffer: Buffer,
    make_client: MakeClient,
    hello: m.Hello,
    sent: m.Message,
    arrays: tuple[np.ndarray, ...],
    ack: m.Message,
) -> None:
    buffer.answer = lambda message: ack if message == sent else ack_of(message)
    client = make_client(buffer.address, hello)
    client.connect()
    client.send(sent, arrays)
    assert receive(client) == ack
    assert client.unacked == 0


@pytest.mark.parametrize("gpus", [0.0, 1.5])
def test_heartbeats_go_on_while_the_caller_computes_and_say_what_was_set(
    buffer: Buffer, make_client: MakeClient, gpus: float
) -> None:
    began_s = time.monotonic()
    client = make_client(buffer.address, gpus=gpus, began_s=began_s - 100.0)
    client.connect()
    buffer.wait_for_messages(m.Heartbeat, 2)
    client.set_heartbeat(VERSION, {"tokens_total": 3.0})
    buffer.wait_for(lambda events: any(_is_heartbeat(event, VERSION, {"tokens_total": 3.0}) for event in events))
    buffer.wait_for_messages(m.Heartbeat, 6)
    assert client.published == VERSION
    told = [one.stats.get(m.GPU_S, 0.0) for one in buffer.got(m.Heartbeat) if isinstance(one, m.Heartbeat)]
    assert 100.0 * gpus <= max(told) <= gpus * (time.monotonic() - began_s + 100.0)


def _is_heartbeat(event: Event, version: m.WeightVersion, stats: dict[str, float]) -> bool:
    if not isinstance(event, FromPeer):
        return False
    message = event.received.message
    if not isinstance(message, m.Heartbeat) or message.version != version:
        return False
    return {"cpu_s_total", *stats} == message.stats.keys() - {m.GPU_S} and stats.items() <= message.stats.items()


def test_flush_also_waits_for_messages_without_an_acknowledgement(buffer: Buffer, make_client: MakeClient) -> None:
    client = make_client(buffer.address, LEARNER)
    client.connect()
    client.send(m.VersionPublished(VERSION))
    assert client.unacked == 0
    assert client.flush(WAIT_S)
    assert buffer.got(m.VersionPublished) == [m.VersionPublished(VERSION)]


def test_close_says_goodbye_after_what_was_sent_and_may_be_called_again(
    buffer: Buffer, make_client: MakeClient
) -> None:
    client = make_client(buffer.address)
    client.connect()
    for n in range(100):
        client.send(segment(n), ARRAYS)
    client.close("enough")
    client.close("again")
    buffer.wait_for(lambda events: PeerDown("actor", "actor-0", "goodbye: enough") in events)
    assert len(buffer.got(m.Segment)) == 100
    with pytest.raises(NotConnected):
        client.recv(0.0)
    with pytest.raises(NotConnected):
        client.send(segment(0), ARRAYS)


def test_leaving_a_with_block_by_an_error_says_which(buffer: Buffer, make_client: MakeClient) -> None:
    with pytest.raises(KeyError), make_client(buffer.address) as client:
        client.connect()
        raise KeyError("lost")
    buffer.wait_for(lambda events: PeerDown("actor", "actor-0", "goodbye: KeyError: 'lost'") in events)


def test_a_client_must_connect_first_and_only_once(buffer: Buffer, make_client: MakeClient) -> None:
    client = make_client(buffer.address)
    with pytest.raises(NotConnected, match="call connect"):
        client.send(segment(0), ARRAYS)
    client.connect()
    with pytest.raises(LocalProtocolError, match="twice"):
        client.connect()


# ----------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"protocol_version": 99}, "protocol_version"),
        ({"run_id": "another"}, "run_id"),
        ({"vocab_fingerprint": "cd" * 32}, "vocab_fingerprint"),
    ],
)
def test_a_refused_hello_is_raised(
    buffer: Buffer, make_client: MakeClient, fields: dict[str, object], code: str
) -> None:
    client = make_client(buffer.address, msgspec.structs.replace(HELLO, **fields))
    with pytest.raises(HandshakeRefused) as caught:
        client.connect()
    assert caught.value.refused.code == code


def test_a_process_whose_name_was_taken_over_is_told_so(buffer: Buffer, make_client: MakeClient) -> None:
    former = make_client(buffer.address)
    former.connect()
    later = make_client(buffer.address, msgspec.structs.replace(HELLO, incarnation="second"))
    later.connect()
    with pytest.raises(HandshakeRefused, match="duplicate_name"):
        former.recv(WAIT_S)
    later.send(segment(0), ARRAYS)
    assert later.flush(WAIT_S)


def test_a_message_of_another_role_is_raised_as_our_fault(buffer: Buffer, make_client: MakeClient) -> None:
    client = make_client(buffer.address)
    client.connect()
    client.send(m.BatchWanted(VERSION))
    with pytest.raises(MessageRefused, match="BatchWanted"):
        client.recv(WAIT_S)


def test_nobody_at_the_address_is_a_connect_timeout(make_buffer: MakeBuffer, make_client: MakeClient) -> None:
    gone = make_buffer()
    gone.stop()
    with pytest.raises(ConnectTimeout, match=gone.address):
        make_client(gone.address, connect_timeout_s=0.1).connect()


@pytest.mark.parametrize("n_garbled", [2, UNREADABLE_IN_WINDOW + 1])
def test_an_unreadable_message_makes_a_new_connection_and_too_many_are_raised(
    make_client: MakeClient, n_garbled: int
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = new_socket(context, zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    received_totals: list[int] = []

    def answer_badly() -> None:
        while len(received_totals) <= n_garbled and router.poll(int(WAIT_S * 1000)):
            got = receive_from_router(router)
            assert got is not None
            identity, hello = got.identity, decode(got.frames).message
            if not isinstance(hello, m.Hello):
                continue  # a heartbeat
            n_before = len(received_totals)
            received_totals.append(hello.received_total)
            for message in (m.Welcome(60.0, 120.0, VERSION), m.CancelRollout(f"r{n_before}", "x")):
                router.send(identity, NO_WAIT_MORE)
                send_frames(router, encode(message))
            if n_before < n_garbled:
                router.send(identity, NO_WAIT_MORE)
                send_frames(router, [b"garbage"])
            if n_before == UNREADABLE_IN_WINDOW:
                return

    thread = threading.Thread(target=answer_badly)
    thread.start()
    client = make_client(f"tcp://127.0.0.1:{port}")
    client.connect()
    for n in range(min(n_garbled, UNREADABLE_IN_WINDOW) + 1):
        assert receive(client) == m.CancelRollout(f"r{n}", "x")
    if n_garbled > UNREADABLE_IN_WINDOW:
        with pytest.raises(MalformedMessage):
            client.recv(WAIT_S)
    thread.join()
    assert received_totals == list(range(len(received_totals)))  # the garbled ones are not counted
    context.destroy(linger=0)


# ------------------------------------------------------------------------------------------ loss and backpressure


def test_a_message_is_sent_again_until_its_acknowledgement_arrives(buffer: Buffer, make_client: MakeClient) -> None:
    lost: list[m.Message] = []

    def lose_two_acks(message: m.Message) -> m.Message | None:
        if isinstance(message, m.Segment) and len(lost) < 2:
            lost.append(message)
            return None
        return ack_of(message)

    buffer.answer = lose_two_acks
    client = make_client(buffer.address, resend_s=0.03)
    client.connect()
    client.send(segment(0), ARRAYS)
    assert client.flush(WAIT_S)
    assert len(buffer.got(m.Segment)) >= 3
    assert set(buffer.got(m.Segment)) == {segment(0)}


def test_a_caller_that_does_not_read_holds_the_buffer_up_and_stays_connected(
    make_buffer: MakeBuffer, make_client: MakeClient
) -> None:
    buffer = make_buffer(heartbeat_s=0.05, peer_timeout_s=0.5)
    client = make_client(buffer.address, max_inbox_bytes=2000)
    client.connect()
    sent = [m.CancelRollout(f"r{n}", "x" * 100) for n in range(200)]
    for message in sent:
        buffer.send("actor", "actor-0", message)
    n = len(buffer.wait_for_messages(m.Heartbeat, 1))
    buffer.wait_for_messages(m.Heartbeat, n + 40)  # about two seconds: many times the peer timeout
    in_inbox = re.search(r"inbox=(\d+)", repr(client))
    assert in_inbox is not None
    assert int(in_inbox[1]) < 40
    assert [receive(client) for _ in sent] == sent
    assert client.connects_total == 1


def test_send_blocks_while_too_much_is_unconfirmed_and_gives_up_in_time(
    buffer: Buffer, make_client: MakeClient
) -> None:
    acking = threading.Event()
    buffer.answer = lambda message: ack_of(message) if acking.is_set() or isinstance(message, m.Heartbeat) else None
    n_bytes = sum(map(len, encode(segment(0), ARRAYS)))
    client = make_client(buffer.address, send_timeout_s=0.1, max_unconfirmed_bytes=2 * n_bytes, resend_s=0.05)
    client.connect()
    client.send(segment(0), ARRAYS)
    client.send(segment(1), ARRAYS)
    with pytest.raises(SendTimeout, match="does not keep up"):
        client.send(segment(2), ARRAYS)
    acking.set()
    assert client.flush(WAIT_S)
    for n in range(2, 20):
        client.send(segment(n), ARRAYS)
    assert client.flush(WAIT_S)


def test_a_message_larger_than_the_bound_goes_alone(buffer: Buffer, make_client: MakeClient) -> None:
    client = make_client(buffer.address, max_unconfirmed_bytes=10)
    client.connect()
    client.send(segment(0), ARRAYS)
    client.send(segment(1), ARRAYS)
    assert client.flush(WAIT_S)


def test_after_a_restart_of_the_buffer_everything_unconfirmed_is_sent_again(
    make_buffer: MakeBuffer, make_client: MakeClient
) -> None:
    former = make_buffer()
    former.answer = lambda message: m.HeartbeatReply(VERSION) if message == m.Heartbeat(None, {}) else None
    client = make_client(former.address)
    client.connect()
    client.send(segment(0), ARRAYS)
    former.wait_for_messages(m.Segment, 1)
    former.stop()
    client.send(segment(1), ARRAYS)
    later = make_buffer(former.address)
    assert client.flush(WAIT_S)
    assert client.connects_total == 2
    assert later.got(m.Segment) == [segment(0), segment(1)]
    assert [event for event in later.events if isinstance(event, PeerUp)] == [PeerUp("actor", "actor-0", "first", "")]


def test_a_buffer_that_stays_away_is_lost(make_buffer: MakeBuffer, make_client: MakeClient) -> None:
    buffer = make_buffer(peer_timeout_s=0.2)
    client = make_client(buffer.address, reconnect_timeout_s=0.2)
    client.connect()
    buffer.stop()
    with pytest.raises(PeerLost, match="no answer"):
        client.recv(WAIT_S)
    with pytest.raises(PeerLost):
        client.send(segment(0), ARRAYS)


def test_a_worker_waits_for_a_buffer_that_is_away_as_long_as_its_launcher_says(
    make_buffer: MakeBuffer, tmp_path: Path
) -> None:
    buffer = make_buffer(peer_timeout_s=0.2)
    ctx = RoleContext(
        role="actor",
        index=0,
        name="actor-0",
        incarnation="first",
        run_id=HELLO.run_id,
        run_dir=tmp_path,
        buffer_address=buffer.address,
        resume=False,
        config=None,
        buffer_away_s=0.3,
    )
    with worker_client(ctx, HELLO.vocab_fingerprint) as client:
        client.connect()
        buffer.stop()
        with pytest.raises(PeerLost, match=r"Hellos in 0\.3 s"):
            client.recv(WAIT_S)


def test_a_buffer_that_ended_the_run_is_not_looked_for(make_buffer: MakeBuffer, make_client: MakeClient) -> None:
    buffer = make_buffer(peer_timeout_s=0.2)
    client = make_client(buffer.address, reconnect_timeout_s=3600.0)
    client.connect()
    buffer.send("actor", "actor-0", m.Shutdown(True, "trained"))
    assert receive(client) == m.Shutdown(True, "trained")
    buffer.stop()
    with pytest.raises(PeerLost, match=r"ended the run \(trained\)"):
        client.recv(WAIT_S)


def test_nothing_is_lost_or_doubled_when_connections_are_cut(buffer: Buffer, make_client: MakeClient) -> None:
    """Cut by making the client's I/O end its connection from below, as a broken network path does."""
    client = make_client(buffer.address)
    client.connect()
    received: list[Received] = []
    for n in range(60):
        client.send(segment(n), ARRAYS)
        buffer.send("actor", "actor-0", m.CancelRollout(f"r{n}", "x"))
        if n % 20 == 10:
            _cut_connections_to(buffer.address)
        while (one := client.recv(0.002)) is not None:
            received.append(one)
    while len(received) < 60:
        one = client.recv(WAIT_S)
        assert one is not None
        received.append(one)
    assert [one.message for one in received] == [m.CancelRollout(f"r{n}", "x") for n in range(60)]
    assert client.flush(WAIT_S)
    assert client.connects_total >= 2
    assert set(buffer.got(m.Segment)) == {segment(n) for n in range(60)}
    assert not [event for event in buffer.events if isinstance(event, PeerDown)]


def _cut_connections_to(address: str) -> None:
    """Shut down this process's TCP connections to `address`, without ZeroMQ's knowledge."""
    port = int(address.rsplit(":", 1)[1])
    for connection in psutil.Process().net_connections("tcp4"):
        if connection.raddr and connection.raddr.port == port:
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(connection.fd)) as duplicate,
            ):  # closed by now
                duplicate.shutdown(socket.SHUT_RDWR)


# ------------------------------------------------------------------------------------------------------ processes


def _connect_in_child(address: str) -> None:
    client = Client(address, msgspec.structs.replace(HELLO, name="actor-1"))
    client.connect()
    client.send(segment(7), ARRAYS)
    flushed = client.flush(WAIT_S)
    client.close("child done")
    os._exit(0 if flushed else 1)


def test_a_client_works_in_a_forked_child_of_a_process_with_a_client(buffer: Buffer, make_client: MakeClient) -> None:
    client = make_client(buffer.address)
    client.connect()
    child = multiprocessing.get_context("fork").Process(target=_connect_in_child, args=(buffer.address,))
    child.start()
    child.join(WAIT_S)
    assert child.exitcode == 0
    client.send(segment(0), ARRAYS)
    assert client.flush(WAIT_S)
    assert segment(7) in buffer.got(m.Segment)


_CONNECT_AND_STAY = """
import sys
from stillhouse.protocol.client import Client
from stillhouse.protocol.messages import Hello
client = Client(sys.argv[1], Hello("actor", "actor-0", "first", "run-1", "ab" * 32))
client.connect()
for _ in sys.stdin:
    client.flush(20.0)
    print(client.connects_total, flush=True)
"""


def test_a_killed_process_is_noticed(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(peer_timeout_s=0.5)
    with subprocess.Popen([sys.executable, "-c", _CONNECT_AND_STAY, buffer.address], stdin=subprocess.PIPE) as process:
        buffer.wait_for_messages(m.Heartbeat, 3)
        process.kill()
    buffer.wait_for(lambda events: any(isinstance(event, PeerDown) and "silent" in event.reason for event in events))


def test_a_process_that_was_stopped_does_not_take_its_own_absence_for_silence(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(peer_timeout_s=3.0)  # it looks for a new connection after half of that
    command = [sys.executable, "-c", _CONNECT_AND_STAY, buffer.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            buffer.wait_for_messages(m.Heartbeat, 3)
            process.send_signal(signal.SIGSTOP)
            time.sleep(2.0)
            process.send_signal(signal.SIGCONT)
            buffer.wait_for_messages(m.Heartbeat, len(buffer.got(m.Heartbeat)) + 3)
            connects_total, _ = process.communicate("how many?\n", timeout=WAIT_S)
        finally:
            process.kill()
    assert connects_total == "1\n"
    assert not [event for event in buffer.events if isinstance(event, PeerDown)]
