"""A conversation with tools: the student calls them as often as its turns last.

The tools' schemas go into the chat template, and calls are read in the notation that the template teaches. A student
that was taught none may have a notation of its own, for one tool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from stillhouse.actors.agent import Context, EpisodeOver, Generation
from stillhouse.actors.envs.base import EnvTask, TextTokenizer
from stillhouse.actors.rewards.pattern import BoundedPattern
from stillhouse.actors.tool_calls import ToolCall, parse_tool_calls, tool_dialect
from stillhouse.engines.base import Int32s

NOTATION: Final = ("pattern", "tool", "argument", "stop", "result")
SEARCH_S: Final = 1.0
"""Longest search for a call in a turn. After it the rollout fails (TimeoutError)."""


class Tools:
    """What a student may call in one episode."""

    def __init__(self, ctx: Context, counted: str, schemas: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
        """`schemas`: the tools as chat templates take them (`tool_schema`). `names`: theirs, as errors list them. Calls
        and mistakes are counted as `<counted>_calls` and `<counted>_errors`."""
        self.ctx = ctx
        self.schemas = schemas
        self.done = False
        """The tools' side has ended the conversation: no turn follows."""
        self._counted = counted
        self._names = names

    async def call(self, call: ToolCall) -> str:
        """What the student reads."""
        self.ctx.note(**{f"{self._counted}_calls": 1.0})
        if call.name not in self._names:
            return self.wrong(f"there is no tool {call.name[:80]!r}; there are: {', '.join(self._names)}")
        return await self.run(call)

    async def run(self, call: ToolCall) -> str:
        """The same, for one of the tools."""
        raise NotImplementedError

    def wrong(self, what: str) -> str:
        """What the student reads of a call that cannot be made; it is counted."""
        self.ctx.note(**{f"{self._counted}_errors": 1.0})
        return f"error: {what}"


def tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """One tool as chat templates take it."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class Notation(NamedTuple):
    """How a student that knows no JSON calls one tool: `<calc>12+34</calc>` calls `calculate` with `expression`."""

    pattern: BoundedPattern
    """Its group is the argument."""
    tool: str
    argument: str
    stop: str
    """The turn stops behind this token, and goes on behind the result."""
    result: str
    """Shows a result; `{}` stands for it."""


def read_notation(given: Mapping[str, str] | None) -> Notation | None:
    """The option of that name. Raises ValueError."""
    if given is None:
        return None
    if sorted(given) != sorted(NOTATION):
        raise ValueError(f"notation: got the keys {sorted(given)}, expected {sorted(NOTATION)}")
    pattern = BoundedPattern(given["pattern"], SEARCH_S, option="notation.pattern", groups=1, dotall=True)
    if "{}" not in given["result"]:
        raise ValueError(f"notation.result: got {given['result']!r}, expected {{}} in it, where the result stands")
    return Notation(pattern, given["tool"], given["argument"], given["stop"], given["result"])


class Conversation(NamedTuple):
    """How a conversation ended."""

    last: Generation
    """The student's last turn."""
    messages: list[dict[str, Any]]
    """What followed the prompt: turns of the student (`content`, `tool_calls`) and results (`name`, `content`)."""
    over: bool
    """Turns or tokens are used up: `EpisodeOver` is still to be raised."""


async def converse(ctx: Context, task: EnvTask, tools: Tools, notation: Notation | None) -> Conversation:
    """Let the student call tools until it ends a turn without a call. Raises EpisodeOver if not even the first turn had
    room."""
    said: list[Generation] = []
    messages: list[dict[str, Any]] = []
    try:
        if notation is None:
            await _by_template(ctx, task, tools, said, messages)
        else:
            await _by_notation(ctx, tools, notation, said, messages)
    except EpisodeOver:
        if not said:
            raise
        return Conversation(said[-1], messages, over=True)
    return Conversation(said[-1], messages, over=False)


