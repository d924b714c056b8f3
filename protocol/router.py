"""A ROUTER socket with its context and its encryption, which also guards against the connections that it hides.

ROUTER shows whole messages of peers that finished the handshake, and nothing else. Harm can be done silently in both
things it hides, so both are watched, counted by reason, and logged with the address at a bounded rate:

    a failed handshake          reported by ZeroMQ's monitor: no key, a wrong key, or not ZeroMQ at all
    a message without an end    ZeroMQ keeps the parts of an unfinished multipart in memory, without a limit. The kernel
                                says how many bytes arrived on a connection, and we know how many we have read; a
                                connection with too many unread bytes is cut. Linux only (TCP_INFO).

A frame takes 64 bytes of memory, but an empty one without encryption only two bytes on the wire, and ZeroMQ does not
say how many frames an unfinished message has. So before its Hello, which is short, a connection may have few unread
bytes: MAX_STRANGERS_UNREAD_BYTES for all such connections together. Used by one thread.
"""

from __future__ import annotations

import contextlib
import math
import socket as stdlib_socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import zmq

from stillhouse.protocol.codec import Frame
from stillhouse.protocol.errors import AddressUnusable
from stillhouse.protocol.keys import Gatekeeper, Owner, ServerKeys, encrypt_server, owner_of
from stillhouse.protocol.monitor import HANDSHAKE_EVENTS, Monitor, bytes_received, tcp_socket
from stillhouse.protocol.ratelimit import RateLimitedLog
from stillhouse.protocol.sockets import (
    CHECKSUM_BYTES,
    NO_WAIT_MORE,
    FromRouter,
    new_socket,
    receive_from_router,
    send_frames,
)

WAITING_MESSAGES: Final = 256
"""Messages queued per connection before ZeroMQ stops reading it; TCP then blocks the sender, which bounds memory."""

ConnectionFault: TypeAlias = Literal["no_key", "wrong_key", "failed_handshake", "endless_message", "no_hello"]

MAX_UNREAD_BYTES: Final = 512 << 20
"""Default bound on unread bytes of one connection: twice the largest message to the buffer."""
MAX_STRANGERS_UNREAD_BYTES: Final = 16 << 20
"""Default bound on unread bytes of all connections together whose peers were not let in yet; at worst 0.6 GB of
memory."""
CHECK_S: Final = 0.1
"""Interval between checks of unread bytes: at 1 GB/s, 100 MB arrive in between."""
LOOKS_PER_S: Final = 1000
"""Peers that were let in are looked at less often where there are more than 100 of them: a look takes some 10 us. Those
that were not let in are looked at in every check."""
FRAME_OVERHEAD_BYTES: Final = 42
"""The most that ZMTP (9) and CURVE (33) add to a frame. Assumed for all frames, so the bytes read are not
underestimated."""

_EVENTS: Final = HANDSHAKE_EVENTS | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_SOURCE_FD: Final = int(zmq.SRCFD)

_Address: TypeAlias = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class _Connection:
    address: _Address | None = None
    """None: it was closed before we could ask for its address."""
    heard: bool = False
    """A message came from it after the event of its being accepted."""
    let_in: bool = False
    cut: bool = False
    read_bytes: int = 0


