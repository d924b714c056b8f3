"""Episodes with an endpoint on an engine that answers by a rule: the actor's loop runs on a thread, so that the test
may be an ordinary client."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import numpy as np

from stillhouse.actors.agent import Context, Endpoint
from stillhouse.actors.config import ActorConfig, EnvConfig
from stillhouse.actors.envs.base import EnvTask, TextTokenizer
from stillhouse.engines.base import Int32s
from stillhouse.protocol.messages import Sampling, Ticket
from tests.actors.in_hand import STOP, InHand, ScriptedEngine, ids_of, ticket
from tests.patience import PATIENCE_S, Limit

HERE = __name__


class Episode:
    """The test's side of an episode: it has the endpoint until `end`."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.ended = threading.Event()
        self.endpoint = Endpoint("", "")

    def end(self) -> None:
        self.ended.set()


class Waiting:
    """Episodes by rollout; the test's to fill."""

    episodes: ClassVar[dict[str, Episode]] = {}


async def served(ctx: Context, task: EnvTask) -> None:
    """Has an endpoint until the test says otherwise. It blocks its thread, as an agent may."""
    episode = Waiting.episodes[task.rollout_id]
    async with ctx.endpoint() as endpoint:
        episode.endpoint = endpoint
        episode.ready.set()
        assert episode.ended.wait(PATIENCE_S)


async def polite(ctx: Context, task: EnvTask) -> None:
    """As `served`, with a thread that stays free."""
    episode = Waiting.episodes[task.rollout_id]
    async with ctx.endpoint() as endpoint:
        episode.endpoint = endpoint
        episode.ready.set()
        await asyncio.to_thread(episode.ended.wait, PATIENCE_S)


class Reply(NamedTuple):
    status: int
    body: Any
    text: str = ""

    @property
    def code(self) -> str:
        """Of an error."""
        return self.body["error"]["code"]


class Actor:
    """Rollouts in hand, turned by a thread."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        answer: Callable[[Int32s], list[int] | None],
        environments: Mapping[str, EnvConfig],
    ) -> None:
        """`answer`: the student's response to a prompt, or None to let it wait. `environments`: further ones."""
        self.engine = ScriptedEngine()
        self.answer = answer
        self.asked: list[tuple[str, list[int]]] = []
        """Requests that the engine saw, with their prompts: the test's own account."""
        config = ActorConfig(
            segment_tokens=8,
            environments={
                name: EnvConfig(name=f"{HERE}:{name}", max_turns=2000, step_timeout_s=PATIENCE_S)
                for name in ("served", "polite")
            }
            | dict(environments),
        )
        self.hand = InHand(self.engine, tokenizer, config, max_context_tokens=100_000)
        self._stop = threading.Event()
        self._gone = threading.Event()
        self._turns = 0
        self._do: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._turn)
        self._thread.start()

    def begin(self, number: int, *, env: str = "served", max_new_tokens: int = 100_000) -> Episode:
        one = ticket(number, env=env, sampling=Sampling(seed=number, max_new_tokens=max_new_tokens))
        episode = Waiting.episodes[one.rollout_id] = Episode()
        self.add(one)
        assert episode.ready.wait(PATIENCE_S)
        return episode

    def add(self, one: Ticket) -> None:
        self._do.append(lambda: self.hand.rollouts.add(one, ids_of(1, 2, 3)))

    def cancel(self, number: int) -> None:
        self._do.append(lambda: self.hand.rollouts.cancel(f"train-{number}-0-0", "the test wants it"))

    def until(self, met: Callable[[], bool]) -> None:
        limit = Limit()
        while not met():
            assert not limit.passed, "it never came to that"
            time.sleep(0.005)

    def until_gone(self) -> None:
        """Nothing is in hand at the end of a turn that begins after this call."""
        self._gone.clear()
        self._turns = 0
        assert self._gone.wait(PATIENCE_S)

    def finish(self, *episodes: Episode) -> None:
        for episode in episodes:
            episode.end()
        self.until_gone()

    def close(self) -> None:
        for episode in Waiting.episodes.values():
            episode.end()
        self._stop.set()
        self._thread.join(PATIENCE_S)
        self.hand.episodes.close()
        Waiting.episodes.clear()

    def _turn(self) -> None:
        told: set[str] = set()
        while not self._stop.is_set():
            while self._do:
                self._do.pop(0)()
            for request_id, request in list(self.engine.requests.items()):
                if request_id not in told:
                    ids = self.answer(request.prompt_ids)
                    if ids is None:
                        continue
                    self.engine.say(request_id, *ids[: request.max_new_tokens], end="stop")
                    told.add(request_id)
                    self.asked.append((request_id, request.prompt_ids.tolist()))
            self.hand.turn()
            self._turns += 1
            if self._turns > 2 and not self._do and not len(self.hand.rollouts):
                self._gone.set()


@contextmanager
def actor(
    tokenizer: TextTokenizer,
    answer: Callable[[Int32s], list[int] | None] = lambda _: [10, STOP],
    **environments: EnvConfig,
) -> Generator[Actor]:
    one = Actor(tokenizer, answer, environments)
    try:
        yield one
    finally:
        one.close()


def call(
    endpoint: Endpoint,
    path: str,
    body: Mapping[str, Any] | bytes | None = None,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """One HTTP request; a POST if there is a body."""
    root = endpoint.base_url.removesuffix("/v1")
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(path if path.startswith("http") else f"{root}/{path}", data)
    request.add_header("Authorization", f"Bearer {endpoint.api_key if key is None else key}")
    request.add_header("Content-Type", "application/json")
    for name, value in (headers or {}).items():
        request.add_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            text = response.read().decode()
            return Reply(response.status, json.loads(text) if text.startswith("{") else None, text)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode()
        return Reply(error.code, json.loads(text), text)


def chat(endpoint: Endpoint, *turns: str | Mapping[str, Any], **fields: Any) -> Reply:
    """Turns of user and assistant in turn, beginning with the user's."""
    messages = [
        turn if isinstance(turn, Mapping) else {"role": ("user", "assistant")[i % 2], "content": turn}
        for i, turn in enumerate(turns)
    ]
    return call(endpoint, "v1/chat/completions", {"model": "student", "messages": messages, **fields})


def trained(actor: Actor, number: int) -> list[int]:
    """Ids that a rollout trains, in order; dropped ones left out."""
    segments, ids, _, mask = actor.hand.whole(f"train-{number}-0-0")
    keep = mask.astype(bool)
    for one in segments[-1].dropped:
        keep[one.start : one.end] = False
    return np.asarray(ids)[keep].tolist()
