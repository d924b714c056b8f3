"""An OpenAI-compatible server on loopback, one per process that runs episodes, for agents that only know a base URL.

    POST /sessions/ID/v1/chat/completions      POST /sessions/ID/inference/v1/generate
    POST /sessions/ID/v1/completions           GET  /sessions/ID/v1/models
    POST /sessions/ID/v1/reward

The key of a request says which episode it belongs to; the path may leave the session out. A caller that keeps one
client for many episodes names `model` as its key, and an episode's key as the `model` of each request. It runs on a
thread with an event loop of its own, so that an agent may block its episode's thread while it waits for an answer.
"""

# Why it is so: docs/decisions/endpoint.md

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

from aiohttp import web

from stillhouse.actors.agent import Generation
from stillhouse.actors.endpoint import KEY_IN_MODEL, MODEL, connections
from stillhouse.actors.endpoint.answers import (
    chat_body,
    chat_chunks,
    chat_logprobs,
    completion_body,
    completion_chunks,
    generate_body,
)
from stillhouse.actors.endpoint.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Refusal,
    RewardRequest,
    decode,
    expect_fitting,
    model_of,
    session_closed,
)
from stillhouse.actors.endpoint.session import EpisodeSession, refusal_counts
from stillhouse.actors.endpoint.streams import write_events
from stillhouse.actors.endpoint.text_work import TextThreads, TextWork
from stillhouse.actors.running_episode import AgentEpisode
from stillhouse.protocol.ratelimit import OncePerInterval

log = logging.getLogger(__name__)
MAX_BODY: Final = 16 << 20
"""Bytes of a request."""
BODY_TIMEOUT_S: Final = 30.0
"""Longest time for a request's body to arrive."""
START_TIMEOUT_S: Final = 30.0
CLOSE_TIMEOUT_S: Final = 5.0
CLOSED_KEPT: Final = 10_000
"""Keys of ended sessions that are remembered, so that a late request is told so."""
SESSION_HEADER: Final = "X-Session-ID"

Handler: TypeAlias = Callable[[EpisodeSession, bytes, web.Request], Awaitable[web.StreamResponse]]


