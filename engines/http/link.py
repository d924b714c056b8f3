"""The connection to one inference server: one pooled HTTP client on an event loop in a thread of its own.

    any thread --run/spawn/post_soon--> event loop --> server
                                 |
                              monitor: GET `info_path` every `health_every_s`, which must answer even while generation
                              is paused (SGLang's /health then takes 20 s and says no)

Every call has a deadline. After `_FAILURES_TO_OPEN` failures in a row the circuit breaker opens until something
succeeds, such as the monitor's next health check. Generation waits for that (`breaker.wait_closed`). Scoring does not:
the buffer has its own breaker for each teacher.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Final, TypeVar, cast

import aiohttp
import msgspec

from stillhouse.engines.backoff import backoffs
from stillhouse.engines.base import EngineLost
from stillhouse.engines.config import ServerLinkConfig

log = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECT_RETRY_S: Final = 0.3
_FAILURES_TO_OPEN: Final = 3
_RETRY_STATUS: Final = frozenset({429, 500, 502, 503, 504})
_WRONG_METHOD: Final = 405
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"


class ServerUnavailable(RuntimeError):
    """The server did not answer, or not in time; another attempt may succeed."""


class RequestRefused(RuntimeError):
    """The server refused this request; another attempt is pointless."""


class ServerLost(EngineLost):
    """The server is away or stuck past all deadlines, or another one answers in its place. Its worker ends with
    ExitCode.SERVER_LOST, so that the server is started again."""


class ModelInfo(msgspec.Struct, frozen=True):
    """The answer to the monitor."""

    weight_version: str
    model_path: str = ""


class CircuitBreaker:
    """Opens after failures in a row, closes with a success. Belongs to the event loop."""

    def __init__(self) -> None:
        self._failures = 0
        self.opened_total = 0
        self._opened_s = 0.0
        self._closed = asyncio.Event()
        self._closed.set()

    @property
    def is_open(self) -> bool:
        return not self._closed.is_set()

    @property
    def open_for_s(self) -> float:
        """Seconds since it opened; 0 when it is closed."""
        return time.monotonic() - self._opened_s if self.is_open else 0.0

    def failed(self) -> None:
        self._failures += 1
        if self._failures >= _FAILURES_TO_OPEN and self._closed.is_set():
            self._closed.clear()
            self._opened_s = time.monotonic()
            self.opened_total += 1

    def succeeded(self) -> None:
        self._failures = 0
        self._closed.set()

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait until the breaker is closed. Raises ServerUnavailable past `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()
        except TimeoutError:
            raise ServerUnavailable(
                f"circuit open after {self._failures} failures in a row, and no answer for {timeout_s:.3g} s more"
            ) from None


class ServerLink:
    """The connection to one server. `run` may be called from any thread except the loop's; the coroutines run on the
    loop. A subclass for each kind of server names its routes."""

    info_path: ClassVar[str]
    """Route that names the present weights (ModelInfo)."""

    def __init__(self, url: str, config: ServerLinkConfig, *, api_key: str = "") -> None:
        """`api_key`: bearer key of the server; without one, that in the environment variable `config.api_key_env`. Does
        not connect yet. Raises ValueError when that variable is not set, or the key is not valid in a header."""
        self.url: Final = url.rstrip("/")
        self.config = config
        self._headers = _headers(api_key, config)
        self._thread = threading.Thread(target=self._main, name="server-http", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread.start()
        self._closed = False
        self.requests_total = 0
        self.sent_bytes_total = 0
        self.received_bytes_total = 0
        self.updating = False
        """The server takes new weights: it may be too busy to name them, and the name is not settled."""
        self.on_info: Callable[[ModelInfo, float], None] | None = None
        """Called on the loop with every answer to the monitor, and the time of its request (time.monotonic)."""
        self._lost: str | None = None
        try:
            self.breaker, self._session = self.run(self._open(), timeout_s=config.control_timeout_s)
        except BaseException:
            self._join()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """Run a coroutine on the loop and wait for it. Raises what it raised, or ServerUnavailable past `timeout_s`."""

        async def outcome() -> tuple[T | None, Exception | None]:
            try:
                return await coroutine, None
            except Exception as error:  # raised below, if the caller still waits; asyncio would log it otherwise
                return None, error

        future = asyncio.run_coroutine_threadsafe(outcome(), self._loop)
        try:
            result, error = future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise ServerUnavailable(f"{self.url}: no result within {timeout_s:g} s") from None
        if error is not None:
            raise error
        return cast(T, result)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine on the loop without waiting. It must handle its own errors."""
        self._loop.call_soon_threadsafe(self.start_task, coroutine)

    def post_soon(self, path: str, body: Any, *, timeout_s: float) -> Future[bytes]:
        """Start a `post` on the loop without waiting for it."""
        future: Future[bytes] = Future()

        async def run() -> None:
            try:
                future.set_result(await self.post(path, body, timeout_s=timeout_s))
            except BaseException as error:
                future.set_exception(error)

        self.spawn(run())
        return future

    def call_soon(self, function: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def start_monitor(self) -> None:
        self.spawn(self._monitor())

    def declare_lost(self, reason: str) -> None:
        """Mark the server as lost. Thread-safe; the first reason stands."""
        if self._lost is None:
            self._lost = f"{self.url}: {reason}"
            log.error("server lost: %s", self._lost)

    def raise_if_lost(self) -> None:
        """Raises ServerLost."""
        if self._lost is not None:
            raise ServerLost(self._lost)

    def close(self) -> None:
        """Cancel everything, close the connections, join the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ServerUnavailable):
            self.run(self._shut(), timeout_s=self.config.control_timeout_s)
        self._join()

    # ------------------------------------------------------------------------------- coroutines, on the loop

    async def model_info(self) -> ModelInfo:
        return msgspec.json.decode(await self.get(self.info_path), type=ModelInfo)

    async def answers(self) -> None:
        """Return when the server answers, busy or not. Raises ServerUnavailable."""
        await self.model_info()

    async def wait_until_up(self) -> None:
        """Raises ServerUnavailable past connect_timeout_s."""
        deadline_s = time.monotonic() + self.config.connect_timeout_s
        while True:
            try:
                await self.model_info()
                return
            except ServerUnavailable:
                if time.monotonic() + _CONNECT_RETRY_S > deadline_s:
                    raise
                await asyncio.sleep(_CONNECT_RETRY_S)

    async def get(self, path: str) -> bytes:
        return await self._once("GET", path, None, self.config.control_timeout_s)

    async def has_endpoint(self, path: str) -> bool:
        """True if `path` answers GET or POST: a HEAD request, which does nothing, is then refused as a wrong method."""
        try:
            async with self._session.head(path, timeout=_total(self.config.control_timeout_s)) as reply:
                return reply.status == _WRONG_METHOD
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unavailable(path, error) from error

    async def post(self, path: str, body: Any, *, timeout_s: float | None = None) -> bytes:
        """One attempt. Raises ServerUnavailable or RequestRefused."""
        payload = msgspec.json.encode(body)
        return await self._once("POST", path, payload, timeout_s or self.config.control_timeout_s)

    async def post_again(self, path: str, body: Any, *, timeout_s: float, deadline_s: float) -> bytes:
        """POST until it succeeds, is refused, or the clock (time.monotonic) passes `deadline_s`; each attempt may take
        `timeout_s`. Only for requests that may be repeated."""
        payload = msgspec.json.encode(body)
        for backoff_s in backoffs():
            try:
                return await self._once("POST", path, payload, timeout_s)
            except ServerUnavailable:
                if time.monotonic() + backoff_s >= deadline_s:
                    raise
            await asyncio.sleep(backoff_s)
        raise AssertionError("backoffs() ended")

    async def abort(self, rid: str) -> None:
        """Abort one request at the server. A failure is only logged: the caller also disconnects in time."""
        try:
            await self.post_abort([rid])
        except (ServerUnavailable, RequestRefused) as error:
            log.warning("abort of %s: %s", rid, error)

    async def post_abort(self, rids: Sequence[str]) -> None:
        """Abort these requests, or all if none is given. Raises ServerUnavailable or RequestRefused."""
        raise NotImplementedError

    async def flush_cache(self) -> None:
        """Flush cached prefixes, once nothing runs. Raises ServerUnavailable."""
        raise NotImplementedError

    async def stream(self, path: str, body: Any) -> AsyncGenerator[bytes, None]:
        """The JSON texts of a reply in `data:` lines. Has no deadline: the caller watches for silence. Raises
        ServerUnavailable when the connection breaks or ends before [DONE]."""
        payload = msgspec.json.encode(body)
        self._count(payload)
        try:
            async with self._session.post(path, data=payload, timeout=_no_timeout(self.config)) as reply:
                await self._check(path, reply)
                rest = b""
                async for block in reply.content.iter_any():
                    self.received_bytes_total += len(block)
                    *lines, rest = (rest + block).split(b"\n")
                    for line in lines:
                        if not line.startswith(_DATA):
                            continue
                        text = line[len(_DATA) :].strip()
                        if text == _DONE:
                            self.breaker.succeeded()
                            return
                        yield text
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unavailable(path, error) from error
        raise self._unavailable(path, EOFError("the stream ended before [DONE]"))

    async def _once(self, method: str, path: str, payload: bytes | None, timeout_s: float) -> bytes:
        self._count(payload or b"")
        try:
            async with self._session.request(method, path, data=payload, timeout=_total(timeout_s)) as reply:
                await self._check(path, reply)
                text = await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unavailable(path, error) from error
        self.received_bytes_total += len(text)
        self.breaker.succeeded()
        return text

    async def _check(self, path: str, reply: aiohttp.ClientResponse) -> None:
        if reply.status < 400:
            return
        message = f"{self.url}{path}: HTTP {reply.status}: {(await reply.text())[:500]}"
        if reply.status in _RETRY_STATUS:
            self.breaker.failed()
            raise ServerUnavailable(message)
        raise RequestRefused(message)

    def _unavailable(self, path: str, error: BaseException) -> ServerUnavailable:
        self.breaker.failed()
        return ServerUnavailable(f"{self.url}{path}: {type(error).__name__}: {error}")

    def _count(self, payload: bytes) -> None:
        self.requests_total += 1
        self.sent_bytes_total += len(payload)

    async def _monitor(self) -> None:
        while True:
            try:
                asked_s = time.monotonic()
                if self.updating:
                    await self.answers()
                elif self.on_info is not None:
                    self.on_info(await self.model_info(), asked_s)
                else:
                    await self.model_info()
            except (ServerUnavailable, RequestRefused, ValueError) as error:
                log.warning("health: %s", error)
                self._lose_if_away_for_long(error)
            await asyncio.sleep(self.config.health_every_s)

    def _lose_if_away_for_long(self, error: Exception) -> None:
        away_s = self.breaker.open_for_s
        if away_s > self.config.start_timeout_s:
            self.declare_lost(f"no answer for {away_s:.0f} s after the circuit opened (start_timeout_s): {error}")

    # ------------------------------------------------------------------------------------------- the thread

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _join(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """`spawn` for callers on the loop. `close` cancels it."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _open(self) -> tuple[CircuitBreaker, aiohttp.ClientSession]:
        # No limit here: max_concurrent limits requests, and an abort must never wait for a free connection.
        tls = tls_context(self.config.ca_file) if self.url.startswith("https://") else True
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0, ssl=tls)
        session = aiohttp.ClientSession(
            self.url, connector=connector, headers=self._headers, cookie_jar=aiohttp.DummyCookieJar()
        )
        return CircuitBreaker(), session

    async def _shut(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()


def _headers(api_key: str, config: ServerLinkConfig) -> dict[str, str]:
    """Headers of every request. Errors never show the key."""
    where = "the server's key"
    if not api_key and config.api_key_env:
        where = f"environment variable {config.api_key_env} (api_key_env)"
        api_key = os.environ.get(config.api_key_env, "")
        if not api_key:
            raise ValueError(f"{where} is not set; expected the bearer key of the server")
    if not api_key:
        return {"Content-Type": "application/json"}
    if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
        raise ValueError(f"{where}: expected printable ASCII without blanks, got other characters")
    return {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}


def tls_context(ca_file: str) -> ssl.SSLContext:
    """Checks the server's certificate and name. A certificate in `ca_file` is trusted whether or not it is an
    authority's. Raises ValueError when the file cannot be used."""
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"ca_file: {ca_file} holds no certificates (PEM) that can be read: {error}") from error
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _total(timeout_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=timeout_s)


def _no_timeout(config: ServerLinkConfig) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, sock_connect=config.control_timeout_s)
