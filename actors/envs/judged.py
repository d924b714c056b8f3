"""What judges the responses of an environment: a reward of `actors.rewards` that its options name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from stillhouse.actors.envs.base import EnvTask, TextTokenizer
from stillhouse.actors.rewards import Answered, Reward, make_reward


def reward_of(name: object, options: Mapping[str, Any] | None, answer_pattern: str | None) -> Reward:
    """The reward of an environment's options `reward`, `reward_options` and `answer_pattern`. Raises ValueError."""
    if not isinstance(name, str):
        raise ValueError(f"reward: got {name!r:.60}, expected a name or module:function (docs/rewards.md)")
    if options is not None and not isinstance(options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"reward_options: got {options!r:.60}, expected a table of options")
    own = {} if answer_pattern is None else {"answer_pattern": answer_pattern}
    return make_reward(name, **{**(options or {}), **own})


def answered(response: str, task: EnvTask, tokenizer: TextTokenizer) -> Answered:
    """What the reward of a response is asked."""
    return Answered(response, task.ground_truth, _prompt(task, tokenizer), task.row)


def _prompt(task: EnvTask, tokenizer: TextTokenizer) -> str:
    """What the row asks, for a judge; the student's own prompt where there is no row."""
    match task.row:
        case {"prompt": str(prompt)}:
            return prompt
        case {"messages": [*messages]}:
            return _as_text(cast(Sequence[Any], messages))
        case _:
            return tokenizer.decode(task.prompt_ids)


def _as_text(messages: Sequence[Any]) -> str:
    """A conversation as text: `user: ...`, one message after the other."""
    return "\n\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in messages)
