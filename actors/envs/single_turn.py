"""The built-in environment `single_turn`: one response, judged by a reward of `actors.rewards`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from stillhouse.actors.envs.base import Action, Environment, EnvTask, Observation, StepResult, TextTokenizer
from stillhouse.actors.envs.judged import answered, reward_of
from stillhouse.actors.rewards.answer import ANSWER_PATTERN, AnswerCheck, same_answer

__all__ = ["ANSWER_PATTERN", "AnswerCheck", "SingleTurn", "same_answer"]


class SingleTurn(Environment):
    """`reward`: what judges the response, a name or a `module:function` (docs/rewards.md). `reward_options`: its
    options. `answer_pattern`: the option of that name of the reward."""

    row_options = ("reward", "reward_options", "answer_pattern")

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        reward: str = "answer",
        reward_options: Mapping[str, Any] | None = None,
        answer_pattern: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._reward = reward_of(reward, reward_options, answer_pattern)
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
        reward, info = await self._reward(answered(action.text, self._task, self._tokenizer))
        return StepResult(done=True, reward=reward, info=info)
