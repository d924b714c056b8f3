"""The buffer's ROUTER socket and what surrounds it: its own context, encryption, and the watch over its connections."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

import zmq

from protocol.checksum import CHECKSUM_BYTES
from protocol.codec import Frame
from protocol.connections import MAX_STRANGERS_UNREAD_BYTES, MAX_UNREAD_BYTES, ConnectionFault, Connections
from protocol.encryption import Gatekeeper, encrypt_server, owner_of
from protocol.errors import AddressUnusable
from protocol.keys import Owner, ServerKeys
from protocol.ratelimit import RateLimitedLog
from protocol.sockets import FromRouter, new_socket, receive_from_router, send_from_router

WAITING_MESSAGES: Final = 256
"""Of one connection, before ZeroMQ stops reading it: then TCP holds its sender up, and our memory does not grow."""


class Router:
    """Binds at once. Raises AddressUnusable when it cannot. `keys` None: not encrypted, and everybody may come."""

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
        """See Connections. `max_frame_bytes`: who sends a longer frame is cut before it takes memory; None: as the
        protocol has it."""
        self.encrypted: Final = keys is not None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = new_socket(self._context, zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # a send to a connection that is gone must fail, not vanish
        self._socket.set(zmq.SNDHWM, 0)  # bounded by the server in bytes instead: they are what fills memory
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
        """Connections turned away or cut since the start, by reason."""
        return dict(self._connections.refused)

    def also_wait_for(self, descriptor: int) -> None:
        """`wait` ends as well when this can be read."""
        self._poller.register(descriptor, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Until something comes in, or `timeout_s` is over."""
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
        """Never blocks. False: that connection is gone."""
        try:
            send_from_router(self._socket, identity, frames)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def let_in(self, source: zmq.Frame) -> None:
        """The sender has said Hello and is welcome."""
        self._connections.let_in(source)

    def owner_of(self, source: zmq.Frame) -> Owner | None:
        """Whose key the sender has; None when the link is not encrypted."""
        return owner_of(source) if self.encrypted else None

    def close(self, linger_s: float) -> None:
        """Deliver what is on its way for at most `linger_s`. May be called again."""
        if not self._socket.closed:
            self._connections.close()
            self._socket.close(linger=int(linger_s * 1000))
            if self._gatekeeper is not None:
                self._gatekeeper.close()
            self._context.term()


def address_of(source: zmq.Frame | None) -> str:
    """IP address of the sender of a received frame."""
    return "an address not known" if source is None else str(source.get("Peer-Address"))
