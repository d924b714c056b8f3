"""An environment of verifiers, used by verifiers.toml: a sum that is asked again after a wrong answer.

It is written with verifiers' own classes and knows nothing of Stillhouse; verifiers_server.py serves it.
"""

import random
import re

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(answers(trace.assistant_messages[-1].content) == [self.data.answer])

    @vf.metric
    async def tries(self, trace) -> float:
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):
    seed: int = 0


class Sums(vf.Taskset[SumsTask, SumsConfig]):
    INFINITE = True

    def load(self):
        draw = random.Random(self.config.seed)
        while True:
            left, right = draw.randint(10, 99), draw.randint(10, 99)
            yield SumsTask(SumsData(prompt=f"{left}+{right}=", answer=str(left + right)), self.config.task)


class ChatConfig(vf.HarnessConfig):
    pass


class Chat(vf.Harness[ChatConfig]):
    """A conversation without tools, in this process. The package's own `null` starts a program for each turn."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    http = httpx.AsyncClient(timeout=None)  # one for all episodes: a client costs as much time as three of them

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        _, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [m.model_dump() for m in prompt]
        headers = {"Authorization": f"Bearer {secret}"}
        body = {"model": ctx.model, "messages": said}
        reply = await self.http.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return ProgramResult(exit_code=0 if reply.is_success else 1, stdout="", stderr=reply.text)


class SumsEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=SubprocessConfig())
    tries: int = 2


class SumsEnv(vf.Env[SumsEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            turn = await interaction.turn()
            for _ in range(self.config.tries - 1):
                if turn.terminated or answers(turn.last_reply) == [task.data.answer]:
                    break
                turn = await interaction.turn(task.data.prompt)


def answers(text: str | None) -> list[str]:
    """The last answer in a text, if there is one."""
    return re.findall(r"#\s*(-?\d+)", text or "")[-1:]


__all__ = ["Chat", "ChatConfig", "Sums", "SumsConfig", "SumsData", "SumsEnv", "SumsEnvConfig", "SumsTask"]
