"""Environments behind a server of OpenEnv (tried: 0.10.0), over its WebSocket (docs/agents/openenv.md).

The server runs in a Python environment of its own, because OpenEnv's dependencies do not fit beside those of others;
what is needed here is a WebSocket. One session of the server is one rollout, and each turn of the student an action.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import aiohttp

from stillhouse.actors.agent import Context, options_checked_by
from stillhouse.actors.envs.adapters import address
from stillhouse.actors.envs.adapters.shared.chat import own_prompt, whole_number
from stillhouse.actors.envs.base import EnvTask
from stillhouse.actors.envs.single_turn import AnswerCheck
from stillhouse.actors.row_options import row_may_set

OBSERVATION_PLACE: Final = "{observation}"
"""Stands for the first observation in a row's prompt; without it that follows the prompt."""
TEXT_PLACE: Final = "{text}"
"""Stands for the student's turn in an action."""
START: Final = (
    ".venv-openenv/bin/uvicorn --app-dir examples/agents openenv_sums:app --port 8765 (the example's; "
    "docs/agents/openenv.md)"
)
MAX_MESSAGE_BYTES: Final = 16 << 20
RETRY_S: Final = 0.2
"""Between two attempts to get a session of a server that has no more."""


class OpenEnvError(Exception):
    """The server did not do what it was asked; the message has its code and its words."""


class _Invalid(Exception):
    """The server refused the form of an action."""


class _Full(Exception):
    """All sessions of the server are in use."""


class _Step(NamedTuple):
    """What the server answers to a reset or an action."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


def _check(
    *,
    url: str = "",
    url_env: str = "",
    action: Mapping[str, Any] | None = None,
    fields: Sequence[str] = (),
    answer_pattern: str | None = None,
    reset: Mapping[str, Any] | None = None,
) -> None:
    """Raises ValueError for a URL of another kind, and for an action without a place for the student's turn."""
    if not address(url, url_env).startswith(("http://", "https://")):
        shown = "another address" if url_env else repr(url)
        raise ValueError(f"url: got {shown}, expected the server's address, such as http://127.0.0.1:8000")
    if action is not None and TEXT_PLACE not in json.dumps(action):
        raise ValueError(f"action: got {dict(action)}, expected {TEXT_PLACE} in it, in place of the student's turn")
    if answer_pattern is not None:
        AnswerCheck(answer_pattern)


@row_may_set("reset", "answer_pattern")
@options_checked_by(_check, server=("url", START))
async def openenv(
    ctx: Context,
    task: EnvTask,
    *,
    url: str = "",
    url_env: str = "",
    action: Mapping[str, Any] | None = None,
    fields: Sequence[str] = (),
    answer_pattern: str | None = None,
    reset: Mapping[str, Any] | None = None,
) -> None:
    """`url`: the server's address; `url_env`: the environment variable with it, for one with credentials. `action`:
    what it gets for a turn, with `{text}` for the student's text; by default `{message = "{text}"}`. `fields`: those of
    an observation that the student reads, in this order; empty: all, as JSON. `answer_pattern`: a regular expression
    with one group; its last match is sent instead of the whole turn. `reset`: what the server's reset gets beside the
    seed."""
    _check(url=url, url_env=url_env, action=action, answer_pattern=answer_pattern)
    seed = whole_number(task.row, "seed")
    begin = {"seed": task.seed if seed is None else seed} | dict(reset or {})
    answers = AnswerCheck(answer_pattern) if answer_pattern else None
    async with aiohttp.ClientSession() as http:
        socket, begun = await _session(http, address(url, url_env), begin)
        async with socket:
            text = _text(begun.observation, fields)
            line = ctx.root(own_prompt(ctx.tokenizer, task.row, text, place=OBSERVATION_PLACE))
            done = begun.done
            while not done:
                turn = await line.generate()
                said = turn.text if answers is None else answers.find(turn.text) or ""
                try:
                    step = await _ask(socket, "step", _filled(action or {"message": TEXT_PLACE}, said))
                except _Invalid as error:
                    ctx.note(openenv_invalid_actions=1.0)
                    heard = f"Invalid action: {error}"
                else:
                    ctx.note(openenv_steps=1.0)
                    if step.reward is not None:
                        line.reward(step.reward)
                    done, heard = step.done, _text(step.observation, fields)
                if not done:
                    line.observe(heard if ctx.tokenizer.has_template else f"\n{heard}\n")
            await socket.send_json({"type": "close"})


async def _session(
    http: aiohttp.ClientSession, url: str, begin: Mapping[str, Any]
) -> tuple[aiohttp.ClientWebSocketResponse, _Step]:
    """A session of the server, and what it begins with. Waits while the server has none free: the caller's deadline
    ends that. Raises OpenEnvError, and aiohttp.ClientError for a server that cannot be reached."""
    while True:
        socket = await http.ws_connect(f"{url.rstrip('/')}/ws", heartbeat=20.0, max_msg_size=MAX_MESSAGE_BYTES)
        try:
            return socket, await _ask(socket, "reset", begin)
        except _Full:
            await socket.close()
            await asyncio.sleep(RETRY_S)
        except BaseException:
            await socket.close()
            raise


async def _ask(socket: aiohttp.ClientWebSocketResponse, kind: str, data: Mapping[str, Any]) -> _Step:
    """One request and its answer. Raises _Invalid, _Full and OpenEnvError."""
    await socket.send_json({"type": kind, "data": data})
    message = await socket.receive()
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise OpenEnvError(f"the server closed the session after a {kind} ({message.type.name})")
    answer: dict[str, Any] = json.loads(message.data)
    said: Mapping[str, Any] = answer.get("data") or {}
    match answer.get("type"), said.get("code"):
        case "observation", _:
            reward = said.get("reward")
            return _Step(said.get("observation") or {}, None if reward is None else float(reward), bool(said["done"]))
        case "error", "CAPACITY_REACHED":
            raise _Full
        case "error", "VALIDATION_ERROR" if kind == "step":
            first: Mapping[str, Any] = next(iter(said.get("errors") or ()), {})
            raise _Invalid(str(first.get("msg") or said.get("message")))
        case _, code:
            raise OpenEnvError(f"{kind}: {code or answer.get('type')}: {said.get('message')}")


def _filled(action: Mapping[str, Any], said: str) -> dict[str, Any]:

    def fill(value: Any) -> Any:
        match value:
            case str():
                return value.replace(TEXT_PLACE, said)
            case Mapping():
                return {name: fill(part) for name, part in value.items()}
            case list():
                return [fill(part) for part in value]
            case _:
                return value

    return {name: fill(value) for name, value in action.items()}


def _text(observation: Mapping[str, Any], fields: Sequence[str]) -> str:
    """An observation as the student reads it. Raises OpenEnvError for a field that it does not have."""
    if not fields:
        return json.dumps({name: value for name, value in observation.items() if value or name != "metadata"})
    if missing := [name for name in fields if name not in observation]:
        raise OpenEnvError(f"the observation has no {missing}; it has: {', '.join(observation)}")
    values = [observation[name] for name in fields]
    return "\n".join(value if isinstance(value, str) else json.dumps(value) for value in values)