class EndpointServer:
    """Starts with its first session. `new_session` and `close` may be called from any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._faults = OncePerInterval(60.0, at_most=1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._url = ""
        self._by_key: dict[bytes, EpisodeSession] = {}
        """By digest of the key, so that the time of a look-up says nothing about a key."""
        self._ended: dict[bytes, None] = {}
        """Digests of the keys of ended sessions, oldest first."""
        self._texts = TextThreads()
        self._ids: set[str] = set()
        """Ids of the sessions in `_by_key`."""

    def new_session(self, episode: AgentEpisode) -> EpisodeSession:
        """Raises OSError when the system gives no port or thread."""
        with self._guard:
            if self._loop is None:
                self._start()
            session = EpisodeSession(episode, self._url, self._end, TextWork(self._texts))
            self._by_key[_digest(session.key)] = session
            self._ids.add(session.id)
        return session

    def close(self) -> None:
        """End all sessions and the server. Again has no effect."""
        with self._guard:
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(CLOSE_TIMEOUT_S)

    # --------------------------------------------------------------------------------------------------- lifetime

    def _start(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        loop = asyncio.new_event_loop()
        ready = threading.Event()
        thread = threading.Thread(target=self._main, args=(loop, listener, ready), name="endpoint", daemon=True)
        thread.start()
        if not ready.wait(START_TIMEOUT_S):
            raise OSError(f"the endpoint for agents did not start within {START_TIMEOUT_S:g} s")
        self._loop, self._thread = loop, thread

    def _main(self, loop: asyncio.AbstractEventLoop, listener: socket.socket, ready: threading.Event) -> None:
        app = web.Application(client_max_size=MAX_BODY)
        for prefix in ("", "/sessions/{session}"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            for path, handler in (
                ("v1/chat/completions", self._chat),
                ("v1/completions", self._completion),
                ("v1/reward", self._reward),
                ("inference/v1/generate", self._generate),
            ):
                app.router.add_post(f"{prefix}/{path}", self._handled(handler))
        app.router.add_route("*", "/{anything:.*}", self._unknown)
        # Without `handler_cancellation` a request would go on after its client is gone.
        runner = web.AppRunner(
            app,
            handle_signals=False,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=1.0,
        )
        try:
            loop.run_until_complete(runner.setup())
            assert runner.server is not None
            accepts = loop.run_until_complete(_accept(loop, runner.server, listener))
            ready.set()
            loop.run_forever()
            accepts.close()
            for session in list(self._by_key.values()):
                self._end_here(session)
            loop.run_until_complete(runner.cleanup())
            loop.run_until_complete(loop.shutdown_asyncgens())
        except Exception:
            log.exception("the endpoint for agents failed")
        finally:
            self._texts.close()
            loop.close()

    def _end(self, session: EpisodeSession) -> None:
        """Called from any thread."""
        session.closed = True
        with self._guard:
            loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(self._end_here, session)

    def _end_here(self, session: EpisodeSession) -> None:
        session.closed = True
        digest = _digest(session.key)
        self._ids.discard(session.id)
        if self._by_key.pop(digest, None) is not None:
            self._ended[digest] = None
            if len(self._ended) > CLOSED_KEPT:
                del self._ended[next(iter(self._ended))]
        for task in session.running:
            task.cancel()

    # --------------------------------------------------------------------------------------------------- requests

    def _session(self, request: web.Request, key: str) -> EpisodeSession:
        """The session of a request's key. Raises Refusal."""
        digest = _digest(key)
        session = self._by_key.get(digest)
        if session is None and digest in self._ended:
            raise session_closed()
        if session is None:
            got = "another one" if key else "none"
            raise Refusal("invalid_api_key", f"expected the key of a running episode as a bearer token, got {got}")
        named = request.match_info.get("session")
        if named is None:
            header = request.headers.get(SESSION_HEADER)
            # A framework's own session id is no business of ours, unless it is the id of another episode.
            named = header if header in self._ids else session.id
        if named != session.id:
            raise Refusal("wrong_session", f"the key belongs to another session than {named[:40]!r}")
        connections.admit(request)
        return session

    def _handled(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            session: EpisodeSession | None = None
            try:
                key = _key(request)
                if key == KEY_IN_MODEL:
                    body = await _body(request)
                    session = self._session(request, model_of(body))
                else:
                    session = self._session(request, key)
                    body = await _body(request)
                session.count("calls")
                expect_fitting(body, session.max_model_len)
                with _under_way(session):
                    return await handler(session, body, request)
            except Refusal as refusal:
                if session is not None:
                    session.count(refusal_counts(refusal.code))
                return _refused(refusal, stranger=session is None)
            except asyncio.CancelledError:
                if session is None or not session.closed or request.transport is None:
                    raise  # the client is gone
                return _refused(session_closed())
            except Exception:
                if self._faults.due(b""):
                    log.exception("the endpoint failed at a request (at most one such line a minute)")
                if session is not None:
                    session.count(refusal_counts("internal_error"))
                return _refused(Refusal("internal_error", "the endpoint failed; the actor's log says why"))

        return handle

    async def _models(self, request: web.Request) -> web.Response:
        try:
            session = self._session(request, _key(request))
        except Refusal as refusal:
            return _refused(refusal, stranger=True)
        card = {"id": MODEL, "object": "model", "owned_by": "stillhouse", "max_model_len": session.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _unknown(self, request: web.Request) -> web.Response:
        return _refused(Refusal("not_found", f"there is no {request.method} {request.path[:200]} here"), stranger=True)

    async def _reward(self, session: EpisodeSession, body: bytes, request: web.Request) -> web.StreamResponse:
        session.reward(decode(body, RewardRequest)[0])
        return web.json_response({"ok": True})

    async def _chat(self, session: EpisodeSession, body: bytes, request: web.Request) -> web.StreamResponse:
        asked, overruled = decode(body, ChatRequest)
        _say_overruled(session, overruled)
        show = partial(_logprobs, session) if asked.logprobs else None
        if asked.stream:
            chunks = partial(chat_chunks, show=show)
            return await write_events(request, session, session.chat(asked, len(body)), chunks, asked.stream_options)
        answer = await session.chat(asked, len(body))
        return web.json_response(chat_body(answer, show=show, token_ids=bool(asked.return_token_ids)))

    async def _completion(self, session: EpisodeSession, body: bytes, request: web.Request) -> web.StreamResponse:
        asked, overruled = decode(body, CompletionRequest)
        _say_overruled(session, overruled)
        if asked.stream:
            asking = session.completion(asked, len(body))
            return await write_events(request, session, asking, completion_chunks, asked.stream_options)
        answer = await session.completion(asked, len(body))
        shown = session.shown if asked.logprobs is not None else None
        return web.json_response(completion_body(answer, shown=shown, token_ids=bool(asked.return_token_ids)))

    async def _generate(self, session: EpisodeSession, body: bytes, request: web.Request) -> web.StreamResponse:
        asked, overruled = decode(body, GenerateRequest)
        _say_overruled(session, overruled)
        return web.json_response(generate_body(await session.generate(asked)))


# ----------------------------------------------------------------------------------------------------- requests


class _under_way:  # noqa: N801 - a context manager
    """The handler's task is among those that the session ends."""

    def __init__(self, session: EpisodeSession) -> None:
        self._session = session
        self._task = asyncio.current_task()

    def __enter__(self) -> None:
        assert self._task is not None
        self._session.running.add(self._task)

    def __exit__(self, *_: object) -> None:
        assert self._task is not None
        self._session.running.discard(self._task)


def _key(request: web.Request) -> str:
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _body(request: web.Request) -> bytes:
    """Raises Refusal for one that is too large or too slow."""
    try:
        if (request.content_length or 0) > MAX_BODY:
            raise web.HTTPRequestEntityTooLarge(MAX_BODY, request.content_length or 0)
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise Refusal("request_too_large", f"got a body of more than {MAX_BODY >> 20} MiB, expected less") from error
    except TimeoutError as error:
        raise Refusal("timeout", f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error


def _refused(refusal: Refusal, *, stranger: bool = False) -> web.Response:
    """`stranger`: the request has shown no key, and its connection ends."""
    response = web.json_response(refusal.body, status=refusal.status)
    if stranger:
        response.force_close()
    return response


async def _accept(
    loop: asyncio.AbstractEventLoop, server: web.Server, listener: socket.socket
) -> asyncio.AbstractServer:
    return await loop.create_server(connections.Bounded(server), sock=listener, backlog=1024)


_SAID: Final[set[str]] = set()
"""Overruled fields that the log has named."""


def _say_overruled(session: EpisodeSession, names: list[str]) -> None:
    for name in names:
        session.count(f"overruled_{name}")
        if name not in _SAID:
            _SAID.add(name)
            log.warning(
                "requests of agents ask for %s, which changes nothing: the run decides how its student samples", name
            )


def _logprobs(session: EpisodeSession, generation: Generation) -> dict[str, Any]:
    return chat_logprobs(generation, session.shown)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()  # headers may hold any bytes
