"""The TCP connections under a ZeroMQ socket: its monitor's events, and what the kernel knows about them."""

from __future__ import annotations

import contextlib
import os
import socket as stdlib_socket
import struct
import sys
from collections.abc import Generator, Iterator
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

HANDSHAKE_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_BYTES_RECEIVED_AT: Final = 128
"""Offset of tcpi_bytes_received (u64) in struct tcp_info, part of Linux's stable interface."""


class Monitor:
    """The events of one socket. Make it before the socket binds or connects; only the socket's thread may use it."""

    def __init__(self, watched: zmq.Socket[bytes], events: int) -> None:
        self._watched = watched
        self.socket: Final = watched.context.socket(zmq.PAIR)
        """Readable when there are events: add it to a poller."""
        self.socket.linger = 0
        self.socket.set(zmq.RCVHWM, 0)  # ZeroMQ's I/O thread must never wait for us to read
        endpoint = f"inproc://monitor-{id(self)}"
        watched.monitor(endpoint, events)
        self.socket.connect(endpoint)

    def events(self) -> Iterator[tuple[int, int]]:
        """(event, value) of everything that happened since the last call."""
        with contextlib.suppress(zmq.Again):  # raised when there is nothing more to read
            while True:
                event = recv_monitor_message(self.socket, zmq.NOBLOCK)
                yield event["event"], event["value"]

    def close(self) -> None:
        """Call it before the watched socket is closed. Idempotent."""
        if not self.socket.closed:
            self._watched.disable_monitor()
            self.socket.close()


class Reconnects:
    """Notices that ZeroMQ has replaced a client's connection: what was under way in the former one is lost, in both
    directions. Make it before the socket connects."""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        _keep_alive(watched)
        self._monitor = Monitor(watched, zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket: Final = self._monitor.socket
        """Readable when there may be news: add it to a poller."""
        self._connections = 0

    @property
    def total(self) -> int:
        return max(0, self._connections - 1)

    def news(self) -> bool:
        """Whether it happened since the last call."""
        before = self.total
        self._connections += sum(1 for _ in self._monitor.events())
        return self.total > before

    def close(self) -> None:
        """Call it before the watched socket is closed. Idempotent."""
        self._monitor.close()


def _keep_alive(watched: zmq.Socket[bytes]) -> None:
    """Have the kernel ask now and then whether the other end is there: a router may forget a silent connection, and a
    host that is gone says nothing. After about 20 s the connection then counts as broken."""
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 10),
        (zmq.TCP_KEEPALIVE_INTVL, 3),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        watched.set(option, value)


class DoorReport:
    """A client's view of its connection: does the other end refuse the handshake, and do bytes arrive?"""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self._monitor = Monitor(watched, HANDSHAKE_EVENTS | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._failed = 0
        self._fd: int | None = None
        self._arrived_bytes = 0
        self.unknown_key = False
        """The other end said that it does not know our key."""

    def read(self) -> None:
        for event, value in self._monitor.events():
            if event in (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED):
                self._fd = value if event == zmq.EVENT_CONNECTED else None
                continue
            self._failed += event != zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.unknown_key |= event == zmq.EVENT_HANDSHAKE_FAILED_AUTH

    def more_arrived(self) -> bool:
        """Whether the connection has received bytes since the last call. Bytes of unfinished messages count, although
        ZeroMQ shows a message only when it is whole. Always False where the kernel does not say (not Linux)."""
        self.read()
        before, self._arrived_bytes = self._arrived_bytes, 0
        if self._fd is not None and sys.platform == "linux":
            with tcp_socket(self._fd) as tcp:
                self._arrived_bytes = 0 if tcp is None else bytes_received(tcp)
        return self._arrived_bytes > before

    @property
    def complaint(self) -> str:
        """A hint at what may be wrong, to be appended to an error; empty when no handshake failed."""
        if not self._failed:
            return ""
        return (
            f"; something answers there, but {self._failed} handshakes failed: one end encrypts and the other does "
            "not, or the folder `keys` is another run's"
        )

    def close(self) -> None:
        self._monitor.close()


def bytes_received(tcp: stdlib_socket.socket) -> int:
    """All bytes that have arrived on the connection so far, whether ZeroMQ has read them or not. Linux only."""
    info = tcp.getsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_INFO, 256)
    (n_bytes,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)
    return n_bytes


@contextlib.contextmanager
def tcp_socket(fd: int) -> Generator[stdlib_socket.socket | None]:
    """A second handle on one of ZeroMQ's sockets; None when it is closed, its peer is gone, or it is not TCP."""
    try:
        handle = stdlib_socket.socket(fileno=os.dup(fd))
    except OSError:
        yield None
        return
    with handle:
        yield handle if _is_connected_tcp(handle) else None


def _is_connected_tcp(handle: stdlib_socket.socket) -> bool:
    try:
        handle.getpeername()
    except OSError:
        return False
    return handle.family in (stdlib_socket.AF_INET, stdlib_socket.AF_INET6)
