"""Stands before a server with the S3 API and does to chosen requests what servers and networks do."""

from __future__ import annotations

import http.client
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Literal

from tests.patience import PATIENCE_S
from tests.s3_server import Server

CODES: Final = {
    403: "AccessDenied",
    500: "InternalError",
    503: "ServiceUnavailable",
    507: "XMinioStorageFull",
}
SKEWED: Final = "RequestTimeTooSkewed"
Kind = int | Literal["cut_request", "cut_answer", "half_stored", "half_sent", "slow", "held", "skewed"]
"""A status; the connection ends in the middle of the request, or of the answer; the server keeps or sends half of the
object and says that this is all of it; each answer takes a second; or waits for `release`; the clocks differ."""
NOT_PASSED: Final = ("connection", "content-length", "transfer-encoding", "expect")


@dataclass
class Fault:
    method: str
    part: str
    """Of the path."""
    kind: Kind
    times: int = 1_000_000
    met: int = 0


class FaultyStore:
    """A context manager. `faults` may change while it serves."""

    def __init__(self, server: Server) -> None:
        self.faults: list[Fault] = []
        self.release = threading.Event()
        self.requests: list[str] = []
        """Method and path of each."""
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

            def _serve(self) -> None:
                with suppress(OSError):
                    store._answer(self, server)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FaultyStore:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(PATIENCE_S)
        self._server.server_close()

    def asked(self, method: str, part: str) -> int:
        return sum(one.startswith(method) and part in one for one in self.requests)

    def _fault(self, request: BaseHTTPRequestHandler) -> Kind | None:
        for fault in self.faults:
            if request.command == fault.method and fault.part in request.path and fault.met < fault.times:
                fault.met += 1
                return fault.kind
        return None

    def _answer(self, request: BaseHTTPRequestHandler, server: Server) -> None:
        self.requests.append(f"{request.command} {request.path}")
        kind = self._fault(request)
        length = int(request.headers.get("Content-Length") or 0)
        if kind == "cut_request":
            request.rfile.read(length // 2)
            request.close_connection = True
            request.connection.close()
            return
        body = _chunked(request) if "chunked" in request.headers.get("Transfer-Encoding", "") else b""
        body = body or request.rfile.read(length)
        if kind == "slow":
            time.sleep(1.0)
        if kind == "held":
            self.release.wait(PATIENCE_S)
        if isinstance(kind, int) or kind == "skewed":
            code = SKEWED if kind == "skewed" else CODES[kind]
            kind = 403 if kind == "skewed" else kind
            text = f"<Error><Code>{code}</Code><Message>as the test wants</Message></Error>".encode()
            _send(request, kind, {"Content-Type": "application/xml"}, text, len(text))
            return
        headers = {name: value for name, value in request.headers.items() if name.lower() not in NOT_PASSED}
        if kind == "half_stored":
            body = body[: len(body) // 2]
            headers = {name: value for name, value in headers.items() if "md5" not in name.lower()}
            headers = {name: value for name, value in headers.items() if "checksum" not in name.lower()}
        link = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE_S)
        link.request(request.command, request.path, body=body, headers=headers)
        reply = link.getresponse()
        content = reply.read()
        named = {name: value for name, value in reply.getheaders() if name.lower() not in NOT_PASSED}
        size = int(reply.getheader("Content-Length") or len(content))
        if kind == "cut_answer" and not content:
            request.close_connection = True
            return
        if kind in ("cut_answer", "half_sent"):
            content = content[: len(content) // 2]
            size = len(content) if kind == "half_sent" else size
            request.close_connection = True
        _send(request, reply.status, named, content, size)
        link.close()


def _send(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes, size: int) -> None:
    request.send_response_only(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(size))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)


def _chunked(request: BaseHTTPRequestHandler) -> bytes:
    body = b""
    while n := int(request.rfile.readline().split(b";")[0], 16):
        body += request.rfile.read(n)
        request.rfile.readline()
    while request.rfile.readline().strip():
        pass
    return body
