"""How many connections the endpoint holds, and how long one may stay without a request."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Final

from aiohttp import web

from actors.endpoint.requests import Refusal

log = logging.getLogger(__name__)
MAX_CONNECTIONS: Final = 4096
"""Connections at a time. Some more come in where many are accepted in one go."""
IDLE_S: Final = 60.0
"""Longest time until the whole head of a request has come, from the connection's beginning or the last response on.
SDKs keep an unused connection for a shorter time."""
HANG_UP_S: Final = 5.0
"""Longest stay of a connection that is refused."""


class Bounded:
    """Makes the handlers of new connections. What is too much gets a 503, which SDKs try again."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._said = False

    def __call__(self) -> asyncio.BaseProtocol:
        if len(self._server.connections) < MAX_CONNECTIONS:
            return self._server()
        if not self._said:
            self._said = True
            log.warning("the endpoint has %d connections; more are refused (503)", MAX_CONNECTIONS)
        return _Refused()


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
