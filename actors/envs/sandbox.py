"""The built-in environment `sandbox`: the student runs Python and bash as tools (docs/agents/sandbox.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, cast, get_args

from stillhouse.actors.agent import Context, EpisodeOver, options_checked_by
from stillhouse.actors.envs.base import EnvTask
from stillhouse.actors.envs.judged import answered, reward_of
from stillhouse.actors.envs.tool_loop import Notation, Tools, converse, read_notation, tool_schema
from stillhouse.actors.rewards import Reward
from stillhouse.actors.row_options import row_may_set
from stillhouse.actors.sandbox.sandbox import Ran, Sandbox, make_sandbox
from stillhouse.actors.tool_calls import ToolCall

ToolName = Literal["python", "bash"]
ARGUMENTS: Final[Mapping[ToolName, str]] = {"python": "code", "bash": "command"}
_DESCRIPTIONS: Final[Mapping[ToolName, str]] = {
    "python": "Run Python code and read what it prints. The value of a last expression is printed too.",
    "bash": "Run a bash command and read what it prints.",
}
_SHARED: Final = (
    "Files in the working directory stay until the conversation ends; variables do not. There is no network."
)
_STOPPED: Final = {
    "time": "it computed for more than {limits.time_limit_s:g} s",
    "waited": "it took too long",
    "busy": "it took too long on a busy machine",
    "memory": "it used more than {limits.memory_mb} MB of memory",
    "processes": "it had more than {limits.max_processes} processes and threads",
    "files": "it made too many files; all files are gone",
    "lost": "its sandbox ended; all files are gone",
}


class _Options(NamedTuple):
    tools: tuple[ToolName, ...]
    reward: Reward
    notation: Notation | None
    make: Callable[[], Sandbox]
    most: int


def _options(
    *,
    tools: Sequence[str] = ("python", "bash"),
    reward: str = "answer",
    reward_options: Mapping[str, Any] | None = None,
    answer_pattern: str | None = None,
    notation: Mapping[str, str] | None = None,
    isolation: str = "bubblewrap",
    python: str = "",
    max_output: int = 8000,
    **limits: Any,
) -> _Options:
    """Raises ValueError for a value that is refused, and where such a sandbox cannot begin."""
    known = get_args(ToolName)
    if not isinstance(tools, list | tuple) or not tools or not set(tools) <= set(known):
        raise ValueError(f"tools: got {tools!r}, expected some of {', '.join(known)}")
    if isinstance(max_output, bool) or not isinstance(max_output, int) or not 0 < max_output <= 1 << 20:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"max_output: got {max_output!r}, expected a number of bytes from 1 to {1 << 20}")
    judged = reward_of(reward, reward_options, answer_pattern)
    own = read_notation(notation)
    if own is not None and ARGUMENTS.get(cast(ToolName, own.tool)) != own.argument:
        expected = " or ".join(f"{name} with {argument}" for name, argument in ARGUMENTS.items())
        raise ValueError(f"notation: it calls {own.tool!r} with {own.argument!r}, expected {expected}")
    made = make_sandbox(isolation, python, **limits)
    return _Options(cast("tuple[ToolName, ...]", tuple(tools)), judged, own, made, max_output)


def _check(**options: Any) -> None:
    _options(**options)


@row_may_set("reward", "reward_options", "answer_pattern")
@options_checked_by(_check)
async def sandbox(
    ctx: Context,
    task: EnvTask,
    *,
    tools: Sequence[str] = ("python", "bash"),
    reward: str = "answer",
    reward_options: Mapping[str, Any] | None = None,
    answer_pattern: str | None = None,
    notation: Mapping[str, str] | None = None,
    isolation: str = "bubblewrap",
    python: str = "",
    max_output: int = 8000,
    time_limit_s: float = 5.0,
    memory_mb: int = 512,
    disk_mb: int = 64,
    max_processes: int = 32,
) -> None:
    """One conversation with tools that run what the student writes. `reward`, `reward_options`, `answer_pattern`: as in
    single_turn, for the last turn. `notation`: see `actors.envs.tool_loop.Notation`. `python`: absolute path of the
    interpreter inside. `max_output`: bytes of a call's output that the student reads, its first and its last part. The
    limits: see `actors.sandbox.isolation.Limits`."""
    options = _options(
        tools=tools,
        reward=reward,
        reward_options=reward_options,
        answer_pattern=answer_pattern,
        notation=notation,
        isolation=isolation,
        python=python,
        max_output=max_output,
        time_limit_s=time_limit_s,
        memory_mb=memory_mb,
        disk_mb=disk_mb,
        max_processes=max_processes,
    )
    async with options.make() as box:
        ended = await converse(ctx, task, _Tools(ctx, box, options), options.notation)
    verdict = await options.reward(answered(ended.last.text, task, ctx.tokenizer))
    if verdict.reward is not None:
        ctx.reward(verdict.reward)
    ctx.note(**verdict.info)
    if ended.over:
        raise EpisodeOver("turns or tokens are used up")


class _Tools(Tools):
    def __init__(self, ctx: Context, box: Sandbox, options: _Options) -> None:
        super().__init__(ctx, "sandbox", [_schema(name) for name in options.tools], options.tools)
        self._box = box
        self._most = options.most

    async def run(self, call: ToolCall) -> str:
        name = cast(ToolName, call.name)
        source = call.arguments.get(ARGUMENTS[name])
        if not isinstance(source, str):
            return self.wrong(f"{name} needs the argument {ARGUMENTS[name]!r}, a text")
        run = self._box.python if name == "python" else self._box.bash
        try:
            ran = await run(source, merge=True, most=self._most)
        except ValueError as error:  # a text that is too long
            return self.wrong(str(error))
        if ran.ended != "exit":
            self.ctx.note(**{f"sandbox_stopped_{ran.ended}": 1.0})
        return self._shown(ran)

    def _shown(self, ran: Ran) -> str:
        lines = [ran.stdout.removesuffix("\n")] if ran.stdout else []
        if ran.ended != "exit":
            lines.append(f"[stopped: {_STOPPED[ran.ended].format(limits=self._box.limits)}]")
        elif ran.code:
            lines.append(f"[exit code {ran.code}]")
        return "\n".join(lines) or "[no output]"


def _schema(name: ToolName) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {ARGUMENTS[name]: {"type": "string"}}, "required": [ARGUMENTS[name]]}
    return tool_schema(name, f"{_DESCRIPTIONS[name]} {_SHARED}", parameters)
