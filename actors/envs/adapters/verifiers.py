"""Environments of verifiers (tried: 0.4.0) behind its own env server, over ZeroMQ (docs/agents/verifiers.md).

The server runs in a Python environment of its own, because verifiers pins what others need in other versions; what is
needed here is a socket. A request is one episode: the server plays it with its own train client, which sends token ids
to the episode's endpoint (`POST /inference/v1/generate`), and answers with the traces' rewards.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import msgpack
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from stillhouse.actors.agent import Context, Endpoint, EpisodeOver, options_checked_by
from stillhouse.actors.endpoint import KEY_IN_MODEL
from stillhouse.actors.envs.base import EnvTask
from stillhouse.actors.envs.episode import EnvironmentFault

COLUMN: Final = "task"
"""Column of a row: the data of one of the taskset's tasks, as its `model_dump(mode="json")` gives them."""
ADDRESS: Final = re.compile(r"tcp://[^/]+:\d+|ipc://.+")
START: Final = (
    ".venv-verifiers/bin/python examples/agents/verifiers_server.py verifiers_sums (the example's; "
    "docs/agents/verifiers.md)"
)
LINGER_MS: Final = 500
"""How long a cancellation may still be under way when its socket closes."""
NO_SERVER: Final = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
"""The connection was refused, or is lost."""
OVER: Final = ("context_length_exceeded", "exceeds maximum context length")
"""What the endpoint, and the train client itself, say when no more can be generated."""


class VerifiersError(Exception):
    """The server, or the environment in it, failed; the message has its words."""


def _check(
    *, server: str, tokenizer: str, renderer: Mapping[str, Any] | None = None, max_tokens: int | None = None
) -> None:
    if not ADDRESS.fullmatch(server):
        raise ValueError(f"server: got {server!r}, expected its ZeroMQ address, such as tcp://127.0.0.1:8766")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens: got {max_tokens}, expected at least 1")


