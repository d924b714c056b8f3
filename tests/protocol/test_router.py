"""What a hostile or broken peer can do to the server's memory and log, over real sockets."""

from __future__ import annotations

import logging
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import zmq

from stillhouse.protocol import messages as m
from stillhouse.protocol import router as router_module
from stillhouse.protocol.codec import MAX_FRAME_BYTES, MAX_FRAMES, decode, encode
from stillhouse.protocol.errors import MessageTooLarge
from stillhouse.protocol.ratelimit import RateLimitedLog
from stillhouse.protocol.router import WAITING_MESSAGES, Router
from stillhouse.protocol.sockets import FromRouter, new_socket, send_frames
from tests.patience import PATIENCE_S, SLOWNESS, Limit

MAX_UNREAD_BYTES = 8 << 20
POLLS = int(PATIENCE_S / 0.02)
"""Of 20 ms: how long a test waits for what must come."""


@pytest.fixture
def router(request: pytest.FixtureRequest) -> Iterator[Router]:
    """Its bound of unread bytes: the test's parameter, if it has one."""
    max_unread_bytes: int = getattr(request, "param", MAX_UNREAD_BYTES)
    log = RateLimitedLog(logging.getLogger(__name__))
    router = Router("tcp://127.0.0.1:0", keys=None, log=log, max_unread_bytes=max_unread_bytes)
    yield router
    router.close(linger_s=0)


@pytest.fixture
def dealer(router: Router) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = new_socket(context, zmq.DEALER)
    socket.connect(router.address)
    yield socket
    context.destroy(linger=0)


def wait_until(router: Router, true: Callable[[], bool]) -> None:
    for _ in range(POLLS):
        if true():
            return
        router.wait(0.02)
    raise AssertionError(f"it never came: {router.refused}")


def receive(router: Router) -> FromRouter:
    for _ in range(POLLS):
        if (received := router.receive()) is not None:
            return received
        router.wait(0.02)
    raise AssertionError("nothing came")


def zmtp_connection(router: Router) -> socket.socket:
    """A DEALER made by hand, for what no ZeroMQ library would send. The handshake of RFC 23, without encryption."""
    host, port = router.address.removeprefix("tcp://").split(":")
    tcp = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    tcp.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
    greeting = b""
    while len(greeting) < 64:  # it comes in pieces; MSG_WAITALL does not wait on a socket with a timeout
        piece = tcp.recv(64 - len(greeting))
        assert piece, "closed in the handshake"
        greeting += piece
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    tcp.sendall(bytes([4, len(ready)]) + ready)
    return tcp


def send_parts(tcp: socket.socket, at_most_bytes: int) -> int:
    """Frames each of which says that another one follows, until cut. Returns how many bytes went out."""
    frame = b"\x03" + struct.pack(">Q", 1 << 16) + bytes(1 << 16)
    sent_bytes = 0
    tcp.settimeout(2.0 * SLOWNESS)  # the other end may read no more, and not hang up
    while sent_bytes < at_most_bytes:
        try:
            tcp.sendall(frame)
        except OSError:
            break
        sent_bytes += len(frame)
    return sent_bytes


def send_empty_parts(tcp: socket.socket, at_most_bytes: int) -> int:
    """The same with frames of no bytes: two bytes each, for which ZeroMQ takes 64."""
    frames = b"\x01\x00" * (1 << 15)
    sent_bytes = 0
    tcp.settimeout(2.0 * SLOWNESS)
    while sent_bytes < at_most_bytes:
        try:
            tcp.sendall(frames)
        except OSError:
            break
        sent_bytes += len(frames)
    return sent_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how many bytes a connection has brought")
