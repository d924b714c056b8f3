"""The TCP connections under the buffer's ROUTER: who fails the handshake, and who sends without end.

ROUTER shows whole messages of peers that finished the handshake, and nothing else. Both of what it hides is a way to do
harm in silence, so both is watched here, counted by reason and logged at a bounded rate with the address:

    a handshake that fails      from ZeroMQ's monitor: no key, a wrong key, or not ZeroMQ at all
    a message without an end    ZeroMQ keeps the parts of an unfinished multipart in memory, without a limit of its own;
                                the kernel says how many bytes came in on a connection, we know how many of them we have
                                read, and a connection that is too far ahead of us is cut

The second needs Linux (TCP_INFO). One thread.
"""

from __future__ import annotations

import contextlib
import os
import socket as stdlib_socket
import struct
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import zmq

from protocol.monitor import HANDSHAKE_EVENTS, Monitor
from protocol.ratelimit import RateLimitedLog

ConnectionFault: TypeAlias = Literal["no_key", "wrong_key", "failed_handshake", "endless_message"]

MAX_UNREAD_BYTES: Final = 512 << 20
"""Default bound of what one connection has sent and we have not read: twice the largest message to the buffer."""
CHECK_S: Final = 0.1
"""How often that is looked at: at 1 GB/s 100 MB more arrive meanwhile."""
FRAME_OVERHEAD_BYTES: Final = 42
"""The most that ZMTP (9) and CURVE (33) add to a frame. Assumed of all, so that what was read is never too little."""

_EVENTS: Final = HANDSHAKE_EVENTS | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_SOURCE_FD: Final = int(zmq.SRCFD)
_TCP_INFO_BYTES_RECEIVED_AT: Final = 128
"""Offset of tcpi_bytes_received (u64) in struct tcp_info, part of Linux's stable interface."""

_Address: TypeAlias = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class _Connection:
    address: _Address | None = None
    """None: it was closed again before we could ask."""
    heard: bool = False
    """A message came from it, after ZeroMQ told us of it."""
    read_bytes: int = 0


class Connections:
    """Watches `socket`, a ROUTER that is not bound yet. `encrypted`: a peer without a key is one that lacks it."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        *,
        encrypted: bool,
        log: RateLimitedLog,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encrypted = encrypted
        self._no_handshake: ConnectionFault = "no_key" if encrypted else "failed_handshake"
        self._log = log
        self._max_unread_bytes = max_unread_bytes
        self._clock = clock
        self._open: dict[int, _Connection] = {}  # by file descriptor
        self._failing: ConnectionFault | None = None
        self._unheard = 0
        """Handshakes that succeeded, less connections known to be theirs: ZeroMQ does not say whose they are."""
        self._checked_s = -CHECK_S
        self.refused: dict[ConnectionFault, int] = {}
        """Connections turned away or cut, by reason."""
        self._monitor = Monitor(socket, _EVENTS)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """To be polled along with the watched one."""
        return self._monitor.socket

    def close(self) -> None:
        """Before the watched socket is closed."""
        self._monitor.close()

    def read(self, source: zmq.Frame, n_bytes: int, n_frames: int) -> None:
        """A whole message was read; `source` is one of its frames."""
        connection = self._open.setdefault(int(source.get(_SOURCE_FD)), _Connection())
        connection.read_bytes += n_bytes + n_frames * FRAME_OVERHEAD_BYTES
        if connection.address is not None and not connection.heard:
            connection.heard = True
            self._unheard -= 1

    def watch(self) -> None:
        """Take what ZeroMQ tells; look for connections that are too far ahead."""
        for event, value in self._monitor.events():
            self._take(event, value)
        if self._unheard < 0:  # then a connection that ended without a word had not come through the handshake
            self._unheard += 1
            self._refuse(self._no_handshake, None)
        now_s = self._clock()
        if sys.platform == "linux" and now_s - self._checked_s >= CHECK_S:
            self._checked_s = now_s
            for fd, connection in self._open.items():
                self._check(fd, connection)

    def _take(self, event: int, value: int) -> None:
        """`value`: file descriptor, protocol error or ZAP status. A failure is followed by its connection's end."""
        match event:
            case zmq.EVENT_ACCEPTED:
                self._open.setdefault(value, _Connection()).address = _peer_address(value)
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._unheard += 1
            case zmq.EVENT_DISCONNECTED:
                self._ended(self._open.pop(value, _Connection()))
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._failing = "wrong_key"
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if self._encrypted and value == _NOT_OUR_KEY:
                self._failing = "wrong_key"
            case _:
                self._failing = self._no_handshake

    def _ended(self, connection: _Connection) -> None:
        fault, self._failing = self._failing, None
        if fault is None and not connection.heard:
            if self._unheard > 0:  # as good as certainly its own, and what it sent is still to be read
                self._unheard -= 1
            else:
                fault = self._no_handshake
        if fault is not None:
            self._refuse(fault, connection.address)

    def _check(self, fd: int, connection: _Connection) -> None:
        if connection.address is None:
            return
        with _tcp_socket(fd) as tcp:
            if tcp is None or tcp.getpeername() != connection.address:
                return  # closed, perhaps reused; ZeroMQ is about to tell us
            info = tcp.getsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_INFO, 256)
            (received_bytes,) = struct.unpack_from("=Q", info, _TCP_INFO_BYTES_RECEIVED_AT)
            unread_bytes = received_bytes - connection.read_bytes
            if unread_bytes < 0:  # the assumed overhead is more than the real one: that gives nobody a credit
                connection.read_bytes = received_bytes
            elif unread_bytes > self._max_unread_bytes:
                tcp.shutdown(stdlib_socket.SHUT_RDWR)  # ZeroMQ drops the connection, and the parts it has of a message
                connection.read_bytes = received_bytes
                self._refuse("endless_message", connection.address)

    def _refuse(self, fault: ConnectionFault, address: _Address | None) -> None:
        self.refused[fault] = self.refused.get(fault, 0) + 1
        who = "an address not known, for it hung up at once" if address is None else f"{address[0]}:{address[1]}"
        self._log.warning(f"refused ({fault}) a connection from {who}: {_MEANING[fault]}")


_NOT_OUR_KEY: Final = zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
_MEANING: Final[dict[ConnectionFault, str]] = {
    "no_key": "it does not encrypt; the run's folder `keys` is not on that host, or it is no peer of ours",
    "wrong_key": "its key is not of this run, or it takes us for another run",
    "failed_handshake": "it encrypts and we do not, or it does not speak ZeroMQ, or hung up",
    "endless_message": "it sent more than fits a message without ending it; cut",
}


def _peer_address(fd: int) -> _Address | None:
    with _tcp_socket(fd) as tcp:
        return None if tcp is None else tcp.getpeername()


@contextlib.contextmanager
def _tcp_socket(fd: int) -> Generator[stdlib_socket.socket | None]:
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
