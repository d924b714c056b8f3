"""A ROUTER socket with its context, its encryption, and the watch over its connections."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

import zmq

from protocol.codec import Frame
from protocol.connections import MAX_STRANGERS_UNREAD_BYTES, MAX_UNREAD_BYTES, ConnectionFault, Connections
from protocol.errors import AddressUnusable
from protocol.keys import Gatekeeper, Owner, ServerKeys, encrypt_server, owner_of
from protocol.ratelimit import RateLimitedLog
from protocol.sockets import CHECKSUM_BYTES, FromRouter, new_socket, receive_from_router, send_from_router

WAITING_MESSAGES: Final = 256
"""Messages queued per connection before ZeroMQ stops reading it; TCP then blocks the sender, which bounds memory."""


class Router:
    """Binds at once. Raises AddressUnusable when it cannot. `keys` None: not encrypted, any peer is accepted.

    `max_frame_bytes`: a connection that sends a longer frame is closed before the frame takes memory; None: the
    protocol's own limit. For the other limits see Connections.
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
        self._connections = Connections(
            self._socket,
            encrypted=self.encrypted,
            log=log,
            max_unread_bytes=max_unread_bytes,
            max_strangers_unread_bytes=max_strangers_unread_bytes,
            known_from_s=known_from_s,
            clock=clock,
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._connections.socket, zmq.POLLIN)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self.close(linger_s=0.0)
            raise AddressUnusable(f"cannot bind {bind}: {error}; expected a free address like tcp://HOST:0") from error
        self.address: Final = self._socket.get_string(zmq.LAST_ENDPOINT)

    @property
    def refused(self) -> dict[ConnectionFault, int]:
        """Connections refused or cut since the start, by reason."""
        return dict(self._connections.refused)

    def also_wait_for(self, descriptor: int) -> None:
        """Make `wait` end also when this descriptor becomes readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Wait for something to arrive, for at most `timeout_s`."""
        self._poller.poll(math.ceil(timeout_s * 1000))
        self._connections.watch()

    def receive(self) -> FromRouter | None:
        """One message, damaged or not, or None when none is waiting."""
        received = receive_from_router(self._socket)
        if received is not None:
            n_bytes = sum(map(len, received.frames)) + CHECKSUM_BYTES
            self._connections.read(received.source, n_bytes, len(received.frames) + 1)
        return received

    def send(self, identity: bytes, frames: list[Frame]) -> bool:
        """Never blocks. Returns False if that connection is gone."""
        try:
            send_from_router(self._socket, identity, frames)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def let_in(self, source: zmq.Frame) -> None:
        """Record that the sender is a welcome peer: larger messages may follow."""
        self._connections.let_in(source)

    def owner_of(self, source: zmq.Frame) -> Owner | None:
        """The owner of the sender's key; None when the link is not encrypted."""
        return owner_of(source) if self.encrypted else None

    def close(self, linger_s: float) -> None:
        """Free the socket, after at most `linger_s` for delivering messages under way. Idempotent."""
        if not self._socket.closed:
            self._connections.close()
            self._socket.close(linger=int(linger_s * 1000))
            if self._gatekeeper is not None:
                self._gatekeeper.stop()
            self._context.term()


def address_of(source: zmq.Frame | None) -> str:
    """IP address of the sender of a received frame."""
    return "an address not known" if source is None else str(source.get("Peer-Address"))
