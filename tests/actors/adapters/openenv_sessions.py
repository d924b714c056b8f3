"""A counter as a ResourceSession of the package openenv: the student adds to it until it stops at a goal."""

from __future__ import annotations

from typing import Any

from openenv.core.env_server.mcp_types import Tool  # pyright: ignore
from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, VerifyResult  # pyright: ignore

CLOSED: list[str] = []
VERIFIED: list[list[dict[str, Any]]] = []


class Counter(ResourceSession):  # pyright: ignore
    def __init__(self, task: Any, seed: int | None, episode_id: str | None, lies: bool) -> None:
        self._goal, self._seed, self._id, self._lies = int(task["goal"]), seed, str(episode_id), lies
        self._sum = 0

    def initial_messages(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": f"seed {self._seed}"}, {"role": "user", "content": f"reach {self._goal}"}]

    def list_tools(self) -> list[Any]:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        return [Tool(name="add", description="adds to the counter", input_schema=schema)]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        if not isinstance(arguments.get("n"), int):
            return ToolResult(error="n: expected a whole number")
        self._sum += arguments["n"]
        done = self._sum >= self._goal
        metadata = {"reward": float(self._sum == self._goal)} if done else {}
        return ToolResult(data={"sum": self._sum}, done=done, metadata=metadata)

    def verify(self, transcript: list[dict[str, Any]], final_state: Any = None) -> Any:
        VERIFIED.append(transcript)
        reached = float(self._sum == self._goal)
        return VerifyResult(env_reward=reached + float(self._lies), done=True, metrics={"sum": self._sum, "who": "me"})

    def close(self) -> None:
        CLOSED.append(self._id)


class Counters(ResourceSessionFactory):  # pyright: ignore
    def __init__(self, lies: bool = False) -> None:
        self._lies = lies

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Counter:
        return Counter(task, seed, episode_id, self._lies)
