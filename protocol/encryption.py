"""CURVE on ZeroMQ sockets: what a listening and a connecting end set before they bind or connect, and who is let in.

Who asks to come in is decided by ZAP, in pyzmq's authenticator thread: a public key that is not on the list is turned
away before it can send a message. Each message then tells whose key its connection has (`owner_of`).
"""

from __future__ import annotations

import logging
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from protocol.keys import ClientKeys, Owner, ServerKeys

_DOMAIN: Final = "stillhouse"
_no_log = logging.Logger("zap")
"""pyzmq would log public keys at its debug level; no key of any kind belongs into a log."""
_no_log.disabled = True


class Gatekeeper:
    """Lets in who has one of `keys.owners`. One per ZeroMQ context, alive from before `bind` until `close`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._zap = _Zap(context, keys)
        self._zap.start()

    def close(self) -> None:
        """Before the context ends. May be called again."""
        self._zap.stop()


class _Zap(ThreadAuthenticator):
    """Its own list is a folder read by itself; ours is in memory, and says the owner."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        super().__init__(context, log=_no_log)
        self._owners = dict(keys.owners)
        self.configure_curve_callback(_DOMAIN, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """pyzmq's credentials provider; `key` is Z85 text."""
        return key in self._owners

    def curve_user_id(self, client_public_key: bytes) -> str:
        return self._owners[z85.encode(client_public_key)]


def encrypt_server(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Before `bind`, with a Gatekeeper in the socket's context: without one nobody would be let in."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    socket.set(zmq.ZAP_DOMAIN, _DOMAIN.encode())
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def encrypt_client(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Before `connect`."""
    socket.set(zmq.CURVE_PUBLICKEY, keys.public)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    socket.set(zmq.CURVE_SERVERKEY, keys.server)


def owner_of(frame: zmq.Frame) -> Owner:
    """Whose key the connection of this received frame has."""
    return str(frame.get("User-Id"))
