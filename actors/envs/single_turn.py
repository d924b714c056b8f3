"""The built-in environment `single_turn`: one response, judged by a reward of `actors.rewards`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from stillhouse.actors.envs.base import Action, Environment, EnvTask, Observation, StepResult, TextTokenizer
from stillhouse.actors.envs.judged import answered, reward_of
from stillhouse.actors.rewards import Reward
from stillhouse.actors.rewards.answer import ANSWER_PATTERN, AnswerCheck, same_answer

__all__ = ["ANSWER_PATTERN", "AnswerCheck", "SingleTurn", "reward_for", "same_answer"]


class SingleTurn(Environment):
    """`reward`: what judges the response, a name or a `module:function` (docs/rewards.md). `reward_options`: its
    options. `answer_pattern`: the option of that name of the reward. `rewards`: for rows with a tag, `reward` and
    `reward_options` in their place, by tag."""

    row_options = ("reward", "reward_options", "answer_pattern")

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        reward: str = "answer",
        reward_options: Mapping[str, Any] | None = None,
        answer_pattern: str | None = None,
        rewards: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._reward = reward_of(reward, reward_options, answer_pattern)
        self._by_tag = {tag: _of_tag(tag, one) for tag, one in (rewards or {}).items()}
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
        judge = self._by_tag.get(self._task.tag, self._reward)
        reward, info = await judge(answered(action.text, self._task, self._tokenizer))
        return StepResult(done=True, reward=reward, info=info)


def _of_tag(tag: str, given: object) -> Reward:
    """Raises ValueError."""
    match given:
        case str(name):
            return reward_of(name, None, None)
        case {"reward": name, **more} if more.keys() <= {"reward_options"}:
            return reward_of(name, more.get("reward_options"), None)
        case _:
            raise ValueError(
                f"rewards.{tag}: got {given!r:.80}, expected a reward, or a table of reward, reward_options"
            )


def reward_for(options: Mapping[str, Any], tag: str) -> tuple[object, Mapping[str, Any]]:
    """The reward that judges rows with this tag under these options of the environment, and its own options."""
    given: Any = (options.get("rewards") or {}).get(tag, options)
    if isinstance(given, str):
        return given, {}
    pattern = given.get("answer_pattern")
    own = {} if pattern is None else {"answer_pattern": pattern}
    return given.get("reward", "answer"), {**(given.get("reward_options") or {}), **own}
