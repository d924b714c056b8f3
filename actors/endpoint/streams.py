"""Responses as server-sent events.

A response is written when it is complete, so that it is recorded as one; until then a comment now and then keeps the
connection open. What is refused before anything was written is a plain error; after that it is an event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from stillhouse.actors.endpoint.requests import Refusal, StreamOptions, session_closed
from stillhouse.actors.endpoint.session import Answer, EpisodeSession, refusal_counts

BEAT_S: Final = 10.0
"""Interval at which a stream says that it is alive."""


async def write_events(
    request: web.Request,
    session: EpisodeSession,
    asked: Awaitable[Answer],
    chunks: Callable[[Answer], list[dict[str, Any]]],
    options: StreamOptions | None,
) -> web.StreamResponse:
    """Raises Refusal while nothing is written, CancelledError when the client is gone."""
    task = asyncio.ensure_future(asked)
    try:
        done, _ = await asyncio.wait({task}, timeout=BEAT_S)
        if done:
            task.result()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            while not done:
                await response.write(b": still generating\n\n")
                done, _ = await asyncio.wait({task}, timeout=BEAT_S)
            for event in _events(task.result(), chunks, options):
                await _write(response, event)
        except Refusal as refusal:
            await _write_refusal(response, session, refusal)
        except asyncio.CancelledError:
            if not session.closed or request.transport is None:
                raise
            await _write_refusal(response, session, session_closed())
        await response.write_eof()
        return response
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def _events(
    answer: Answer, chunks: Callable[[Answer], list[dict[str, Any]]], options: StreamOptions | None
) -> list[str]:
    made = chunks(answer)
    if options is not None and options.include_usage:
        made.append({**made[-1], "choices": [], "usage": answer.usage})
    return [*(json.dumps(one) for one in made), "[DONE]"]


async def _write_refusal(response: web.StreamResponse, session: EpisodeSession, refusal: Refusal) -> None:
    session.count(refusal_counts(refusal.code))
    await _write(response, json.dumps(refusal.body))


async def _write(response: web.StreamResponse, event: str) -> None:
    await response.write(f"data: {event}\n\n".encode())
