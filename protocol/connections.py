"""The TCP connections under the buffer's ROUTER: who fails the handshake, and who sends without end.

ROUTER shows whole messages of peers that finished the handshake, and nothing else. Both of what it hides is a way to do
harm in silence, so both is watched here, counted by reason and logged at a bounded rate with the address:

    a handshake that fails      from ZeroMQ's monitor: no key, a wrong key, or not ZeroMQ at all
    a message without an end    ZeroMQ keeps the parts of an unfinished multipart in memory, without a limit of its own;
                                the kernel says how many bytes came in on a connection, we know how many of them we have
                                read, and a connection that is too far ahead of us is cut

A frame takes 64 bytes of memory, and without encryption an empty one is two bytes on the wire; how many frames an
unfinished message has ZeroMQ tells nobody. So bytes count, and who has not said Hello, which is short, may be ahead by
little: all of them together by MAX_STRANGERS_UNREAD_BYTES. The second needs Linux (TCP_INFO). One thread.
"""

from __future__ import annotations

import contextlib
import math
import socket as stdlib_socket
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import zmq

from protocol.monitor import HANDSHAKE_EVENTS, Monitor, bytes_received, tcp_socket
from protocol.ratelimit import RateLimitedLog

ConnectionFault: TypeAlias = Literal["no_key", "wrong_key", "failed_handshake", "endless_message", "no_hello"]

MAX_UNREAD_BYTES: Final = 512 << 20
"""Default bound of what one connection has sent and we have not read: twice the largest message to the buffer."""
MAX_STRANGERS_UNREAD_BYTES: Final = 16 << 20
"""What all connections whose peer was not let in yet have sent and we have not read; at worst 0.6 GB of memory."""
CHECK_S: Final = 0.1
"""How often that is looked at: at 1 GB/s 100 MB more arrive meanwhile."""
FRAME_OVERHEAD_BYTES: Final = 42
"""The most that ZMTP (9) and CURVE (33) add to a frame. Assumed of all, so that what was read is never too little."""

_EVENTS: Final = HANDSHAKE_EVENTS | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_SOURCE_FD: Final = int(zmq.SRCFD)

_Address: TypeAlias = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class _Connection:
    address: _Address | None = None
    """None: it was closed again before we could ask."""
    heard: bool = False
    """A message came from it, after ZeroMQ told us of it."""
    let_in: bool = False
    cut: bool = False
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
        max_strangers_unread_bytes: int = MAX_STRANGERS_UNREAD_BYTES,
        known_from_s: float = -math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Before `known_from_s` strangers may be peers of the process before this one, in the middle of a message."""
        self._encrypted = encrypted
        self._no_handshake: ConnectionFault = "no_key" if encrypted else "failed_handshake"
        self._log = log
        self._max_unread_bytes = max_unread_bytes
        self._max_strangers_unread_bytes = max_strangers_unread_bytes
        self._known_from_s = known_from_s
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

    def let_in(self, source: zmq.Frame) -> None:
        """The sender of this frame is a peer: it may send large messages."""
        connection = self._open.get(int(source.get(_SOURCE_FD)))
        if connection is not None:
            connection.let_in = True

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
            self._check_all(now_s)

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

    def _check_all(self, now_s: float) -> None:
        strangers: list[tuple[int, int]] = []
        for fd, connection in self._open.items():
            unread_bytes = self._unread_bytes(fd, connection)
            if unread_bytes > self._max_unread_bytes:
                self._cut(fd, connection, "endless_message")
            elif not connection.let_in:
                strangers.append((unread_bytes, fd))
        if now_s < self._known_from_s:
            return
        together_bytes = sum(unread_bytes for unread_bytes, _ in strangers)
        for unread_bytes, fd in sorted(strangers, reverse=True):
            if together_bytes <= self._max_strangers_unread_bytes:
                break
            self._cut(fd, self._open[fd], "no_hello")
            together_bytes -= unread_bytes

    def _unread_bytes(self, fd: int, connection: _Connection) -> int:
        """Of what this connection has brought; 0 when it is closed, perhaps reused, and ZeroMQ is about to say so."""
        with _connected(fd, connection) as tcp:
            if tcp is None:
                return 0
            received_bytes = bytes_received(tcp)
        # The assumed overhead may be more than the real one: that gives nobody a credit.
        connection.read_bytes = min(connection.read_bytes, received_bytes)
        return received_bytes - connection.read_bytes

    def _cut(self, fd: int, connection: _Connection, fault: ConnectionFault) -> None:
        with _connected(fd, connection) as tcp:
            if tcp is not None:
                tcp.shutdown(stdlib_socket.SHUT_RDWR)  # ZeroMQ drops the connection, and the parts it has of a message
        connection.cut = True
        self._refuse(fault, connection.address)

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
    "no_hello": "it sent much and did not say who it is; cut",
}


def _peer_address(fd: int) -> _Address | None:
    with tcp_socket(fd) as tcp:
        return None if tcp is None else tcp.getpeername()


@contextlib.contextmanager
def _connected(fd: int, connection: _Connection) -> Generator[stdlib_socket.socket | None]:
    """None when it is not, or no longer, this connection that has the descriptor, or it was cut."""
    if connection.address is None or connection.cut:
        yield None
        return
    with tcp_socket(fd) as tcp:
        yield tcp if tcp is not None and tcp.getpeername() == connection.address else None
