"""Tools of MCP servers (package mcp, tried: 2.3.0): the student calls them as often as its turns last
(docs/agents/mcp.md).

The tools' schemas go into the chat template. Calls are read in the notation that the template teaches, or in one that
the options describe. What cannot be called is answered with an error that the student reads.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from actors.agent import Context, EpisodeOver, Generation, options_checked_by
from actors.envs.adapters.packages import import_package
from actors.envs.base import EnvTask, TextTokenizer
from actors.rewards.answer import ANSWER_PATTERN, AnswerCheck
from actors.tool_calls import ToolCall, parse_tool_calls, tool_dialect

_mcp = import_package("mcp", environment="mcp", package="mcp", extra="mcp")

MAX_RESULT: Final = 20_000
"""Characters of a tool's result that the student reads."""
MAX_DEPTH: Final = 32
"""Levels of nesting in a call's arguments."""
NOTATION: Final = ("pattern", "tool", "argument", "stop", "result")


class _Notation(NamedTuple):
    """How a student that knows no JSON calls one tool: `<calc>12+34</calc>` calls `calculate` with `expression`."""

    pattern: re.Pattern[str]
    tool: str
    argument: str
    stop: str
    """The turn stops behind this token, and goes on behind the result."""
    result: str
    """Shows a result; `{}` stands for it."""


def _notation(given: Mapping[str, str]) -> _Notation:
    """Raises ValueError."""
    if sorted(given) != sorted(NOTATION):
        raise ValueError(f"notation: got the keys {sorted(given)}, expected {sorted(NOTATION)}")
    try:
        pattern = re.compile(given["pattern"], re.DOTALL)
    except re.error as error:
        raise ValueError(f"notation.pattern {given['pattern']!r} is not a regular expression: {error}") from error
    if pattern.groups != 1 or "{}" not in given["result"]:
        raise ValueError("notation: expected a pattern with one group, the argument, and {} in `result`")
    return _Notation(pattern, given["tool"], given["argument"], given["stop"], given["result"])


def _check(
    *,
    url: str = "",
    command: Sequence[str] = (),
    tools: Sequence[str] = (),
    notation: Mapping[str, str] | None = None,
    call_timeout_s: float = 20.0,
    answer_pattern: str = ANSWER_PATTERN,
) -> None:
    if bool(url) == bool(command):
        raise ValueError("mcp needs either `url` (a server that runs) or `command` (one per episode)")
    if command and shutil.which(_argv(command)[0]) is None:
        raise ValueError(f"command: there is no program {_argv(command)[0]!r}")
    if call_timeout_s <= 0:
        raise ValueError(f"call_timeout_s: got {call_timeout_s}, expected more than 0")
    if notation is not None:
        _notation(notation)
    AnswerCheck(answer_pattern)


@options_checked_by(_check)
async def mcp(
    ctx: Context,
    task: EnvTask,
    *,
    url: str = "",
    command: Sequence[str] = (),
    tools: Sequence[str] = (),
    notation: Mapping[str, str] | None = None,
    call_timeout_s: float = 20.0,
    answer_pattern: str = ANSWER_PATTERN,
) -> None:
    """One conversation with a server's tools. `url`: a server that speaks streamable HTTP. `command`: one that is
    started for the episode and speaks stdio; `{python}` stands for this Python. `tools`: the only ones to offer.
    `notation`: see _Notation. The reward is that of single_turn, for the last turn."""
    argv = _argv(command)
    target = url or _mcp.StdioServerParameters(command=argv[0], args=argv[1:])
    last: list[Generation] = []
    try:
        async with _mcp.Client(target, read_timeout_seconds=call_timeout_s) as client:
            offered = [tool for tool in await _all_tools(client) if not tools or tool.name in tools]
            if missing := set(tools) - {tool.name for tool in offered}:
                raise ValueError(f"tools: the server has no {sorted(missing)}")
            server = _Server(client, {tool.name for tool in offered}, ctx)
            try:
                if notation is None:
                    await _by_template(ctx, task, server, offered, last)
                else:
                    await _by_notation(ctx, server, _notation(notation), last)
            except EpisodeOver:  # judged like an answer; without even a first response it is told below
                server.over = True
    except BaseExceptionGroup as group:  # of the client's own tasks
        raise _first(group) from group
    if not last:
        raise EpisodeOver("not even the first turn had room")
    reward = AnswerCheck(answer_pattern).reward(last[-1].text, task.ground_truth)
    if reward is not None:
        ctx.reward(reward)
    if server.over:
        raise EpisodeOver("turns or tokens are used up")


