"""Encrypted links over real sockets: who gets in, who does not, and what is known of those afterwards."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq

from stillhouse.protocol import messages as m
from stillhouse.protocol.client import Client
from stillhouse.protocol.codec import encode
from stillhouse.protocol.errors import ConnectTimeout, HandshakeRefused, ProtocolError
from stillhouse.protocol.keys import (
    ClientKeys,
    ServerKeys,
    encrypt_client,
    load_client_keys,
    load_server_keys,
    make_keys,
)
from stillhouse.protocol.server import PeerServer
from stillhouse.protocol.server_events import Event, FromPeer, PeerDown, PeerUp
from stillhouse.protocol.sockets import new_socket, receive_frames, send_frames
from tests.patience import PATIENCE_S

RUN, VOCAB = "run-1", "ab" * 32
HELLO = m.Hello("actor", "actor-0", "first", RUN, VOCAB)
SEGMENT = m.Segment("train-0-0-0", 0, 0, 100_000, (), False)
ARRAYS = (np.arange(100_000, dtype=np.int32), np.zeros(100_000, np.float32), np.ones(100_000, np.uint8))
POLLS = int(PATIENCE_S / 0.02)
"""Of 20 ms: how long a test waits for what must come."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["actor-0"])
    return tmp_path / "keys"


@contextmanager
def serving(keys: ServerKeys | None, *, peer_timeout_s: float = PATIENCE_S) -> Generator[PeerServer]:
    server = PeerServer(
        "tcp://127.0.0.1:0",
        run_id=RUN,
        vocab_fingerprint=VOCAB,
        heartbeat_s=1.0,
        peer_timeout_s=peer_timeout_s,
        keys=keys,
    )
    try:
        yield server
    finally:
        server.close(linger_s=0)


@pytest.fixture
def server(folder: Path) -> Iterator[PeerServer]:
    with serving(load_server_keys(folder)) as server:
        yield server


@contextmanager
def dealer(server: PeerServer, keys: ClientKeys | None) -> Generator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = new_socket(context, zmq.DEALER)
    peer.set(zmq.RECONNECT_IVL, 60_000)  # each tries once
    if keys is not None:
        encrypt_client(peer, keys)
    peer.connect(server.address)
    try:
        yield peer
    finally:
        context.destroy(linger=0)


def poll_until(server: PeerServer, true: Callable[[], bool]) -> list[Event]:
    events: list[Event] = []
    for _ in range(POLLS):
        if true():
            return events
        events += server.poll(0.02)
    raise AssertionError(f"it never came: {server!r}, {server.refused}, {events}")


def outcome_of_connecting(server: PeerServer, client: Client) -> ProtocolError | None:
    """While the server is served."""
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(client.connect)
        poll_until(server, connecting.done)
        error = connecting.exception()
    client.close("test over")
    assert error is None or isinstance(error, ProtocolError)
    return error


def test_a_role_comes_in_with_its_key_and_messages_pass_both_ways(server: PeerServer, folder: Path) -> None:
    roles: list[tuple[str, m.Role, str]] = [
        *[("actor-0", "actor", "actor-0"), ("actor", "actor", "actor-host-0"), ("teacher", "teacher", "teacher-h-0")],
        *[
            ("learner", "learner", "learner-0"),
            ("launcher", "launcher", "launcher"),
            ("joiner", "launcher", "onlooker"),
        ],
    ]
    for owner, role, name in roles:
        with dealer(server, load_client_keys(folder, owner)) as peer:
            send_frames(peer, encode(m.Hello(role, name, "first", RUN, VOCAB)))
            events = poll_until(server, lambda: bool(peer.poll(0)))
            assert events == [PeerUp(role, name, "first", "")]
            assert receive_frames(peer) is not None
    assert server.refused == {}


def test_large_arrays_arrive_as_they_were_sent(server: PeerServer, folder: Path) -> None:
    with dealer(server, load_client_keys(folder, "actor-0")) as peer:
        send_frames(peer, encode(HELLO))
        send_frames(peer, encode(SEGMENT, ARRAYS))
        events: list[Event] = []
        while not any(isinstance(event, FromPeer) for event in events):
            events += server.poll(1.0)
        (event,) = (event for event in events if isinstance(event, FromPeer))
        for got, sent in zip(event.received.arrays, ARRAYS, strict=True):
            np.testing.assert_array_equal(got, sent)


def test_what_is_on_the_wire_cannot_be_read(folder: Path) -> None:
    """A relay in between sees the rollout's id in plain text without keys, and nowhere with them."""
    assert b"train-0-0-0" in bytes_through_a_relay(None, None)
    seen = bytes_through_a_relay(load_server_keys(folder), load_client_keys(folder, "actor-0"))
    assert b"train-0-0-0" not in seen
    assert ARRAYS[0][:16].tobytes() not in seen


