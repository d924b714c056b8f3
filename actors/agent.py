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

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stillhouse.actors.envs.base import TextTokenizer, TurnEnd
from stillhouse.engines.base import Float32s, Int32s

if TYPE_CHECKING:
    from stillhouse.actors.running_episode import AgentEpisode


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
    logprobs: Float32s
    """[n] Natural logarithms of the probabilities with which the tokens were sampled."""


class Endpoint(NamedTuple):
    """An OpenAI-compatible endpoint of one episode. It ends with its `async with` block."""

    base_url: str
    """Ends with /v1. Reachable from this host only."""
    api_key: str

    @property
    def shared_url(self) -> str:
        """The same for every episode of this process, for callers that keep a client per address. Requests to it name
        `actors.endpoint.KEY_IN_MODEL` as their key, and `api_key` as their model."""
        root, _, _ = self.base_url.partition("/sessions/")
        return f"{root}/v1"


class Context:
    """One line of conversation. Made by the actor, by `branch` and by `root`."""

    def __init__(self, episode: AgentEpisode, token_ids: Int32s) -> None:
        self._episode = episode
        self._parts = [token_ids]
        self._closed = True
        self._ended_by: int | None = None
        """The token that ended the student's turn, right behind it."""
        self._last: int | None = None
        """Number of its last response."""

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
        number = self._episode.new_number()
        generation = await self._episode.ask(self.token_ids, max_new_tokens, tuple(stop_token_ids), number=number)
        self._last = number
        self._parts.append(generation.token_ids)
        self._closed = generation.finish_reason == "stop"
        self._ended_by = int(generation.token_ids[-1]) if self._closed else None
        return generation

    def observe(self, what: str | Int32s, *, role: str | None = "user") -> None:
        """Add context: text as a turn of the chat by `role` (with role None, or without a chat template, as it is), or
        token ids [n]. Control tokens in text are text."""
        if not isinstance(what, str):
            self._parts.append(np.asarray(what, np.int32))
        elif role is None or not self.tokenizer.has_template:
            self._parts.append(self.tokenizer.encode(self.tokenizer.plain(what), behind=self.token_ids))
        else:
            ended_by = self._ended_by
            self._parts.append(self.tokenizer.chat_turn(what, role, closed=self._closed, ended_by=ended_by))
        self._closed, self._ended_by = True, None

    def branch(self) -> Context:
        """Another line with the same tokens, which goes on separately."""
        other = Context(self._episode, self.token_ids)
        other._closed, other._ended_by = self._closed, self._ended_by
        other._last = self._last
        return other

    def root(self, messages: Sequence[Mapping[str, Any]] | Int32s) -> Context:
        """A new line: a sub-agent, or a history that was summarised. `messages`: chat messages, or token ids [n]."""
        if isinstance(messages, np.ndarray):
            return Context(self._episode, np.asarray(messages, np.int32))
        return Context(self._episode, self.tokenizer.chat_prompt(messages))

    @asynccontextmanager
    async def endpoint(self) -> AsyncGenerator[Endpoint]:
        """An OpenAI-compatible endpoint of this episode, for agents that only know a base URL and a key
        (docs/agents/openai.md). Its requests are those of the episode: recorded, limited and trained the same way."""
        session = self._episode.open_session()
        try:
            yield session.endpoint
        finally:
            session.close()

    def reward(self, value: float) -> None:
        """Add to the episode's reward, for the last response of this line (if it has none, for the newest of the
        episode). An episode that never calls it has none, which is not the same as 0."""
        self._episode.add_reward(value, self._last)

    def note(self, /, **numbers: float) -> None:
        """Numbers about the episode, which the actor sums into its statistics."""
        self._episode.add_info(numbers)


def options_checked_by(check: Callable[..., None], *, server: tuple[str, str] | None = None) -> Callable[[Any], Any]:
    """Decorates an agent: `check(**options)` raises ValueError for values that the agent refuses, before anything
    starts. A class has a class method `check_options` for this. `server`: the option that holds the address of a server
    which must listen before a run starts, and the command that starts it, for the message. A class has it as an
    attribute."""

    def mark(agent: Any) -> Any:
        agent.check_options = check
        agent.server = server
        return agent

    return mark