class _Server:
    """Calls the tools, and counts."""

    def __init__(self, client: Any, names: set[str], ctx: Context) -> None:
        self._client = client
        self._names = names
        self._ctx = ctx
        self.over = False

    async def call(self, call: ToolCall) -> str:
        """What the student reads."""
        self._ctx.note(mcp_calls=1.0)
        if call.name not in self._names:
            return self.wrong(f"there is no tool {call.name[:80]!r}; there are: {', '.join(sorted(self._names))}")
        if not _can_be_sent(call.arguments):
            return self.wrong("the arguments are no text that can be sent, or are nested too deeply")
        try:
            result = await self._client.call_tool(call.name, call.arguments)
        except _mcp.MCPError as error:
            return self.wrong(str(error))
        text = _text(result)
        return self.wrong(text) if result.is_error else text

    def wrong(self, what: str) -> str:
        self._ctx.note(mcp_errors=1.0)
        return f"error: {what}"[:MAX_RESULT]


def _can_be_sent(arguments: Mapping[str, Any]) -> bool:
    """False for text that is no Unicode (half a character, as `"\\ud800"` in JSON), and for deep nesting: the client
    itself would end."""
    depth, values = 0, list[Any](arguments.values())
    while values:
        depth += 1
        if depth > MAX_DEPTH:
            return False
        inner: list[Any] = []
        for value in values:
            if isinstance(value, dict | list):
                inner += value.values() if isinstance(value, dict) else value  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        values = inner
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


async def _by_template(
    ctx: Context, task: EnvTask, server: _Server, offered: Sequence[Any], last: list[Generation]
) -> None:
    tokenizer = ctx.tokenizer
    schemas = [_schema(tool) for tool in offered]
    line = ctx.root(_prompt(tokenizer, task, schemas))
    dialect = tool_dialect(tokenizer.chat_template)
    while True:
        turn = await line.generate()
        last.append(turn)
        parsed = parse_tool_calls(turn.text, dialect, schemas)
        if turn.finish_reason == "length" or not (parsed.calls or parsed.malformed):
            return
        results = [await server.call(call) for call in parsed.calls]
        if parsed.malformed:
            results.append(
                server.wrong("a tool call could not be read; expected a name and arguments, as you were shown")
            )
        line.observe(_tool_turns(tokenizer, results, closed=turn.finish_reason == "stop"))


async def _by_notation(ctx: Context, server: _Server, notation: _Notation, last: list[Generation]) -> None:
    stop = ctx.tokenizer.single_token(notation.stop)
    stops = () if stop is None else (stop,)
    while True:
        turn = await ctx.generate(stop_token_ids=stops)
        last.append(turn)
        found = notation.pattern.findall(turn.text)
        if not found or turn.finish_reason == "length":
            return
        result = await server.call(ToolCall(notation.tool, {notation.argument: found[-1]}))
        in_turn = stop is not None and int(turn.token_ids[-1]) == stop
        ctx.observe(notation.result.replace("{}", result), role=None if in_turn else "user")


def _prompt(tokenizer: TextTokenizer, task: EnvTask, schemas: list[dict[str, Any]]) -> Any:
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
    messages[at]["content"] = f"{listing}{messages[at]['content']}"
    return tokenizer.chat_prompt(messages)


def _tool_turns(tokenizer: TextTokenizer, results: Sequence[str], *, closed: bool) -> Any:
    """Token ids [n] of the results, as tool turns, or as one of the user's where the template knows no such turns."""
    if not tokenizer.has_template:
        return tokenizer.encode("\n" + "\n".join(results) + "\n")
    try:
        return tokenizer.chat_turns([{"role": "tool", "content": text} for text in results], closed=closed)
    except ValueError:
        return tokenizer.chat_turns([{"role": "user", "content": "\n".join(results)}], closed=closed)


async def _all_tools(client: Any) -> list[Any]:
    listed: list[Any] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        listed += page.tools
        cursor = page.next_cursor
        if not cursor:
            return listed


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text(result: Any) -> str:
    """The text of a result; other content is named."""
    parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
    text = "\n".join(parts) or json.dumps(result.structured_content)
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]}\n[{len(text) - MAX_RESULT} more characters]"


def _argv(command: Sequence[str]) -> list[str]:
    return [sys.executable if word == "{python}" else word for word in command]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return found  # pyright: ignore[reportUnknownVariableType]
