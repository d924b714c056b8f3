"""Serves the page of a run that goes on, on loopback only.

    GET /TOKEN/               the page
    GET /TOKEN/new?have=...   what was recorded since, for a page that has this much (`growing_page.Cursor`)

The token is random, new for each start, and part of every address. A request whose Host is not this server's address is
refused: a page of another site could have its own name point here (DNS rebinding). The record is read when a page asks,
at most once in REFRESH_S, so a server that nobody looks at does nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from stillhouse.recording.format import RecordError
from stillhouse.tools.view.growing_page import Cursor, StaleCursor
from stillhouse.tools.view.live_record import LiveRecord
from stillhouse.tools.view.page import Facts
from stillhouse.tools.view.rollouts import FoundRollout

HOST: Final = "127.0.0.1"
REFRESH_S: Final = 0.5
LOOK_EVERY_S: Final = 1.0
"""Interval at which the end of the run is looked for."""
MAX_QUERY: Final = 2048
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}
"""Headers that every answer has. The page contains a further policy."""


def run_end(run: Path) -> str:
    """How the run ended; empty while it goes on."""
    try:
        return str(json.loads((run / "summary.json").read_bytes())["state"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class LiveView:
    """The page and what was recorded since. All work on the record is done by one thread at a time."""

    def __init__(self, run: Path, record: LiveRecord, facts: Callable[[Sequence[FoundRollout]], Facts]) -> None:
        """`facts`: of a page, given all rollouts of the record. Raises RecordError."""
        self.token = secrets.token_urlsafe(24)
        self._run = run
        self._record = record
        self._make_facts = facts
        self._facts = facts(record.load())
        self._lock = asyncio.Lock()
        self._error = ""
        self._more = False
        self._read_s = time.monotonic()

    def application(self, hosts: Sequence[str]) -> web.Application:
        """`hosts`: the values of the header Host that are accepted."""

        @web.middleware
        async def guard(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
            if request.headers.getall("Host", []) not in [[host] for host in hosts]:
                answer: web.StreamResponse = web.Response(status=403, text=f"use http://{hosts[0]}\n")
            elif not hmac.compare_digest(
                request.match_info.get("token", "").encode("utf-8", "replace"), self.token.encode()
            ):
                answer = web.Response(status=404, text="not found; use the whole address that was printed\n")
            else:
                answer = await handler(request)
            answer.headers.update(HEADERS)
            return answer

        app = web.Application(middlewares=[guard])
        app.router.add_get("/{token}/", self._page)
        app.router.add_get("/{token}/new", self._new)
        return app

    async def _page(self, request: web.Request) -> web.Response:
        async with self._lock:
            text = await asyncio.to_thread(self._html)
        return web.Response(text=text, content_type="text/html")

    async def _new(self, request: web.Request) -> web.Response:
        query = request.query.get("have", "")
        try:
            have = msgspec.json.decode(query[: MAX_QUERY + 1], type=Cursor)
        except msgspec.MsgspecError as error:
            return web.Response(status=400, text=f"have: {error}\n")
        async with self._lock:
            try:
                body = await asyncio.to_thread(self._since, have)
            except StaleCursor:
                return web.Response(status=410, text="the page was made anew; reload it\n")
        return web.Response(body=body, content_type="application/json")

    # ------------------------------------------------------------------------------------- in the other thread

    def _html(self) -> str:
        """A full page is made anew, from the whole record."""
        if self._record.full and not self._error:
            try:
                self._facts = self._make_facts(self._record.load())
            except (RecordError, OSError) as error:
                self._error = str(error)
        return self._record.page.live_html(self._facts, self._status())

    def _since(self, have: Cursor) -> bytes:
        now_s = time.monotonic()
        if not self._error and (self._more or now_s - self._read_s >= REFRESH_S):
            self._read_s = now_s
            try:
                self._more = self._record.refresh()
            except (RecordError, OSError) as error:
                self._error, self._more = str(error), False
        return msgspec.json.encode(self._record.page.since(have) | {"status": self._status(), "more": self._more})

    def _status(self) -> dict[str, Any]:
        record = self._record
        return {
            "steps": record.steps,
            "n_recorded": record.n_recorded,
            "n_not_shown": record.n_since_full,
            "ended": run_end(self._run),
            "error": self._error,
        }


@asynccontextmanager
async def serving(view: LiveView, port: int) -> AsyncGenerator[str]:
    """Serve on loopback; gives the address of the page. Raises OSError for a port that is taken."""
    hosts = list[str]()
    runner = web.AppRunner(view.application(hosts), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        await site.start()
        _, site_port = runner.addresses[0][:2]
        hosts += [f"{HOST}:{site_port}", f"localhost:{site_port}"]
        yield f"http://{HOST}:{site_port}/{view.token}/"
    finally:
        await runner.cleanup()


async def serve(view: LiveView, run: Path, port: int, opened: Callable[[str], None] | None) -> None:
    """Serve until cancelled. `opened` is called with the address. Says when the run has ended."""
    async with serving(view, port) as address:
        print(f"live at {address}\nOnly this machine can reach it. Ctrl-C ends it.", flush=True)
        if opened is not None:
            opened(address)
        ended = ""
        while True:
            now = await asyncio.to_thread(run_end, run)
            if now and now != ended:
                print(f"the run has ended ({now}); the page stays until Ctrl-C", flush=True)
            ended = now
            await asyncio.sleep(LOOK_EVERY_S)