@options_checked_by(_check, server=("server", START))
async def verifiers(
    ctx: Context,
    task: EnvTask,
    *,
    server: str,
    tokenizer: str,
    renderer: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> None:
    """`server`: the env server's address. `tokenizer`: the student's, as the server finds it: a folder, or a name on
    Hugging Face. `renderer`: which of the package renderers makes prompts, e.g. `{name = "qwen3"}`; by default the
    one that it finds for the tokenizer. `max_tokens`: the most that one response may have."""
    data = task.row.get(COLUMN)
    if not isinstance(data, Mapping):
        raise EnvironmentFault(
            f"the row's column {COLUMN!r} is {type(data).__name__}, expected an object: the data of a verifiers task"
        )
    async with ctx.endpoint() as endpoint:
        request = {
            "task_data": data,
            "client": _client(endpoint, tokenizer, renderer),
            "model": endpoint.api_key,
            "sampling": {} if max_tokens is None else {"max_tokens": max_tokens},
        }
        episode = await _run(server, request)
    traces = [trace for trace in episode.traces if (trace.get("agent") or {}).get("trainable", True)]
    rewards = [reward for trace in traces if (reward := _reward(trace)) is not None]
    if rewards:
        ctx.reward(sum(rewards) / len(rewards))
    for trace in traces:
        _note(ctx, trace)
    episode.check()


def _client(endpoint: Endpoint, tokenizer: str, renderer: Mapping[str, Any] | None) -> dict[str, Any]:
    """The same for all episodes of a process: the server keeps a client for each that it has seen."""
    return {
        "type": "train",
        "base_url": endpoint.shared_url,
        "api_key_var": "STILLHOUSE_HAS_NONE",
        "headers": {"Authorization": f"Bearer {KEY_IN_MODEL}"},
        "renderer_model_name": tokenizer,
        "renderer": None if renderer is None else dict(renderer),
    }


def _reward(trace: Mapping[str, Any]) -> float | None:
    """The weighted sum of a trace's rewards; None if it was not scored."""
    scored: list[Mapping[str, Any]] = [one for one in (trace.get("rewards") or {}).values() if one is not None]
    return sum(float(one["score"]) * float(one.get("weight", 1.0)) for one in scored) if scored else None


def _note(ctx: Context, trace: Mapping[str, Any]) -> None:
    metrics: Mapping[str, Any] = trace.get("metrics") or {}
    for name, value in metrics.items():
        if isinstance(value, int | float) and math.isfinite(value):
            ctx.note(**{f"verifiers_{name}": float(value)})


class _Episode:
    """What the server tells of an episode. Its nodes, with the tokens, are known here from the endpoint."""

    def __init__(self) -> None:
        self.traces: list[dict[str, Any]] = []
        self._by_id: dict[str, dict[str, Any]] = {}
        self._head: Mapping[str, Any] = {}

    def add(self, delta: Mapping[str, Any]) -> None:
        """A part of a trace, as it comes (verifiers/v1/serve/delta.py). One that is given up is not in the reply."""
        trace = self._by_id.setdefault(delta["trace"], {"errors": []})
        trace["errors"].extend(delta.get("errors") or ())
        trace.update(delta.get("set") or {})

    def end(self, reply: Mapping[str, Any]) -> None:
        """Raises VerifiersError for a request that the server could not carry out."""
        if not reply.get("success"):
            raise VerifiersError(str(reply.get("error") or "the server gave no reason"))
        self._head = reply.get("head") or {}
        ids = [summary["id"] for summary in reply.get("traces") or ()]
        if missing := [one for one in ids if one not in self._by_id]:
            raise VerifiersError(f"the server told nothing of {len(missing)} of {len(ids)} traces")
        self.traces = [self._by_id[one] for one in ids]

    def check(self) -> None:
        """Raises VerifiersError if the episode failed, EpisodeOver if it only had no more tokens."""
        if self._head.get("ok") and all(trace.get("ok", True) for trace in self.traces):
            return
        sources: Sequence[Mapping[str, Any]] = [*self.traces, self._head]
        errors: list[Mapping[str, Any]] = [error for one in sources for error in one.get("errors") or ()]
        words = [f"{error.get('type')}: {error.get('message')}" for error in errors]
        if words and any(said in words[0] for said in OVER):
            raise EpisodeOver(words[0])
        timed_out = any(one.get("is_timeout") for one in sources)
        raise VerifiersError(words[0] if words else "it timed out" if timed_out else "it failed without an error")


async def _run(server: str, request: Mapping[str, Any]) -> _Episode:
    """One episode on the server. Raises VerifiersError. If it is cancelled, the server is told."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    monitor = socket.get_monitor_socket(NO_SERVER)
    gone = asyncio.ensure_future(monitor.recv_multipart())
    name = secrets.token_hex(16)
    try:
        socket.connect(server)
        await socket.send_multipart([name.encode(), b"run", _packed(request)])
        return await _told(socket, name, gone, server)
    except asyncio.CancelledError:
        cancel = [secrets.token_hex(16).encode(), b"cancel", _packed({"request_id": name})]
        with suppress(zmq.ZMQError):
            await socket.send_multipart(cancel, flags=zmq.NOBLOCK)
        raise
    finally:
        gone.cancel()
        with suppress(asyncio.CancelledError, zmq.ZMQError):
            await gone
        socket.disable_monitor()
        monitor.close()
        socket.close()


async def _told(socket: zmq.asyncio.Socket, name: str, gone: asyncio.Future[list[bytes]], server: str) -> _Episode:
    episode = _Episode()
    while True:
        heard = asyncio.ensure_future(socket.recv_multipart())
        try:
            await asyncio.wait({heard, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not heard.done():
                lost = parse_monitor_message(gone.result())["event"] == zmq.EVENT_DISCONNECTED
                what = "was lost" if lost else "was refused; start it as docs/agents/verifiers.md says"
                raise VerifiersError(f"the connection to the env server {server} {what}")
            asked, kind, data = heard.result()
        finally:
            heard.cancel()
        if asked.decode() != name:
            continue  # the answer to a cancellation
        if kind == b"delta":
            episode.add(_unpacked(data))
        else:
            episode.end(_unpacked(data))
            return episode


def _packed(value: Any) -> bytes:
    return cast(bytes, msgpack.packb(value, use_bin_type=True))


def _unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False)