def bytes_through_a_relay(server_keys: ServerKeys | None, client_keys: ClientKeys | None) -> bytes:
    with serving(server_keys) as server, socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = server.address.removeprefix("tcp://").split(":")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        peer = new_socket(context, zmq.DEALER)
        if client_keys is not None:
            encrypt_client(peer, client_keys)
        peer.connect("tcp://{}:{}".format(*listener.getsockname()))
        send_frames(peer, encode(HELLO))
        send_frames(peer, encode(SEGMENT, ARRAYS))
        seen = bytearray()
        near, _ = listener.accept()
        with near, socket.create_connection((host, int(port))) as far:
            near.setblocking(False)
            far.setblocking(False)
            for _ in range(POLLS):
                for source, target in ((near, far), (far, near)):
                    try:
                        chunk = source.recv(1 << 16)
                    except BlockingIOError:
                        continue
                    seen += chunk
                    target.setblocking(True)
                    target.sendall(chunk)
                    target.setblocking(False)
                if any(isinstance(event, FromPeer) for event in server.poll(0.001)):
                    break
            else:
                raise AssertionError("the segment never arrived")
        context.destroy(linger=0)
    return bytes(seen)


def test_a_key_of_one_role_is_no_key_for_another(server: PeerServer, folder: Path) -> None:
    learner = m.Hello("learner", "learner-0", "first", RUN, VOCAB)
    error = outcome_of_connecting(server, Client(server.address, learner, keys=load_client_keys(folder, "actor-0")))
    assert isinstance(error, HandshakeRefused)
    assert (error.refused.code, error.refused.got) == ("key", "the key of actor-0 for learner learner-0")
    assert server.refused == {"key": 1}
    assert server.peers == ()


THEFTS: list[tuple[str, m.Role, str]] = [
    ("actor", "actor", "actor-0"),
    ("actor-1", "actor", "actor-0"),
    ("teacher", "teacher", "teacher-0"),
    ("joiner", "launcher", "launcher"),
    ("actor-1", "learner", "learner-0"),
]
"""A key that a host has, and whom its holder tries to be."""


@pytest.mark.parametrize(("owner", "role", "name"), THEFTS)
@pytest.mark.parametrize("owner_is_there", [False, True])
def test_nobody_becomes_another_with_a_key_of_his_own(
    tmp_path: Path, owner: str, role: m.Role, name: str, owner_is_there: bool
) -> None:
    """Neither before its owner comes, which would then be turned away, nor as a later process of it, which would push
    it out: one refused worker of the run's own ends the run."""
    make_keys(tmp_path / "keys", ["actor-0", "actor-1", "teacher-0"])
    folder = tmp_path / "keys"
    rightful = {"learner-0": "learner"}.get(name, name)
    hello = m.Hello(role, name, "rightful", RUN, VOCAB)
    with serving(load_server_keys(folder)) as server:
        thief = m.Hello(role, name, "thief", RUN, VOCAB)
        with dealer(server, load_client_keys(folder, rightful)) as peer:
            if owner_is_there:
                send_frames(peer, encode(hello))
                poll_until(server, lambda: bool(peer.poll(0)))
            error = outcome_of_connecting(server, Client(server.address, thief, keys=load_client_keys(folder, owner)))
            assert isinstance(error, HandshakeRefused)
            assert (error.refused.code, error.refused.got) == ("key", f"the key of {owner} for {role} {name}")
            send_frames(peer, encode(hello))
            poll_until(server, lambda: server.peers == ((role, name),) and bool(peer.poll(0)))
            send_frames(peer, encode(m.Heartbeat(None, {})))
            beats = poll_until(server, lambda: server.peers == ((role, name),))
            assert not [event for event in beats if isinstance(event, PeerDown)]
    assert server.refused == {"key": 1}


def test_the_vocabulary_is_not_that_of_the_first_at_the_door(tmp_path: Path) -> None:
    """The first at the door has a false vocabulary, and the run's own are let in all the same."""
    make_keys(tmp_path / "keys", ["actor-0", "teacher-0"])
    folder = tmp_path / "keys"
    server = PeerServer(
        "tcp://127.0.0.1:0",
        run_id=RUN,
        vocab_fingerprint=None,
        heartbeat_s=1.0,
        peer_timeout_s=60.0,
        keys=load_server_keys(folder),
    )
    try:
        with (
            dealer(server, load_client_keys(folder, "teacher")) as liar,
            dealer(server, load_client_keys(folder, "learner")) as learner,
            dealer(server, load_client_keys(folder, "actor-0")) as actor,
        ):
            send_frames(liar, encode(m.Hello("teacher", "teacher-host-0", "first", RUN, "cd" * 32)))
            poll_until(server, lambda: bool(liar.poll(0)))
            send_frames(learner, encode(m.Hello("learner", "learner-0", "first", RUN, VOCAB)))
            events = poll_until(server, lambda: bool(learner.poll(0)))
            assert [type(event) for event in events] == [PeerDown, PeerUp], (
                "who misreads is put out, the learner let in"
            )
            send_frames(actor, encode(HELLO))
            poll_until(server, lambda: bool(actor.poll(0)))
            assert server.peers == (("learner", "learner-0"), ("actor", "actor-0"))
            assert server.refused == {}
            send_frames(liar, encode(m.Hello("teacher", "teacher-host-0", "second", RUN, "cd" * 32)))
            poll_until(server, lambda: server.refused == {"vocab_fingerprint": 1})
    finally:
        server.close(linger_s=0)


