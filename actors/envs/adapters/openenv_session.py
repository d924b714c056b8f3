"""Sessions of OpenEnv's harness (`ResourceSession`, tried: openenv 0.10.0), whose tools the student calls
(docs/agents/openenv.md).

The session runs in the actor, and only by its methods: nothing of the package is imported here. Your module imports it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from stillhouse.actors.agent import Context, EpisodeOver, options_checked_by
from stillhouse.actors.envs.base import EnvTask
from stillhouse.actors.envs.episode import EnvironmentFault
from stillhouse.actors.envs.tool_loop import Tools, converse, read_notation, tool_schema
from stillhouse.actors.tool_calls import ToolCall
from stillhouse.protocol.plugins import load_callable


def _check(
    *, factory: str, options: Mapping[str, Any] | None = None, notation: Mapping[str, str] | None = None
) -> None:
    _maker(factory)
    read_notation(notation)


@options_checked_by(_check)
async def openenv_session(
    ctx: Context,
    task: EnvTask,
    *,
    factory: str,
    options: Mapping[str, Any] | None = None,
    notation: Mapping[str, str] | None = None,
) -> None:
    """One session of a ResourceSessionFactory. `factory`: `module:name` of a class or function that makes it, with
    `options` as its keyword arguments. `notation`: see `actors.envs.tool_loop.Notation`. The session gets the row's
    column `task`, or the whole row."""
    made = _maker(factory)(**(options or {}))
    # The episode has a thread of its own, so the session may block.
    with closing(made.create(task.row.get("task", task.row), seed=task.seed, episode_id=task.rollout_id)) as session:
        messages = [dict(message) for message in session.initial_messages()]
        tools = _Tools(ctx, session)
        asked = dataclasses.replace(task, row={**task.row, "messages": messages})
        ended = await converse(ctx, asked, tools, read_notation(notation))
        verified = session.verify([*messages, *ended.messages])
    reward = _agreed(tools.reward, None if verified.env_reward is None else float(verified.env_reward))
    if reward is not None:
        ctx.reward(reward)
    for name, value in (verified.metrics or {}).items():
        if isinstance(value, int | float) and math.isfinite(value):
            ctx.note(**{f"openenv_{name}": float(value)})
    if ended.over:
        raise EpisodeOver("turns or tokens are used up")


def _maker(factory: str) -> Callable[..., Any]:
    return load_callable(factory, "factory", "a class or a function")


def _agreed(of_tools: float | None, of_verify: float | None) -> float | None:
    """The environment's reward, which `verify` may only repeat."""
    if of_tools is not None and of_verify is not None and not math.isclose(of_tools, of_verify, abs_tol=1e-6):
        raise EnvironmentFault(
            f"verify said the reward {of_verify}, the last tool result {of_tools}: expected the same"
        )
    return of_verify if of_tools is None else of_tools


class _Tools(Tools):
    def __init__(self, ctx: Context, session: Any) -> None:
        listed: Sequence[Any] = session.list_tools()
        schemas = [tool_schema(tool.name, tool.description, tool.input_schema) for tool in listed]
        super().__init__(ctx, "openenv", schemas, sorted(tool.name for tool in listed))
        self._session = session
        self.reward: float | None = None
        """The last that a tool's result had."""

    async def run(self, call: ToolCall) -> str:
        result = self._session.call_tool(call.name, call.arguments)
        data, metadata = result.data, result.metadata or {}
        reward = metadata.get("reward", data.get("reward") if isinstance(data, Mapping) else None)
        if reward is not None:
            self.reward = float(reward)
        self.done = bool(result.done)
        if result.error:
            return self.wrong(str(result.error))
        return data if isinstance(data, str) else "" if data is None else json.dumps(data, sort_keys=True, default=str)
