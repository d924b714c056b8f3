"""The built-in environment `single_turn`: one response, judged by a reward of `actors.rewards`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from actors.envs.base import Action, Environment, EnvTask, Observation, StepResult, TextTokenizer
from actors.rewards import Answered, Reward, make_reward
from actors.rewards.answer import ANSWER_PATTERN, AnswerCheck, same_answer

__all__ = ["ANSWER_PATTERN", "AnswerCheck", "SingleTurn", "same_answer"]


class SingleTurn(Environment):
    """`reward`: what judges the response, a name or a `module:function` (docs/rewards.md). `reward_options`: its
    options. `answer_pattern`: the option of that name of the reward."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        reward: str = "answer",
        reward_options: Mapping[str, Any] | None = None,
        answer_pattern: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._reward = _reward(reward, reward_options, answer_pattern)
        self._task: EnvTask | None = None

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Make the reward, as for a rollout. Raises ValueError for one that cannot be made."""
        cls(cast(TextTokenizer, None), **options)

    async def reset(self, task: EnvTask) -> Observation:
        self._task = task
        return Observation()

    async def step(self, action: Action) -> StepResult:
        assert self._task is not None
        answered = Answered(action.text, self._task.ground_truth, self._prompt(self._task), self._task.row)
        reward, info = await self._reward(answered)
        return StepResult(done=True, reward=reward, info=info)

    def _prompt(self, task: EnvTask) -> str:
        """What the row asks, for a judge; the student's own prompt where there is no row."""
        match task.row:
            case {"prompt": str(prompt)}:
                return prompt
            case {"messages": [*messages]}:
                return _as_text(cast(Sequence[Any], messages))
            case _:
                return self._tokenizer.decode(task.prompt_ids)


def _as_text(messages: Sequence[Any]) -> str:
    """A conversation as text: `user: ...`, one message after the other."""
    return "\n\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in messages)


def _reward(name: object, options: Mapping[str, Any] | None, answer_pattern: str | None) -> Reward:
    if not isinstance(name, str):
        raise ValueError(f"reward: got {name!r:.60}, expected a name or module:function (docs/rewards.md)")
    if options is not None and not isinstance(options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"reward_options: got {options!r:.60}, expected a table of options")
    own = {} if answer_pattern is None else {"answer_pattern": answer_pattern}
    return make_reward(name, **{**(options or {}), **own})
