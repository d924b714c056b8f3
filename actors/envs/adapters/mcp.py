"""Tools of MCP servers (package mcp, tried: 2.3.0; docs/agents/mcp.md).

What cannot be called is answered with an error that the student reads.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from stillhouse.actors.agent import Context, EpisodeOver, options_checked_by
from stillhouse.actors.envs.adapters import address
from stillhouse.actors.envs.adapters.shared.packages import import_package
from stillhouse.actors.envs.base import EnvTask
from stillhouse.actors.envs.tool_loop import Tools, converse, read_notation, tool_schema
from stillhouse.actors.rewards.answer import ANSWER_PATTERN, AnswerCheck
from stillhouse.actors.row_options import row_may_set
from stillhouse.actors.tool_calls import ToolCall

_mcp = import_package("mcp", environment="mcp", package="mcp", extra="mcp")

MAX_RESULT: Final = 20_000
"""Characters of a tool's result that the student reads."""
START: Final = ".venv/bin/python examples/agents/mcp_calculator.py --port 8931 (the example's; docs/agents/mcp.md)"
MAX_DEPTH: Final = 32
"""Levels of nesting in a call's arguments."""


def _check(
    *,
    url: str = "",
    url_env: str = "",
    command: Sequence[str] = (),
    tools: Sequence[str] = (),
    notation: Mapping[str, str] | None = None,
    call_timeout_s: float = 20.0,
    answer_pattern: str = ANSWER_PATTERN,
) -> None:
    if bool(address(url, url_env)) == bool(command):
        raise ValueError("mcp needs either `url` or `url_env` (a server that runs) or `command` (one per episode)")
    if command and shutil.which(_argv(command)[0]) is None:
        raise ValueError(f"command: there is no program {_argv(command)[0]!r}")
    if call_timeout_s <= 0:
        raise ValueError(f"call_timeout_s: got {call_timeout_s}, expected more than 0")
    read_notation(notation)
    AnswerCheck(answer_pattern)


@row_may_set("answer_pattern")
@options_checked_by(_check, server=("url", START))
async def mcp(
    ctx: Context,
    task: EnvTask,
    *,
    url: str = "",
    url_env: str = "",
    command: Sequence[str] = (),
    tools: Sequence[str] = (),
    notation: Mapping[str, str] | None = None,
    call_timeout_s: float = 20.0,
    answer_pattern: str = ANSWER_PATTERN,
) -> None:
    """One conversation with a server's tools. `url`: a server that speaks streamable HTTP; `url_env`: the environment
    variable with its URL, for one with credentials. `command`: one that is
    started for the episode and speaks stdio; `{python}` stands for this Python. `tools`: the only ones to offer.
    `notation`: see `actors.envs.tool_loop.Notation`. The reward is that of single_turn, for the last turn."""
    argv = _argv(command)
    target = address(url, url_env) or _mcp.StdioServerParameters(command=argv[0], args=argv[1:])
    reached = False
    try:
        async with _mcp.Client(target, read_timeout_seconds=call_timeout_s) as client:
            reached = True
            offered = [tool for tool in await _all_tools(client) if not tools or tool.name in tools]
            if missing := set(tools) - {tool.name for tool in offered}:
                raise ValueError(f"tools: the server has no {sorted(missing)}")
            server = _Server(client, offered, ctx)
            try:
                ended = await converse(ctx, task, server, read_notation(notation))
            except EpisodeOver:  # as it is, and not in a group: see below
                ended = None
    except (Exception, BaseExceptionGroup) as error:  # a group: of the client's own tasks
        found = _first(error)
        if found is error and reached:
            raise
        if reached or not isinstance(found, Exception):
            raise found from error
        where = f"the MCP server at {urlsplit(url)._replace(query='').geturl().rpartition('@')[2]}" if url else argv[0]
        raise ConnectionError(f"{where} cannot be reached: {type(found).__name__}: {found}") from error
    if ended is None:
        raise EpisodeOver("not even the first turn had room")
    reward = AnswerCheck(answer_pattern).reward(ended.last.text, task.ground_truth)
    if reward is not None:
        ctx.reward(reward)
    if ended.over:
        raise EpisodeOver("turns or tokens are used up")


class _Server(Tools):
    def __init__(self, client: Any, offered: Sequence[Any], ctx: Context) -> None:
        schemas = [tool_schema(tool.name, tool.description or "", tool.input_schema) for tool in offered]
        super().__init__(ctx, "mcp", schemas, sorted(tool.name for tool in offered))
        self._client = client

    async def run(self, call: ToolCall) -> str:
        if not _can_be_sent(call.arguments):
            return self.wrong("the arguments are no text that can be sent, or are nested too deeply")
        try:
            result = await self._client.call_tool(call.name, call.arguments)
        except _mcp.MCPError as error:
            return self.wrong(str(error))
        text = _text(result)
        return self.wrong(text) if result.is_error else text

    def wrong(self, what: str) -> str:
        return super().wrong(what)[:MAX_RESULT]


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


async def _all_tools(client: Any) -> list[Any]:
    listed: list[Any] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        listed += page.tools
        cursor = page.next_cursor
        if not cursor:
            return listed


def _text(result: Any) -> str:
    parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
    text = "\n".join(parts) or json.dumps(result.structured_content)
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]}\n[{len(text) - MAX_RESULT} more characters]"


def _argv(command: Sequence[str]) -> list[str]:
    return [sys.executable if word == "{python}" else word for word in command]


def _first(error: BaseException) -> BaseException:
    found = error
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return found  # pyright: ignore[reportUnknownVariableType]
