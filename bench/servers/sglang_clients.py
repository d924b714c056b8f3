"""The three clients that bench.servers.sglang_rollouts compares, each a process of its own: an actor, and two that ask.

python -m bench.servers.sglang_clients CLIENT   CLIENT: JSON of `Client`; a bare one does a round per line on stdin
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, cast

import aiohttp
import msgspec

import stillhouse.actors.worker
from stillhouse.actors.config import ActorConfig
from stillhouse.actors.worker import ActorRunConfig
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.protocol.context import RoleContext

Kind: TypeAlias = Literal["actor", "streaming", "whole"]
"""`whole`: without streaming, an answer comes when it has ended."""


class Client(msgspec.Struct, kw_only=True):
    """The work of one client process."""

    kind: Kind
    url: str
    student: str
    concurrent: int
    max_new_tokens: int
    stream_tokens: int
    prompts: list[list[int]]
    stops: tuple[int, ...]
    run_dir: str
    buffer_address: str = ""


class Round(msgspec.Struct):
    """Results of one round of a client without Stillhouse."""

    tokens: int
    wall_s: float


def main() -> None:
    client = msgspec.json.decode(sys.argv[1], type=Client)
    if client.kind == "actor":
        logging.basicConfig(level="WARNING")
        sys.exit(run_actor(client))
    asyncio.run(ask_round_by_round(client))


def run_actor(client: Client) -> int:
    """The real thing: actors.worker.main."""
    actor = ActorConfig(
        engine="sglang",
        sglang=SGLangConfig(max_concurrent=client.concurrent, stream_tokens=client.stream_tokens),
        max_concurrent_rollouts=client.concurrent,
    )
    learner = SimpleNamespace(tasks=SimpleNamespace(env="single_turn"))
    config = SimpleNamespace(actor=actor, models=SimpleNamespace(student=client.student), learner=learner)
    return stillhouse.actors.worker.main(
        RoleContext(
            role="actor",
            index=0,
            name="actor-0",
            incarnation="bench",
            run_id="bench",
            run_dir=Path(client.run_dir),
            buffer_address=client.buffer_address,
            resume=False,
            config=cast(ActorRunConfig, config),
            server_url=client.url,
        )
    )


async def ask_round_by_round(client: Client) -> None:
    bodies = [msgspec.json.encode(request_body(client, prompt)) for prompt in client.prompts]
    timeout = aiohttp.ClientTimeout(total=None)
    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(client.url, connector=connector, timeout=timeout, headers=headers) as session:
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            began_s = time.perf_counter()
            slots = asyncio.Semaphore(client.concurrent)
            counts = await asyncio.gather(*(ask(session, slots, body, client.kind) for body in bodies))
            done = Round(sum(counts), time.perf_counter() - began_s)
            print(msgspec.json.encode(done).decode(), flush=True)


def request_body(client: Client, prompt: list[int]) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "temperature": 1.0,
        "max_new_tokens": client.max_new_tokens,
        "stop_token_ids": client.stops,
        "skip_special_tokens": False,
    }
    if client.kind == "streaming":
        sampling["stream_interval"] = client.stream_tokens
    return {
        "input_ids": prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": client.kind == "streaming",
    }


async def ask(session: aiohttp.ClientSession, slots: asyncio.Semaphore, body: bytes, kind: Kind) -> int:
    """Tokens of one answer, ids and log-probs read."""
    async with slots, session.post("/generate", data=body) as reply:
        if kind == "whole":
            said = msgspec.json.decode(await reply.read())
            return len(said["meta_info"]["output_token_logprobs"])
        n = 0
        async for line in reply.content:
            if line.startswith(b"data: {"):
                n += len(msgspec.json.decode(line[6:])["meta_info"]["output_token_logprobs"])
        return n


if __name__ == "__main__":
    main()