def test_a_stranger_s_key_gets_nothing_is_counted_and_its_owner_told_at_once(
    server: PeerServer, tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(tmp_path / "others", ["actor-0"])
    others = load_client_keys(tmp_path / "others", "actor-0")
    keys = ClientKeys(others.public, others.secret, load_server_keys(folder).public)
    error = outcome_of_connecting(server, Client(server.address, HELLO, keys=keys, connect_timeout_s=PATIENCE_S))
    assert isinstance(error, HandshakeRefused)
    assert error.refused.code == "key"
    poll_until(server, lambda: server.refused.get("wrong_key", 0) >= 1)
    assert set(server.refused) == {"wrong_key"}
    assert re.search(r"refused \(wrong_key\) a connection from (127\.0\.0\.1:|an unknown address)", caplog.text)
    assert server.peers == ()


@pytest.mark.parametrize(("who", "fault"), [("plain", "no_key"), ("another_run", "wrong_key"), ("http", "no_key")])
def test_who_comes_without_the_right_key_gets_nothing_and_is_counted(
    server: PeerServer, tmp_path: Path, who: str, fault: str
) -> None:
    if who == "http":
        host, port = server.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as tcp:
            tcp.sendall(b"GET / HTTP/1.1\r\nHost: buffer\r\n\r\n" + bytes(64))
            poll_until(server, lambda: server.refused == {fault: 1})
        return
    make_keys(tmp_path / "others", ["actor-0"])
    with dealer(server, None if who == "plain" else load_client_keys(tmp_path / "others", "actor-0")) as peer:
        send_frames(peer, encode(HELLO))
        poll_until(server, lambda: server.refused == {fault: 1})
        assert peer.poll(0) == 0
    assert server.poll(0.05) == []
    assert server.refused == {fault: 1}
    assert server.peers == ()


@pytest.mark.parametrize("client_encrypts", [False, True])
def test_a_client_that_cannot_come_in_says_what_may_be_wrong(folder: Path, client_encrypts: bool) -> None:
    server_keys, client_keys = load_server_keys(folder), load_client_keys(folder, "actor-0")
    with serving(None if client_encrypts else server_keys) as server:
        keys = client_keys if client_encrypts else None
        error = outcome_of_connecting(server, Client(server.address, HELLO, keys=keys, connect_timeout_s=1.5))
        assert isinstance(error, ConnectTimeout)
        assert "one end encrypts and the other does not" in str(error)
        assert set(server.refused) == {"failed_handshake" if client_encrypts else "no_key"}


def test_a_flood_of_strangers_fills_no_log_and_keeps_nobody_out(
    server: PeerServer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with dealer(server, load_client_keys(folder, "actor-0")) as peer:
        strangers = [new_socket(context, zmq.DEALER) for _ in range(60)]
        for n, stranger in enumerate(strangers):
            stranger.set(zmq.RECONNECT_IVL, 60_000)  # each tries once
            stranger.connect(server.address)
            if n == 30:
                send_frames(peer, encode(HELLO))
        poll_until(server, lambda: server.refused == {"no_key": 60} and bool(peer.poll(0)))
    context.destroy(linger=0)
    assert server.peers == (("actor", "actor-0"),)
    assert len([record for record in caplog.records if "no_key" in record.message]) <= 5


def test_a_reconnecting_client_resumes_its_session(folder: Path) -> None:
    """The buffer restarts on the same port with the same keys: the client comes back by itself."""
    keys = load_server_keys(folder)
    with serving(keys, peer_timeout_s=0.4) as server:
        address = server.address
        client = Client(address, HELLO, keys=load_client_keys(folder, "actor-0"), reconnect_timeout_s=PATIENCE_S)
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(client.connect)
            poll_until(server, connecting.done)
    again = PeerServer(
        address, run_id=RUN, vocab_fingerprint=VOCAB, heartbeat_s=0.1, peer_timeout_s=PATIENCE_S, keys=keys
    )
    try:
        events = poll_until(again, lambda: client.connects_total == 2)
        assert events[0] == PeerUp("actor", "actor-0", "first", "")
    finally:
        client.close("test over")
        again.close(linger_s=0)


def test_no_key_is_in_any_log(server: PeerServer, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    actor = load_client_keys(folder, "actor-0")
    client = Client(server.address, HELLO, keys=actor)
    assert outcome_of_connecting(server, client) is None
    for key in (actor.public, actor.secret, actor.server, load_server_keys(folder).secret):
        assert key.decode() not in caplog.text + repr(client) + repr(server)