def test_a_message_without_an_end_is_cut_and_the_others_go_on(
    router: Router, dealer: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with zmtp_connection(router) as flood, ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(send_parts, flood, 100 * MAX_UNREAD_BYTES)
        wait_until(router, flooding.done)
        assert flooding.result() < 100 * MAX_UNREAD_BYTES, "nobody stopped it"
        wait_until(router, lambda: bool(router.refused))
    assert router.refused == {"endless_message": 1}
    assert "refused (endless_message) a connection from 127.0.0.1:" in caplog.text
    send_frames(dealer, [b"hello"])
    assert receive(router).frames == [b"hello"]
    assert router.receive() is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how many bytes a connection has brought")
def test_who_has_not_said_who_it_is_is_cut_much_sooner_whether_alone_or_many(caplog: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLog(logging.getLogger(__name__))
    router = Router("tcp://127.0.0.1:0", keys=None, log=log, max_strangers_unread_bytes=1 << 20)
    n_strangers = 4
    try:
        with ExitStack() as stack, ThreadPoolExecutor(n_strangers) as pool:
            floods = [stack.enter_context(zmtp_connection(router)) for _ in range(n_strangers)]
            floodings = [pool.submit(send_empty_parts, flood, 100 << 20) for flood in floods]
            wait_until(router, lambda: all(flooding.done() for flooding in floodings))
            assert max(flooding.result() for flooding in floodings) < 100 << 20, "nobody stopped it"
        assert router.refused == {"no_hello": n_strangers}
        assert "refused (no_hello) a connection from 127.0.0.1:" in caplog.text
    finally:
        router.close(linger_s=0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how many bytes a connection has brought")
def test_who_was_let_in_may_send_large_messages() -> None:
    log = RateLimitedLog(logging.getLogger(__name__))
    router = Router("tcp://127.0.0.1:0", keys=None, log=log, max_strangers_unread_bytes=1 << 20)
    part = b"\x03" + struct.pack(">Q", 2 << 20) + bytes(2 << 20)
    try:
        with zmtp_connection(router) as peer, zmtp_connection(router) as stranger:
            peer.sendall(b"\x00\x05hello")
            router.let_in(receive(router).source)
            peer.sendall(part)
            stranger.sendall(part)
            wait_until(router, lambda: router.refused == {"no_hello": 1})
            peer.sendall(b"\x00\x00")
            assert [len(frame) for frame in receive(router).frames] == [2 << 20, 0]
        assert router.refused == {"no_hello": 1}
    finally:
        router.close(linger_s=0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how many bytes a connection has brought")
def test_of_many_peers_each_is_looked_at_less_often_but_strangers_are_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "LOOKS_PER_S", 10)
    now_s, looks = 0.0, Counter[bool]()
    log = RateLimitedLog(logging.getLogger(__name__))
    router = Router("tcp://127.0.0.1:0", keys=None, log=log, clock=lambda: now_s)
    counted = router._unread_bytes  # pyright: ignore[reportPrivateUsage]

    def look(fd: int, connection: Any) -> int:
        looks[connection.let_in] += 1
        return counted(fd, connection)

    monkeypatch.setattr(router, "_unread_bytes", look)
    try:
        with ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(zmtp_connection(router)).sendall(b"\x00\x05hello")
                router.let_in(receive(router).source)
            stack.enter_context(zmtp_connection(router))
            limit = Limit()
            while not looks[False]:  # until ZeroMQ has said that the stranger is there
                assert not limit.passed
                now_s += 0.125
                router.wait(0.02)
            looks.clear()
            for _ in range(100):
                now_s += 0.125
                router.wait(0.0)
        assert looks == {False: 100, True: 4 * 25}, "the stranger at each check, each of 4 peers every 0.5 s"
    finally:
        router.close(linger_s=0)


def test_who_sends_much_while_the_server_is_busy_is_held_up_and_not_cut(
    router: Router, dealer: zmq.Socket[bytes]
) -> None:
    n_messages, frame = 8 * WAITING_MESSAGES, bytes(1 << 13)  # four times what may be unread
    dealer.set(zmq.SNDHWM, 0)
    for _ in range(n_messages):
        send_frames(dealer, [frame, frame])
    for _ in range(20):
        router.wait(0.02)  # time to look at the connections, but nothing is read
    assert [len(receive(router).frames) for _ in range(n_messages)] == [2] * n_messages


def test_long_use_of_a_connection_is_no_flood(router: Router, dealer: zmq.Socket[bytes]) -> None:
    for _ in range(10):
        for _ in range(100):
            send_frames(dealer, [bytes(1 << 14)] * 2)
        for _ in range(100):
            receive(router)
        router.wait(0.1)
    assert router.refused == {}


def test_more_frames_than_a_message_may_have_are_refused_without_keeping_them(
    router: Router, dealer: zmq.Socket[bytes]
) -> None:
    send_frames(dealer, [b""] * (2 * MAX_FRAMES))
    send_frames(dealer, encode(m.SnapshotWanted()))
    frames = receive(router).frames
    assert len(frames) < MAX_FRAMES + 10
    with pytest.raises(MessageTooLarge):
        decode(frames)
    assert decode(receive(router).frames).message == m.SnapshotWanted()


@pytest.mark.parametrize("router", [router_module.MAX_UNREAD_BYTES], indirect=True)
def test_a_frame_above_the_limit_is_received_so_that_its_sender_can_be_told(
    router: Router, dealer: zmq.Socket[bytes]
) -> None:
    send_frames(dealer, [b"hello"])
    router.let_in(receive(router).source)
    send_frames(dealer, [bytes(MAX_FRAME_BYTES + 1)])
    received = receive(router)
    with pytest.raises(MessageTooLarge):
        decode(received.frames)


@pytest.mark.parametrize("text", ["GET / HTTP/1.1\r\n\r\n", "\x00\x01\x02", "\x16\x03\x01\x02\x00"])
def test_who_hangs_up_in_the_handshake_is_counted_and_logged_with_its_address(
    router: Router, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = router.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as tcp:
        # Who has hung up before the router looks has no address any more.
        wait_until(router, lambda: bool(router._open))  # pyright: ignore[reportPrivateUsage]
        tcp.sendall(b"\xff" + text.encode("latin-1"))
    wait_until(router, lambda: router.refused == {"failed_handshake": 1})
    assert "refused (failed_handshake) a connection from 127.0.0.1:" in caplog.text


def test_peers_that_come_and_go_are_no_failures(router: Router) -> None:
    for _ in range(3):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        peers = [new_socket(context, zmq.DEALER) for _ in range(20)]
        for peer in peers:
            peer.connect(router.address)
            send_frames(peer, [b"hello"])
        for _ in range(20):
            receive(router)
        context.destroy(linger=0)
        router.wait(0.05)
    for _ in range(5):
        router.wait(0.02)
    assert router.refused == {}
