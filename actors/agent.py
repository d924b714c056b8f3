"""Agents: an episode written as one coroutine, with plain control flow.

    async def rollout(ctx: Context, task: EnvTask) -> None:
        turn = await ctx.generate()
        ctx.observe(run_tool(turn.text))
        turn = await ctx.generate()
        ctx.reward(1.0 if task.ground_truth in turn.text else 0.0)

A `Context` is one line of conversation. `branch` copies it, `root` begins another; they may generate at the same time.
Retries, sub-agents and summaries are therefore ordinary Python. Every token is recorded in the episode's token graph
(docs/token-graph.md): what the student wrote is trained once, all else is context.

The coroutine runs on its episode's own thread and event loop: it may await, and it may block. Environments with `reset`
and `step` run the same way (`actors.envs.episode`): they are agents of one line.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from actors.env_thread import CURRENT_CALL, EnvCall
from actors.envs.base import EnvTask, TextTokenizer, TurnEnd
from actors.envs.episode import EnvironmentFault, FinishReason
from engines.base import Int32s


class EpisodeOver(Exception):
    """Nothing more can be generated: tokens, context window or turns are used up. An agent need not catch it: the
    episode then ends as `length`, with the reward given so far."""


class Generation(NamedTuple):
    """One response of the student."""

    token_ids: Int32s
    """[n] As sampled, the stop token included."""
    text: str
    """The same tokens as text, without special tokens. Never tokenise it again."""
    finish_reason: TurnEnd
    """stop: ended on a stop token; length: `max_new_tokens`, or the rollout's tokens, are used up."""


class Ask(NamedTuple):
    """A request of an episode to its actor: the student is to continue these tokens."""

    rollout_id: str
    number: int
    """The episode's own count of its requests."""
    prompt_ids: Int32s
    """[n]"""
    max_new_tokens: int | None
    stop_token_ids: tuple[int, ...]


class GiveUp(NamedTuple):
    """The episode no longer waits for this request."""

    rollout_id: str
    number: int


class Context:
    """One line of conversation. Made by the actor, by `branch` and by `root`."""

    def __init__(self, episode: AgentEpisode, token_ids: Int32s) -> None:
        self._episode = episode
        self._parts = [token_ids]
        self._closed = True

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._episode.tokenizer

    @property
    def token_ids(self) -> Int32s:
        """[n] What the student reads next."""
        self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    @property
    def budget_left(self) -> int:
        """Tokens that the student may still write in this episode, all lines together; what is being written right now
        is not subtracted."""
        return self._episode.budget_left

    @property
    def context_left(self) -> int:
        """Tokens that this line may still grow by before it fills the context window."""
        return self._episode.max_context_tokens - sum(part.size for part in self._parts)

    async def generate(self, *, max_new_tokens: int | None = None, stop_token_ids: Sequence[int] = ()) -> Generation:
        """The student continues this line, up to one of the model's stop tokens, or of `stop_token_ids`.

        `max_new_tokens`: for this response; None: all that the rollout has left, so that no other line can generate at
        the same time. Raises EpisodeOver."""
        generation = await self._episode.ask(self.token_ids, max_new_tokens, tuple(stop_token_ids))
        self._parts.append(generation.token_ids)
        self._closed = generation.finish_reason == "stop"
        return generation

    def observe(self, what: str | Int32s, *, role: str | None = "user") -> None:
        """Add context: text as a turn of the chat by `role` (with role None, or without a chat template, as it is), or
        token ids [n]."""
        if not isinstance(what, str):
            self._parts.append(np.asarray(what, np.int32))
        elif role is None or not self.tokenizer.has_template:
            self._parts.append(self.tokenizer.encode(what))
        else:
            self._parts.append(self.tokenizer.chat_turn(what, role, closed=self._closed))
        self._closed = True

    def branch(self) -> Context:
        """Another line with the same tokens, which goes on separately."""
        other = Context(self._episode, self.token_ids)
        other._closed = self._closed
        return other

    def root(self, messages: Sequence[Mapping[str, Any]] | Int32s) -> Context:
        """A new line: a sub-agent, or a history that was summarised. `messages`: chat messages, or token ids [n]."""
        if isinstance(messages, np.ndarray):
            return Context(self._episode, np.asarray(messages, np.int32))
        return Context(self._episode, self.tokenizer.chat_prompt(messages))

    def reward(self, value: float) -> None:
        """Add to the episode's reward. An episode that never calls it has none, which is not the same as 0."""
        number = float(value)
        if not math.isfinite(number):
            raise EnvironmentFault(f"ctx.reward({value!r}): expected a finite number")
        self._episode.reward = (self._episode.reward or 0.0) + number

    def note(self, /, **numbers: float) -> None:
        """Numbers about the episode, which the actor sums into its statistics."""
        for name, value in numbers.items():
            if not math.isfinite(float(value)):
                raise EnvironmentFault(f"ctx.note({name}={value!r}): expected a finite number")
            self._episode.info[name] = self._episode.info.get(name, 0.0) + float(value)


