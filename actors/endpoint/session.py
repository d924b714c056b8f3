"""One episode's side of the endpoint: its conversations, from messages to tokens and back.

A request that goes on from an earlier response finds the tokens of that response by its messages; only what is new is
rendered. Nothing that the student wrote is ever tokenised again to be trained: a request whose history was rewritten
is rendered as a whole, and the token graph makes it a branch (docs/token-graph.md).

All methods but `close` run on the server's event loop; what a caller's text costs runs apart from it (`text_work`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from stillhouse.actors.agent import Endpoint, EpisodeOver, Generation
from stillhouse.actors.endpoint.requests import (
    ChatRequest,
    Code,
    CompletionRequest,
    GenerateRequest,
    Message,
    Refusal,
    RewardRequest,
    Stop,
    canonical,
    session_closed,
    stops,
)
from stillhouse.actors.endpoint.text_work import MAX_MESSAGES, TextWork
from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.actors.envs.episode import EnvironmentFault
from stillhouse.actors.running_episode import AgentEpisode
from stillhouse.actors.tool_calls import parse_tool_calls, tool_dialect
from stillhouse.engines.base import Int32s
from stillhouse.protocol.printable import in_one_line
from stillhouse.protocol.ratelimit import RateLimitedLog

log = logging.getLogger(__name__)
MAX_LINES: Final = 1024
"""Conversations of an episode that can be continued. Older ones are rendered anew, as a branch."""
Route = Literal["chat", "completion", "generate"]


@dataclass(frozen=True, slots=True)
class _Line:
    """A conversation up to a response."""

    messages: tuple[str, ...]
    """Canonical JSON of each message, the response last."""
    tools: str
    token_ids: Int32s
    closed: bool
    """The student wrote the token that ends its turn."""
    text: str
    """For completions: prompt and response."""


class Answer(NamedTuple):
    """A checked request and the student's responses to it."""

    id: str
    created_s: int
    n_prompt: int
    prompt_ids: Int32s
    choices: list[Generation]
    messages: list[Message]
    """chat: one per choice."""
    finish_reasons: list[str]

    @property
    def usage(self) -> dict[str, int]:
        n = sum(len(one.token_ids) for one in self.choices)
        return {"prompt_tokens": self.n_prompt, "completion_tokens": n, "total_tokens": self.n_prompt + n}