async def _by_template(
    ctx: Context, task: EnvTask, tools: Tools, said: list[Generation], messages: list[dict[str, Any]]
) -> None:
    tokenizer = ctx.tokenizer
    line = ctx.root(_prompt(tokenizer, task, [*tools.schemas]))
    dialect = tool_dialect(tokenizer.chat_template)
    while True:
        thinking = tokenizer.opens_reasoning(line.token_ids)
        turn = await line.generate()
        said.append(turn)
        parsed = parse_tool_calls(turn.text, dialect, tools.schemas, thinking=thinking)
        messages.append(_message(parsed.content, parsed.calls))
        if turn.finish_reason == "length" or not (parsed.calls or parsed.malformed):
            return
        results = [await _result(tools, call, messages) for call in parsed.calls]
        if parsed.malformed:
            results.append(
                tools.wrong("a tool call could not be read; expected a name and arguments, as you were shown")
            )
        if tools.done:
            return
        line.observe(_tool_turns(tokenizer, tools.schemas, results, turn))


async def _by_notation(
    ctx: Context, tools: Tools, notation: Notation, said: list[Generation], messages: list[dict[str, Any]]
) -> None:
    stop = ctx.tokenizer.single_token(notation.stop)
    stops = () if stop is None else (stop,)
    while True:
        turn = await ctx.generate(stop_token_ids=stops)
        said.append(turn)
        argument = notation.pattern.last_group_here(turn.text)
        calls = [] if argument is None else [ToolCall(notation.tool, {notation.argument: argument})]
        messages.append(_message(turn.text, calls))
        if not calls or turn.finish_reason == "length":
            return
        result = await _result(tools, calls[0], messages)
        if tools.done:
            return
        in_turn = stop is not None and int(turn.token_ids[-1]) == stop
        ctx.observe(notation.result.replace("{}", result), role=None if in_turn else "user")


def _message(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    written = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    return {"role": "assistant", "content": content} | ({"tool_calls": written} if written else {})


async def _result(tools: Tools, call: ToolCall, messages: list[dict[str, Any]]) -> str:
    """A call that is made unless the conversation has ended."""
    result = tools.wrong("the conversation has ended") if tools.done else await tools.call(call)
    messages.append({"role": "tool", "name": call.name, "content": result})
    return result


def _prompt(tokenizer: TextTokenizer, task: EnvTask, schemas: list[dict[str, Any]]) -> Int32s:
    """Token ids [n]: the row's messages, with the tools where the chat template puts them, else as text before them."""
    given = task.row.get("messages") or [{"role": "user", "content": task.row.get("prompt", "")}]
    messages: list[dict[str, Any]] = [dict(message) for message in given]
    if tokenizer.has_template:
        with_tools = tokenizer.chat_prompt(messages, schemas)
        if with_tools.tolist() != tokenizer.chat_prompt(messages).tolist():
            return with_tools
    listed = "\n".join(json.dumps(schema["function"]) for schema in schemas)
    listing = f'Tools:\n{listed}\nTo call one, write only {{"name": ..., "arguments": {{...}}}}.\n\n'
    at = next((i for i, message in enumerate(messages) if message["role"] in ("system", "user")), 0)
    said: Any = messages[at]["content"]
    messages[at]["content"] = [{"type": "text", "text": listing}, *said] if isinstance(said, list) else listing + said
    return tokenizer.chat_prompt(messages)


def _tool_turns(
    tokenizer: TextTokenizer, tools: Sequence[Mapping[str, Any]], results: Sequence[str], turn: Generation
) -> Int32s:
    """Token ids [n] of the results of a turn, as tool turns, or as one of the user's where the template knows no such
    turns."""
    if not tokenizer.has_template:
        return tokenizer.encode(tokenizer.plain("\n" + "\n".join(results) + "\n"), behind=turn.token_ids)
    closed, ended_by = turn.finish_reason == "stop", int(turn.token_ids[-1])
    try:
        new = [{"role": "tool", "content": text} for text in results]
        return tokenizer.chat_turns(new, tools, closed=closed, ended_by=ended_by)
    except ValueError:
        new = [{"role": "user", "content": "\n".join(results)}]
        return tokenizer.chat_turns(new, tools, closed=closed, ended_by=ended_by)
