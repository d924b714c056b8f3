"""Environments around agents that know nothing of Stillhouse: they speak to an OpenAI-compatible endpoint.

`openai_agent` calls a Python function, `command` starts a program. Each gets the episode's own endpoint and key, and
the prompt's row. The tokens are recorded by the endpoint (`actors.endpoint`); the agent says the reward, if any.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, Final, cast

from stillhouse.actors.agent import Context, Endpoint, options_checked_by
from stillhouse.actors.endpoint import MODEL
from stillhouse.actors.envs.base import EnvTask
from stillhouse.actors.envs.episode import EnvironmentFault
from stillhouse.protocol.children import kill_group
from stillhouse.protocol.plugins import load_callable

KEPT_BYTES: Final = 64 * 1024
"""What is kept of a program's output: its end."""
TAIL_LINES: Final = 5


class CommandFailed(RuntimeError):
    """The program of an agent failed; the message has its exit code and the end of what it wrote."""


def _check_agent(*, agent: str) -> None:
    load_callable(agent, "agent")


@options_checked_by(_check_agent)
async def openai_agent(ctx: Context, task: EnvTask, *, agent: str) -> None:
    """Call `agent` (`module:function`) with the row, the base URL, the key and the model's name. It may be a coroutine
    function; a plain one may block. It returns the reward, or None if there is none."""
    function = load_callable(agent, "agent")
    async with ctx.endpoint() as endpoint:
        returned = function(_row(task), endpoint.base_url, endpoint.api_key, MODEL)
        if inspect.isawaitable(returned):
            returned = await returned
    _reward(ctx, returned, f"{agent} returned")


def _check_command(*, argv: Any) -> None:
    if not (isinstance(argv, list) and argv and all(isinstance(word, str) for word in cast("list[Any]", argv))):
        raise ValueError(f"argv: got {argv!r}, expected a list of words, e.g. ['{{python}}', 'agent.py']")
    program = _argv(cast("list[str]", argv))[0]
    if shutil.which(program) is None:
        raise ValueError(f"argv: there is no program {program!r}")


@options_checked_by(_check_command)
async def command(ctx: Context, task: EnvTask, *, argv: Sequence[str]) -> None:
    """Start a program. OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL are in its environment, the row is JSON on its
    standard input. `{python}` in `argv` stands for this Python. If its last line of output is a JSON object with
    `reward`, that is the reward. It and all that it started in its process group end with the episode."""
    async with ctx.endpoint() as endpoint:
        output = await _run(_argv(argv), endpoint, json.dumps(_row(task)).encode())
    last = output.rstrip().rpartition("\n")[2]
    try:
        said = json.loads(last)
    except ValueError:
        return
    if isinstance(said, dict) and "reward" in said:
        _reward(ctx, said["reward"], "the program's last line says the reward")  # pyright: ignore[reportUnknownArgumentType]


def _argv(argv: Sequence[str]) -> list[str]:
    return [sys.executable if word == "{python}" else word for word in argv]


async def _run(argv: Sequence[str], endpoint: Endpoint, stdin: bytes) -> str:
    """The end of what the program wrote. Raises CommandFailed."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={
            **os.environ,
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
            "OPENAI_MODEL": MODEL,
        },
    )
    assert process.stdin and process.stdout and process.stderr
    try:
        output, errors, _ = await asyncio.gather(
            _end_of(process.stdout), _end_of(process.stderr), _feed(process.stdin, stdin)
        )
        code = await process.wait()
    finally:
        kill_group(process.pid)
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined] - children that left the group may keep the pipes open
    if code:
        tail = " | ".join(errors.strip().splitlines()[-TAIL_LINES:]) or "nothing on stderr"
        raise CommandFailed(f"{argv[0]} ended with exit code {code}: {tail}")
    return output


async def _end_of(stream: asyncio.StreamReader) -> str:
    kept = b""
    while chunk := await stream.read(KEPT_BYTES):
        kept = (kept + chunk)[-KEPT_BYTES:]
    return kept.decode(errors="replace")


async def _feed(stdin: asyncio.StreamWriter, data: bytes) -> None:
    try:
        stdin.write(data)
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        return  # the program does not read its row


def _row(task: EnvTask) -> dict[str, Any]:
    return {"ground_truth": task.ground_truth, "seed": task.seed, **task.row}


def _reward(ctx: Context, value: object, where: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EnvironmentFault(f"{where} {value!r:.60}, expected a number, or None")
    ctx.reward(value)