class EpisodeSession:
    """See actors.agent.Session."""

    def __init__(
        self, episode: AgentEpisode, base_url: str, on_close: Callable[[EpisodeSession], None], work: TextWork
    ) -> None:
        """`base_url` of the server, without a slash at its end."""
        self.id = secrets.token_urlsafe(9)
        self.key = f"sk-{secrets.token_urlsafe(32)}"
        self.endpoint = Endpoint(f"{base_url}/sessions/{self.id}/v1", self.key)
        self.max_model_len = episode.max_context_tokens
        self.running: set[asyncio.Task[Any]] = set()
        """Requests under way."""
        self.closed = False
        self._episode = episode
        self._work = work
        self._on_close = on_close
        self._lines: deque[_Line] = deque(maxlen=MAX_LINES)
        self._template_error = ""
        self._log = RateLimitedLog(log)

    def close(self) -> None:
        """Thread-safe."""
        self._on_close(self)

    # ---------------------------------------------------------------------------------------------------- requests

    async def chat(self, request: ChatRequest, n_bytes: int) -> Answer:
        """`n_bytes`: the request's size."""
        tools = None if request.tool_choice == "none" else request.tools
        if request.tool_choice not in (None, "none", "auto"):
            self.count("overruled_tool_choice")
        if len(request.messages) > MAX_MESSAGES:
            raise Refusal("context_length_exceeded", f"got {len(request.messages)} messages, expected {MAX_MESSAGES}")
        rendered = partial(self._rendered, request, tools, tuple(self._lines))
        keys, tools_key, prompt_ids = await self._work.do(n_bytes, rendered)
        limit = request.max_completion_tokens or request.max_tokens
        stop_ids = self._stop_ids(request.stop, request.stop_token_ids)
        generations = await self._generate(prompt_ids, request.n or 1, limit, stop_ids)
        thinking = self._tokenizer.opens_reasoning(prompt_ids)
        said: list[Message] = []
        reasons: list[str] = []
        for generation in generations:
            message, reason = self._message(generation, tools, thinking)
            said.append(message)
            reasons.append(reason)
            line_ids = np.concatenate([prompt_ids, generation.token_ids])
            closed = generation.finish_reason == "stop"
            key = _key(canonical(message))
            self._lines.append(_Line((*keys, key), tools_key, line_ids, closed, ""))
        return self._answer(prompt_ids, generations, said, reasons)

    async def completion(self, request: CompletionRequest, n_bytes: int) -> Answer:
        """`n_bytes`: the request's size."""
        if request.echo or request.suffix:
            raise Refusal("unsupported", "echo and suffix are not supported")
        prompt = partial(self._completion_prompt, request.prompt, tuple(self._lines))
        try:
            prompt_ids, text = await self._work.do(n_bytes, prompt)
        except ValueError as error:
            raise Refusal("invalid_request", str(error)) from error
        stop_ids = self._stop_ids(request.stop, request.stop_token_ids)
        generations = await self._generate(prompt_ids, request.n or 1, request.max_tokens, stop_ids)
        for one in generations:
            line_ids = np.concatenate([prompt_ids, one.token_ids])
            self._lines.append(_Line((), "", line_ids, one.finish_reason == "stop", text + one.text))
        return self._answer(prompt_ids, generations, [], [str(one.finish_reason) for one in generations])

    async def generate(self, request: GenerateRequest) -> Answer:
        if request.stream:
            raise Refusal("unsupported", "/inference/v1/generate does not stream; leave `stream` out")
        if request.features:
            raise Refusal("unsupported", "features: the student only reads text")
        prompt_ids = self._checked_ids(request.token_ids, "token_ids")
        sampling = request.sampling_params
        stop_ids = self._stop_ids(sampling.stop, sampling.stop_token_ids)
        generations = await self._generate(prompt_ids, sampling.n or 1, sampling.max_tokens, stop_ids)
        return self._answer(prompt_ids, generations, [], [str(one.finish_reason) for one in generations])

    def reward(self, request: RewardRequest) -> None:
        if not math.isfinite(request.reward):
            raise Refusal("invalid_request", f"reward: got {request.reward}, expected a finite number")
        try:
            added = self._episode.add_reward(request.reward)
        except EnvironmentFault as fault:
            raise Refusal("invalid_request", f"reward: {fault}") from fault
        if not added:
            raise session_closed()

    def shown(self, token: int) -> str:
        """A token's own text."""
        return self._tokenizer.shown(np.array([token], np.int32))

    def count(self, name: str, n: float = 1.0) -> None:
        """Add to the numbers that the actor reports for environments."""
        try:
            self._episode.add_info({f"endpoint_{name}": n})
        except EnvironmentFault:
            log.debug("a number of the endpoint was not finite: %s", name)

    # --------------------------------------------------------------------------------------------------- to tokens

    @property
    def _tokenizer(self) -> TextTokenizer:
        return self._episode.tokenizer

    def _rendered(
        self, request: ChatRequest, tools: Sequence[Mapping[str, Any]] | None, lines: Sequence[_Line]
    ) -> tuple[tuple[str, ...], str, Int32s]:
        """Keys of the messages and of the tools, and the prompt [n]. Runs in a thread. Raises Refusal."""
        try:
            messages = [canonical(message) for message in request.messages]
            tools_key = json.dumps(tools or [], sort_keys=True)
            given = {name: value for name, value in (request.chat_template_kwargs or {}).items() if value is not None}
            if given:
                self._tokenizer.expect_read(given)
            keys = tuple(_key(message) for message in messages)
            tokenizer = self._tokenizer.with_template_kwargs(given)
            return keys, tools_key, self._chat_prompt(tokenizer, messages, keys, tools, tools_key, lines)
        except ValueError as error:
            raise Refusal("invalid_request", str(error)) from error
        except RecursionError as error:
            raise Refusal("invalid_request", "messages or tools: values are nested too deeply") from error

    def _chat_prompt(
        self,
        tokenizer: TextTokenizer,
        messages: Sequence[Message],
        keys: tuple[str, ...],
        tools: Sequence[Mapping[str, Any]] | None,
        tools_key: str,
        lines: Sequence[_Line],
    ) -> Int32s:
        """Raises ValueError for messages that the chat template refuses."""
        best: _Line | None = None
        for line in lines:  # of equally long ones the newest: the caller has read that
            n = len(line.messages)
            if line.tools == tools_key and 0 < n < len(keys) and line.messages == keys[:n]:
                best = line if best is None or n >= len(best.messages) else best
        new = messages if best is None else messages[len(best.messages) :]
        if best is not None and all(message["role"] != "assistant" for message in new):
            try:
                behind = tokenizer.chat_turns(new, tools, closed=best.closed, ended_by=int(best.token_ids[-1]))
            except ValueError as error:
                self._say_once(str(error))
            else:
                return np.concatenate([best.token_ids, behind])
        return tokenizer.chat_prompt(messages, tools)

    def _say_once(self, error: str) -> None:
        if error != self._template_error:
            self._template_error = error
            self._log.warning(f"a conversation is rendered as a whole, and so becomes a branch: {in_one_line(error)}")

    def _completion_prompt(
        self, prompt: str | Sequence[int | str | list[int]], lines: Sequence[_Line]
    ) -> tuple[Int32s, str]:
        """The token ids [n], and the text; the latter empty for token ids. Runs in a thread. Raises Refusal."""
        if isinstance(prompt, str):
            known = [line for line in lines if line.text and prompt.startswith(line.text)]
            if known:
                line = max(known, key=lambda each: len(each.text))
                try:
                    behind = self._tokenizer.encode(prompt[len(line.text) :], behind=line.token_ids)
                except ValueError as error:
                    self._say_once(str(error))
                else:
                    return np.concatenate([line.token_ids, behind]), prompt
            return self._checked_ids(self._tokenizer.encode_prompt(prompt).tolist(), "prompt"), prompt
        ids = [one for one in prompt if isinstance(one, int)]
        if len(ids) == len(prompt):
            return self._checked_ids(ids, "prompt"), ""
        match prompt:
            case [str() | [*_] as one]:
                return self._completion_prompt(one, lines)
            case _:
                raise Refusal("unsupported", f"prompt: got {len(prompt)} prompts, expected one per request")

    def _checked_ids(self, ids: Sequence[int], name: str) -> Int32s:
        limit = self._tokenizer.vocab_size
        if not ids:
            raise Refusal("invalid_request", f"{name}: got no tokens, expected at least one")
        if len(ids) > self.max_model_len:
            raise Refusal(
                "context_length_exceeded", f"{name}: got {len(ids)} tokens, expected at most {self.max_model_len}"
            )
        if not 0 <= min(ids) <= max(ids) < limit:
            raise Refusal("invalid_request", f"{name}: got ids {min(ids)} to {max(ids)}, expected 0 to {limit - 1}")
        return np.array(ids, np.int32)

    def _stop_ids(self, stop: Stop, stop_token_ids: Sequence[int] | None) -> tuple[int, ...]:
        ids = self._checked_ids(stop_token_ids, "stop_token_ids").tolist() if stop_token_ids else []
        for text in stops(stop):
            one = self._tokenizer.single_token(text)
            if one is None:
                raise Refusal(
                    "unsupported",
                    f"stop: {text!r} is not one added token of the student's tokenizer; a response that was cut in the "
                    "middle of a token could not be trained. Leave `stop` out, and cut the text that you read",
                )
            ids.append(one)
        return tuple(ids)

    # -------------------------------------------------------------------------------------------------- responses

    async def _generate(
        self, prompt_ids: Int32s, n: int, max_new_tokens: int | None, stop_ids: tuple[int, ...]
    ) -> list[Generation]:
        if self.closed:
            raise session_closed()
        if n > 1 and max_new_tokens is None:
            max_new_tokens = max(1, self._episode.budget_left // n)
        numbers = [self._episode.new_number() for _ in range(n)]
        asked = [
            asyncio.ensure_future(
                self._episode.ask(
                    prompt_ids,
                    max_new_tokens,
                    stop_ids,
                    retry=True,
                    choice_of=None if i == 0 else numbers[0],
                    number=number,
                )
            )
            for i, number in enumerate(numbers)
        ]
        try:
            return await asyncio.gather(*asked)
        except EpisodeOver as over:
            raise Refusal("context_length_exceeded", f"no more can be generated in this episode: {over}") from over
        finally:
            for one in asked:
                one.cancel()
            await asyncio.wait(asked)

    def _message(
        self, generation: Generation, tools: Sequence[Mapping[str, Any]] | None, thinking: bool
    ) -> tuple[Message, str]:
        """The assistant's message, and why it ends."""
        if not tools:
            return {"role": "assistant", "content": generation.text}, generation.finish_reason
        dialect = tool_dialect(self._tokenizer.chat_template)
        parsed = parse_tool_calls(generation.text, dialect, tools, thinking=thinking)
        if parsed.malformed:
            self.count("malformed_tool_calls", parsed.malformed)
        if not parsed.calls:
            return {"role": "assistant", "content": parsed.content}, generation.finish_reason
        calls = [
            {
                "id": f"call_{secrets.token_hex(6)}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in parsed.calls
        ]
        reason = "tool_calls" if generation.finish_reason == "stop" else generation.finish_reason
        return {"role": "assistant", "content": parsed.content or None, "tool_calls": calls}, reason

    def _answer(
        self, prompt_ids: Int32s, choices: list[Generation], messages: list[Message], reasons: list[str]
    ) -> Answer:
        name = secrets.token_hex(12)
        return Answer(name, int(time.time()), len(prompt_ids), prompt_ids, choices, messages, reasons)


def refusal_counts(code: Code) -> str:
    """Name under which refusals are counted: bounded by the codes."""
    return f"refused_{code}"


def _key(message: Message) -> str:
    """What two messages that say the same have in common. Frameworks make ids of calls anew, and drop the reasoning."""
    said = {name: message[name] for name in ("role", "content", "name") if name in message}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps([said, calls], sort_keys=True)