class EpisodeEnd(NamedTuple):
    """How an episode ended."""

    finish_reason: FinishReason
    reward: float | None
    info: Mapping[str, float]


Play: TypeAlias = Callable[[Context], Coroutine[Any, Any, FinishReason | None]]
"""A whole episode. Returns how it ended; None: as its last response did."""


def play_agent(make: Callable[[], Callable[..., Any]], task: EnvTask) -> Play:
    """The episode of an agent. `make` gives the coroutine function with its options."""

    async def play(ctx: Context) -> None:
        returned: object = await make()(ctx, task)
        if returned is not None:
            raise EnvironmentFault(f"the agent returned {returned!r:.60}, expected None: rewards go to ctx.reward")

    return play


class AgentEpisode:
    """Runs one episode, and carries its requests to the actor and the responses back."""

    def __init__(
        self,
        play: Play,
        task: EnvTask,
        tokenizer: TextTokenizer,
        post: Callable[[Ask | GiveUp], None],
        *,
        budget_left: int,
        max_context_tokens: int,
    ) -> None:
        """`post` hands a request to the actor's main thread. `budget_left`: tokens that may be sampled."""
        self._play = play
        self._task = task
        self.tokenizer = tokenizer
        self._post = post
        self.budget_left = budget_left
        self.max_context_tokens = max_context_tokens
        self.reward: float | None = None
        self.info: dict[str, float] = {}
        self._waiting: dict[int, asyncio.Future[tuple[Int32s, TurnEnd, int]]] = {}
        self._n_asked = 0
        self._last: TurnEnd | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._call: EnvCall | None = None

    # --------------------------------------------------------------------------------------- on the episode's thread

    async def run(self) -> EpisodeEnd:
        """The whole episode. Raises EnvironmentFault for an agent that breaks a rule, EpisodeOver if not even one
        response had room, and whatever the agent raises."""
        self._loop, self._call = asyncio.get_running_loop(), CURRENT_CALL.get()
        try:
            finish_reason = await self._play(Context(self, self._task.prompt_ids))
        except EpisodeOver:
            if self._last is None:
                raise
            finish_reason = "length"
        if self._last is None:
            raise EnvironmentFault("the agent ended without a response of the student, expected one `ctx.generate`")
        return EpisodeEnd(finish_reason or self._last, self.reward, self.info)

    async def ask(self, prompt_ids: Int32s, max_new_tokens: int | None, stop_token_ids: tuple[int, ...]) -> Generation:
        """See `Context.generate`."""
        assert self._loop is not None and self._call is not None
        number, self._n_asked = self._n_asked, self._n_asked + 1
        future: asyncio.Future[tuple[Int32s, TurnEnd, int]] = self._loop.create_future()
        self._waiting[number] = future
        self._call.pause()
        self._post(Ask(self._task.rollout_id, number, prompt_ids, max_new_tokens, stop_token_ids))
        try:
            token_ids, finish_reason, self.budget_left = await future
        except asyncio.CancelledError:
            self._post(GiveUp(self._task.rollout_id, number))
            raise
        finally:
            del self._waiting[number]
            if self._waiting:
                self._call.pause()
            else:
                self._call.resume()
        self._last = finish_reason
        return Generation(token_ids, self.tokenizer.decode(token_ids), finish_reason)

    # ---------------------------------------------------------------------------------------- on the actor's thread

    def deliver(self, number: int, token_ids: Int32s, finish_reason: TurnEnd, budget_left: int) -> None:
        """Answer a request. `budget_left`: tokens that the rollout may still sample."""
        token_ids.flags.writeable = False
        self._settle(number, lambda future: future.set_result((token_ids, finish_reason, budget_left)))

    def refuse(self, number: int, reason: str) -> None:
        """Answer a request that there is no room for."""
        self._settle(number, lambda future: future.set_exception(EpisodeOver(reason)))

    def _settle(self, number: int, settle: Callable[[asyncio.Future[tuple[Int32s, TurnEnd, int]]], None]) -> None:
        assert self._loop is not None and self._call is not None
        self._call.expect()

        def here() -> None:
            future = self._waiting.get(number)
            if future is not None and not future.done():
                settle(future)

        try:
            self._loop.call_soon_threadsafe(here)
        except RuntimeError:
            return  # the episode has ended, and so has its loop