class Router:
    """Binds at once. Raises AddressUnusable when it cannot. `keys` None: not encrypted, any peer is accepted.

    `max_frame_bytes`: a connection that sends a longer frame is closed before the frame takes memory; None: the
    protocol's own limit. `known_from_s`: before then, strangers may be peers of the former buffer process in the middle
    of a message, and are not cut.
    """

    def __init__(
        self,
        bind: str,
        *,
        keys: ServerKeys | None,
        log: RateLimitedLog,
        max_frame_bytes: int | None = None,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        max_strangers_unread_bytes: int = MAX_STRANGERS_UNREAD_BYTES,
        known_from_s: float = -math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.encrypted: Final = keys is not None
        self._no_handshake: ConnectionFault = "no_key" if self.encrypted else "failed_handshake"
        self._log = log
        self._max_unread_bytes = max_unread_bytes
        self._max_strangers_unread_bytes = max_strangers_unread_bytes
        self._known_from_s = known_from_s
        self._clock = clock
        self._open: dict[int, _Connection] = {}  # by file descriptor
        self._failing: ConnectionFault | None = None
        self._unheard = 0
        """Successful handshakes minus connections known to have made one: ZeroMQ does not say which connection did."""
        self._checked_s = -CHECK_S
        self._checked_all_s = -math.inf
        self.refused: Final[Counter[ConnectionFault]] = Counter()
        """Connections refused or cut since the start, by reason."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = new_socket(self._context, zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # a send to a closed connection must fail, not vanish
        self._socket.set(zmq.SNDHWM, 0)  # the server bounds bytes instead, which are what fills memory
        self._socket.set(zmq.RCVHWM, WAITING_MESSAGES)
        if max_frame_bytes is not None:
            self._socket.set(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.set(zmq.IPV6, "[" in bind)
        self._gatekeeper: Gatekeeper | None = None
        if keys is not None:
            encrypt_server(self._socket, keys)
            self._gatekeeper = Gatekeeper(self._context, keys)
        self._monitor = Monitor(self._socket, _EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor.socket, zmq.POLLIN)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self.close(linger_s=0.0)
            raise AddressUnusable(f"cannot bind {bind}: {error}; expected a free address like tcp://HOST:0") from error
        self.address: Final = self._socket.get_string(zmq.LAST_ENDPOINT)

    def also_wait_for(self, descriptor: int) -> None:
        """Make `wait` end also when this descriptor becomes readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Wait for something to arrive, for at most `timeout_s`."""
        self._poller.poll(math.ceil(timeout_s * 1000))
        self._watch()

    def receive(self) -> FromRouter | None:
        """One message, damaged or not, or None when none is waiting."""
        received = receive_from_router(self._socket)
        if received is not None:
            descriptor = int(received.source.get(_SOURCE_FD))
            connection = self._open.get(descriptor)
            if connection is None:
                connection = self._open[descriptor] = _Connection()
            overhead_bytes = CHECKSUM_BYTES + (len(received.frames) + 1) * FRAME_OVERHEAD_BYTES
            connection.read_bytes += sum(map(len, received.frames)) + overhead_bytes
            if connection.address is not None and not connection.heard:
                connection.heard = True
                self._unheard -= 1
        return received

    def send(self, identity: bytes, frames: list[Frame]) -> bool:
        """Never blocks. Returns False if that connection is gone."""
        try:
            self._socket.send(identity, NO_WAIT_MORE)
            send_frames(self._socket, frames)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def let_in(self, source: zmq.Frame) -> None:
        """Record that the sender of this frame is a welcome peer, which may send large messages."""
        connection = self._open.get(int(source.get(_SOURCE_FD)))
        if connection is not None:
            connection.let_in = True

    def owner_of(self, source: zmq.Frame) -> Owner | None:
        """The owner of the sender's key; None when the link is not encrypted."""
        return owner_of(source) if self.encrypted else None

    def close(self, linger_s: float) -> None:
        """Free the socket, after at most `linger_s` for delivering messages under way. Idempotent."""
        if not self._socket.closed:
            self._monitor.close()
            self._socket.close(linger=int(linger_s * 1000))
            if self._gatekeeper is not None:
                self._gatekeeper.stop()
            self._context.term()

    # ------------------------------------------------------------------------------- the watch over connections

    def _watch(self) -> None:
        """Handle the monitor's events, and cut connections with too many unread bytes."""
        for event, value in self._monitor.events():
            self._take(event, value)
        if self._unheard < 0:  # then a connection that ended without a message had failed the handshake
            self._unheard += 1
            self._refuse(self._no_handshake, None)
        now_s = self._clock()
        if sys.platform == "linux" and now_s - self._checked_s >= CHECK_S:
            self._checked_s = now_s
            self._check(now_s)

    def _take(self, event: int, value: int) -> None:
        """`value`: file descriptor, protocol error or ZAP status. After a failure, the end of its connection
        follows."""
        match event:
            case zmq.EVENT_ACCEPTED:
                self._open.setdefault(value, _Connection()).address = _peer_address(value)
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._unheard += 1
            case zmq.EVENT_DISCONNECTED:
                self._ended(self._open.pop(value, _Connection()))
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._failing = "wrong_key"
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if self.encrypted and value == _NOT_OUR_KEY:
                self._failing = "wrong_key"
            case _:
                self._failing = self._no_handshake

    def _ended(self, connection: _Connection) -> None:
        fault, self._failing = self._failing, None
        if fault is None and not connection.heard:
            if self._unheard > 0:  # almost certainly its own; its messages are still to be read
                self._unheard -= 1
            else:
                fault = self._no_handshake
        if fault is not None:
            self._refuse(fault, connection.address)

    def _check(self, now_s: float) -> None:
        strangers: list[tuple[int, int]] = []
        everyone = (now_s - self._checked_all_s) * LOOKS_PER_S >= len(self._open)
        if everyone:
            self._checked_all_s = now_s
        for fd, connection in self._open.items():
            if connection.let_in and not everyone:
                continue
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
        """0 when the connection is closed, its descriptor perhaps reused, and ZeroMQ's event about that still to
        come."""
        with _connected(fd, connection) as tcp:
            if tcp is None:
                return 0
            received_bytes = bytes_received(tcp)
        # The assumed overhead may exceed the real one; a connection must not gain credit by that.
        connection.read_bytes = min(connection.read_bytes, received_bytes)
        return received_bytes - connection.read_bytes

    def _cut(self, fd: int, connection: _Connection, fault: ConnectionFault) -> None:
        with _connected(fd, connection) as tcp:
            if tcp is not None:
                tcp.shutdown(stdlib_socket.SHUT_RDWR)  # ZeroMQ drops the connection and its unfinished message
        connection.cut = True
        self._refuse(fault, connection.address)

    def _refuse(self, fault: ConnectionFault, address: _Address | None) -> None:
        self.refused[fault] += 1
        who = "an unknown address (it hung up at once)" if address is None else f"{address[0]}:{address[1]}"
        self._log.warning(f"refused ({fault}) a connection from {who}: {_MEANING[fault]}")


_NOT_OUR_KEY: Final = zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
_MEANING: Final[dict[ConnectionFault, str]] = {
    "no_key": "it showed no key: the run's folder `keys` is missing on that host, it is not a peer of this run, or its "
    "link broke at that moment",
    "wrong_key": "its key is not one of this run, or it expects another run here",
    "failed_handshake": "it encrypts and this run does not, or it does not speak ZeroMQ, or it hung up",
    "endless_message": "it sent more bytes than a message may have without ending it; cut",
    "no_hello": "it sent many bytes and no Hello; cut",
}


def _peer_address(fd: int) -> _Address | None:
    with tcp_socket(fd) as tcp:
        return None if tcp is None else tcp.getpeername()


@contextlib.contextmanager
def _connected(fd: int, connection: _Connection) -> Generator[stdlib_socket.socket | None]:
    """The connection's socket; None if it was cut, or if the descriptor no longer belongs to it."""
    if connection.address is None or connection.cut:
        yield None
        return
    with tcp_socket(fd) as tcp:
        yield tcp if tcp is not None and tcp.getpeername() == connection.address else None


def address_of(source: zmq.Frame | None) -> str:
    """IP address of the sender of a received frame."""
    return "an unknown address" if source is None else str(source.get("Peer-Address"))
