"""An OpenAI-compatible server on loopback, one per process that runs episodes, for agents that only know a base URL.

    POST /sessions/ID/v1/chat/completions      POST /sessions/ID/inference/v1/generate
    POST /sessions/ID/v1/completions           GET  /sessions/ID/v1/models
    POST /sessions/ID/v1/reward

The key of a request says which episode it belongs to; the path may leave the session out. It runs on a thread with an
event loop of its own, so that an agent may block its episode's thread while it waits for an answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeAlias

from aiohttp import web

from actors.agent import AgentEpisode
from actors.endpoint import MODEL
from actors.endpoint.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Refusal,
    RewardRequest,
    StreamOptions,
    decode,
)
from actors.endpoint.session import Answer, EpisodeSession, refusal_counts

log = logging.getLogger(__name__)
MAX_BODY: Final = 16 << 20
"""Bytes of a request."""
BODY_TIMEOUT_S: Final = 30.0
"""Longest time for a request's body to arrive."""
BEAT_S: Final = 10.0
"""Interval at which a stream says that it is alive."""
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._url = ""
        self._by_key: dict[bytes, EpisodeSession] = {}
        """By digest of the key, so that the time of a look-up says nothing about a key."""
        self._ended: dict[bytes, None] = {}
        """Digests of the keys of ended sessions, oldest first."""

    def new_session(self, episode: AgentEpisode) -> EpisodeSession:
        """Raises OSError when the system gives no port or thread."""
        with self._guard:
            if self._loop is None:
                self._start()
            session = EpisodeSession(episode, self._url, self._end)
            self._by_key[_digest(session.key)] = session
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
            app, handle_signals=False, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        try:
            loop.run_until_complete(runner.setup())
            loop.run_until_complete(web.SockSite(runner, listener).start())
            ready.set()
            loop.run_forever()
            for session in list(self._by_key.values()):
                self._end_here(session)
            loop.run_until_complete(runner.cleanup())
            loop.run_until_complete(loop.shutdown_asyncgens())
        except Exception:
            log.exception("the endpoint for agents failed")
        finally:
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
        if self._by_key.pop(digest, None) is not None:
            self._ended[digest] = None
            if len(self._ended) > CLOSED_KEPT:
                del self._ended[next(iter(self._ended))]
        for task in session.running:
            task.cancel()

    # --------------------------------------------------------------------------------------------------- requests

    def _session(self, request: web.Request) -> EpisodeSession:
        """The session of a request's key. Raises Refusal."""
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        digest = _digest(key)
        session = self._by_key.get(digest)
        if session is None and digest in self._ended:
            raise Refusal("session_closed", "the episode of this session has ended")
        if session is None:
            got = "another one" if key else "none"
            raise Refusal("invalid_api_key", f"expected the key of a running episode as a bearer token, got {got}")
        named = request.match_info.get("session")
        if named is None:
            header = request.headers.get(SESSION_HEADER)
            # A framework's own session id is no business of ours, unless it is the id of another episode.
            named = header if header in {each.id for each in self._by_key.values()} else session.id
        if named != session.id:
            raise Refusal("wrong_session", f"the key belongs to another session than {named[:40]!r}")
        return session

    def _handled(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            session: EpisodeSession | None = None
            try:
                session = self._session(request)
                body = await _body(request)
                session.count("calls")
                with _under_way(session):
                    return await handler(session, body, request)
            except Refusal as refusal:
                if session is not None:
                    session.count(refusal_counts(refusal.code))
                return _refused(refusal)
            except asyncio.CancelledError:
                if session is None or not session.closed or request.transport is None:
                    raise  # the client is gone
                return _refused(Refusal("session_closed", "the episode of this session has ended"))
            except Exception:
                log.exception("the endpoint failed at a request to %s", request.path)
                if session is not None:
                    session.count(refusal_counts("internal_error"))
                return _refused(Refusal("internal_error", "the endpoint failed; the actor's log says why"))

        return handle

    async def _models(self, request: web.Request) -> web.Response:
        try:
            session = self._session(request)
        except Refusal as refusal:
            return _refused(refusal)
        card = {"id": MODEL, "object": "model", "owned_by": "stillhouse", "max_model_len": session.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _unknown(self, request: web.Request) -> web.Response:
        return _refused(Refusal("not_found", f"there is no {request.method} {request.path[:200]} here"))

    async def _reward(self, session: EpisodeSession, body: bytes, request: web.Request) -> web.StreamResponse:
        session.reward(decode(body, RewardRequest)[0])
        return web.json_response({"ok": True})

    async def _chat(self, session: EpisodeSession, body: bytes, request: web.Request) -> web.StreamResponse:
        asked, overruled = decode(body, ChatRequest)
        _say_overruled(session, overruled)

        def whole(answer: Answer) -> dict[str, Any]:
            choices = [
                {
                    "index": i,
                    "message": message,
                    "finish_reason": reason,
                    "logprobs": _logprobs(session, answer, i, asked),
                }
                for i, (message, reason) in enumerate(zip(answer.messages, answer.finish_reasons, strict=True))
            ]
            return _envelope(answer, "chat.completion", "chatcmpl", choices, tokens=asked.return_token_ids)

        def chunks(answer: Answer) -> list[dict[str, Any]]:
            made: list[dict[str, Any]] = []
            for i, (message, reason) in enumerate(zip(answer.messages, answer.finish_reasons, strict=True)):
                delta = dict(message)
                if calls := delta.get("tool_calls"):
                    delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
                logprobs = _logprobs(session, answer, i, asked)
                made.append({"index": i, "delta": delta, "finish_reason": None, "logprobs": logprobs})
                made.append({"index": i, "delta": {}, "finish_reason": reason, "logprobs": None})
            return [_envelope(answer, "chat.completion.chunk", "chatcmpl", [one], usage=False) for one in made]

        if asked.stream:
            return await _stream(request, session.chat(asked), chunks, asked.stream_options)
        return web.json_response(whole(await session.chat(asked)))

    async def _completion(self, session: EpisodeSession, body: bytes, request: web.Request) -> web.StreamResponse:
        asked, overruled = decode(body, CompletionRequest)
        _say_overruled(session, overruled)

        def choices(answer: Answer) -> list[dict[str, Any]]:
            return [
                {"index": i, "text": one.text, "finish_reason": reason, "logprobs": None}
                for i, (one, reason) in enumerate(zip(answer.choices, answer.finish_reasons, strict=True))
            ]

        def chunks(answer: Answer) -> list[dict[str, Any]]:
            return [_envelope(answer, "text_completion", "cmpl", [one], usage=False) for one in choices(answer)]

        if asked.stream:
            return await _stream(request, session.completion(asked), chunks, asked.stream_options)
        answer = await session.completion(asked)
        made = choices(answer)
        if asked.logprobs is not None:
            for one, generation in zip(made, answer.choices, strict=True):
                shown = [session.shown(token) for token in generation.token_ids]
                logprobs = [float(value) for value in generation.logprobs]
                one["logprobs"] = {"tokens": shown, "token_logprobs": logprobs, "top_logprobs": None}
        return web.json_response(_envelope(answer, "text_completion", "cmpl", made, tokens=asked.return_token_ids))

    async def _generate(self, session: EpisodeSession, body: bytes, request: web.Request) -> web.StreamResponse:
        asked, overruled = decode(body, GenerateRequest)
        _say_overruled(session, overruled)
        answer = await session.generate(asked)
        choices: list[dict[str, Any]] = []
        for i, one in enumerate(answer.choices):
            ids = one.token_ids.tolist()
            content = [
                {"token": f"token_id:{token}", "logprob": float(value)}
                for token, value in zip(ids, one.logprobs, strict=True)
            ]
            choices.append(
                {"index": i, "token_ids": ids, "finish_reason": one.finish_reason, "logprobs": {"content": content}}
            )
        return web.json_response(
            {
                "request_id": f"gen-{answer.id}",
                "prompt_token_ids": answer.prompt_ids.tolist(),
                "choices": choices,
                "usage": answer.usage,
            }
        )


# ------------------------------------------------------------------------------------------------------ answers


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


def _refused(refusal: Refusal) -> web.Response:
    return web.json_response(refusal.body, status=refusal.status)


def _say_overruled(session: EpisodeSession, names: list[str]) -> None:
    for name in names:
        session.count(f"overruled_{name}")


def _envelope(
    answer: Answer,
    kind: str,
    prefix: str,
    choices: list[dict[str, Any]],
    *,
    usage: bool = True,
    tokens: bool = False,
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": f"{prefix}-{answer.id}",
        "object": kind,
        "created": answer.created_s,
        "model": MODEL,
        "choices": choices,
    }
    if usage:
        body["usage"] = answer.usage
    if tokens:
        body["prompt_token_ids"] = answer.prompt_ids.tolist()
        for choice, generation in zip(choices, answer.choices, strict=True):
            choice["token_ids"] = generation.token_ids.tolist()
    return body


def _logprobs(session: EpisodeSession, answer: Answer, i: int, asked: ChatRequest) -> dict[str, Any] | None:
    if not asked.logprobs:
        return None
    one = answer.choices[i]
    content: list[dict[str, Any]] = []
    for token, value in zip(one.token_ids, one.logprobs, strict=True):
        text = session.shown(token)
        content.append({"token": text, "logprob": float(value), "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


async def _stream(
    request: web.Request,
    asked: Awaitable[Answer],
    chunks: Callable[[Answer], list[dict[str, Any]]],
    options: StreamOptions | None,
) -> web.StreamResponse:
    """Server-sent events. The response is written when it is complete, so that it is recorded as one; until then a
    comment now and then keeps the connection open. What is refused before anything was written is a plain error."""
    task = asyncio.ensure_future(asked)
    try:
        done, _ = await asyncio.wait({task}, timeout=BEAT_S)
        if done:
            task.result()  # raises Refusal
        async with _events(request) as send:
            while not done:
                await send(": still generating\n\n")
                done, _ = await asyncio.wait({task}, timeout=BEAT_S)
            try:
                answer = task.result()
            except Refusal as refusal:
                await send(f"data: {json.dumps(refusal.body)}\n\n")
                return send.response
            for chunk in chunks(answer):
                await send(f"data: {json.dumps(chunk)}\n\n")
            if options is not None and options.include_usage:
                last = {**chunks(answer)[-1], "choices": [], "usage": answer.usage}
                await send(f"data: {json.dumps(last)}\n\n")
            await send("data: [DONE]\n\n")
            return send.response
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


class _Send:
    def __init__(self, response: web.StreamResponse) -> None:
        self.response = response

    async def __call__(self, text: str) -> None:
        await self.response.write(text.encode())


@asynccontextmanager
async def _events(request: web.Request) -> AsyncGenerator[_Send]:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    yield _Send(response)
    await response.write_eof()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
