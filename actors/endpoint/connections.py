"""How many connections the endpoint holds, how long one may stay without a request, how much memory those may take that
have shown no key, and what is said of them in the log."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from stillhouse.actors.endpoint.requests import Refusal
from stillhouse.protocol.ratelimit import RateLimitedLog

log = logging.getLogger(__name__)
MAX_CONNECTIONS: Final = 4096
"""Connections at a time. Some more come in where many are accepted in one go."""
IDLE_S: Final = 60.0
"""Longest time until the whole head of a request has come, from the connection's beginning or the last response on.
SDKs keep an unused connection for a shorter time."""
HANG_UP_S: Final = 5.0
"""Longest stay of a connection that is refused."""
STRANGERS_BYTES: Final = 24 << 20
"""What all connections that have shown no key may have sent together; one request with its key in the body has room."""

LOOK_S: Final = 0.01
"""Time to read the key of a request that has just come, with the beginning of its body."""


class Bounded:
    """Makes the handlers of new connections. What is too much gets a 503, which SDKs try again."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._sent: dict[_Connection, int] = {}
        """Bytes from each connection without a key, which are at most what it holds."""
        self._total = 0
        self._cutting: asyncio.TimerHandle | None = None
        self.log: Final = RateLimitedLog(log)
        self._said = False

    def __call__(self) -> asyncio.BaseProtocol:
        if len(self._server.connections) < MAX_CONNECTIONS:
            return _Connection(self, self._server, self._loop)
        if not self._said:
            self._said = True
            log.warning("the endpoint has %d connections; more are refused (503)", MAX_CONNECTIONS)
        return _Refused()

    def sent(self, connection: _Connection, n_bytes: int) -> None:
        """Count what a stranger sent. If all have sent too much, the one that sent most is soon cut."""
        self._sent[connection] = self._sent.get(connection, 0) + n_bytes
        self._total += n_bytes
        if self._total > 2 * STRANGERS_BYTES:
            self._cut()
        elif self._total > STRANGERS_BYTES and self._cutting is None:
            self._cutting = self._loop.call_later(LOOK_S, self._cut)

    def _cut(self) -> None:
        if self._cutting is not None:
            self._cutting.cancel()
        self._cutting = None
        while self._total > STRANGERS_BYTES:
            most = max(self._sent, key=self._sent.__getitem__)
            self.log.warning(
                f"connections without a key have sent {self._total >> 20} MiB; the one with most, "
                f"{self._sent[most] >> 10} KiB, is cut"
            )
            self.forget(most)
            most.cut()

    def forget(self, connection: _Connection) -> None:
        """It has shown a key, or is gone."""
        self._total -= self._sent.pop(connection, 0)


class _Connection(RequestHandler):  # pyright: ignore[reportUntypedBaseClass]
    """One connection. Until it shows a key, its bytes count."""

    __slots__ = ("_bounded", "_stranger")

    def __init__(self, bounded: Bounded, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        # A packed body is no JSON; unpacked it could be of any size.
        super().__init__(
            server, loop=loop, keepalive_timeout=IDLE_S, access_log=_NO_LOG, logger=_NO_LOG, auto_decompress=False
        )
        self._bounded = bounded
        self._stranger = True

    def admit(self) -> None:
        self._stranger = False
        self._bounded.forget(self)

    def cut(self) -> None:
        self._stranger = False
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._stranger:
            self._bounded.sent(self, len(data))
        if self.transport is not None and not self.transport.is_closing():
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._bounded.forget(self)
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **more: Any) -> None:
        """aiohttp's own text quotes the request, with its key."""
        kind = type(more.get("exc_info")).__name__
        self._bounded.log.warning(f"the endpoint refuses what is no request of HTTP, or failed at one: {kind}")


_NO_LOG: Final = logging.Logger("endpoint", logging.CRITICAL + 1)


def admit(request: web.Request) -> None:
    """The request has shown the key of an episode."""
    if isinstance(request.protocol, _Connection):
        request.protocol.admit()


class _Refused(asyncio.Protocol):
    """Answers the first bytes, and hangs up. An answer to none would be lost with what comes after it."""

    _transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        asyncio.get_running_loop().call_later(HANG_UP_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        refusal = Refusal("too_many_connections", f"the endpoint has {MAX_CONNECTIONS} connections; try again later")
        body = json.dumps(refusal.body).encode()
        head = f"HTTP/1.1 {refusal.status} Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        self._transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self._transport.close()
