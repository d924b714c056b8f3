"""Environments of the package gymnasium (tried: 1.4.0), played in words (docs/agents/gymnasium.md).

One episode of the environment is one rollout. The prompt says the rules, the actions and what is to be seen; each turn
of the student names an action, and the answer is what is then to be seen. Each turn has the reward of its action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from stillhouse.actors.envs.adapters.shared.chat import own_prompt, reply, whole_number
from stillhouse.actors.envs.adapters.shared.packages import import_package
from stillhouse.actors.envs.adapters.shared.spaces import Actions, describe, show
from stillhouse.actors.envs.adapters.shared.toy_text import GAMES, MARK, picture
from stillhouse.actors.envs.base import Action, Environment, EnvTask, Observation, StepResult, TextTokenizer
from stillhouse.actors.rewards.answer import AnswerCheck
from stillhouse.actors.row_options import refuse_module
from stillhouse.protocol.plugins import import_module

_gymnasium = import_package("gymnasium", environment="gymnasium", package="gymnasium", extra="gymnasium")

GAME_PLACE = "{game}"
"""Stands for rules, actions and first observation in a row's prompt; without it they follow the prompt."""


class Gymnasium(Environment):
    """`id`, `kwargs`: what `gymnasium.make` gets. `instructions`: text in place of the rules and actions that are
    written for you; empty: none. `action_names`: for an environment with numbered actions that is not of toy_text.
    `answer_pattern`: a regular expression with one group; its last match names the action. Without it, the last name or
    number does. `draw`: show the environment's text picture, where it has one. `invalid_action_reward`: added for each
    turn that names no possible action or is cut short; after `max_invalid_actions` of them the episode ends."""

    row_options = ("id", "instructions", "action_names", "answer_pattern", "draw")
    check_row_options = staticmethod(refuse_module)

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        instructions: str | None = None,
        action_names: Sequence[str] = (),
        answer_pattern: str | None = None,
        draw: bool = True,
        invalid_action_reward: float = 0.0,
        max_invalid_actions: int = 3,
    ) -> None:
        self._tokenizer = tokenizer
        self._instructions = instructions
        self._draw = draw
        self._invalid_action_reward = invalid_action_reward
        self._invalid_left = max_invalid_actions
        self._game = GAMES.get(_spec(id).name)
        self._environment = _make(id, kwargs or {})
        space = self._environment.action_space
        names = tuple(action_names) or (self._game.actions if self._game else ())
        self._actions = Actions(space, names, AnswerCheck(answer_pattern).find if answer_pattern else None)

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Make the environment once, as for a rollout. Raises ValueError for options with which it cannot be made."""
        cls(cast(TextTokenizer, None), **options)._environment.close()

    async def reset(self, task: EnvTask) -> Observation:
        seed = whole_number(task.row, "seed")
        observation, _ = self._environment.reset(seed=task.seed if seed is None else seed)
        parts = [self._rules() if self._instructions is None else self._instructions, self._seen(observation)]
        text = "\n\n".join(part for part in parts if part)
        return Observation(prompt_ids=own_prompt(self._tokenizer, task.row, text, place=GAME_PLACE))

    async def step(self, action: Action) -> StepResult:
        # A turn that was cut in the middle is not what the student wanted to say.
        chosen = None if action.finish_reason == "length" else self._actions.read(action.text)
        if chosen is None:
            return self._invalid(action.last)
        observation, reward, terminated, truncated, _ = self._environment.step(chosen)
        reward = float(reward)
        info = {"gymnasium_steps": 1.0, "gymnasium_reward": reward}
        if terminated or truncated or action.last:
            end = "terminated" if terminated else "truncated" if truncated else "turns_used_up"
            return StepResult(done=True, reward=reward, info=info | {f"gymnasium_{end}": 1.0})
        return StepResult(token_ids=reply(self._tokenizer, self._seen(observation)), reward=reward, info=info)

    def _invalid(self, last: bool) -> StepResult:
        reward = self._invalid_action_reward
        self._invalid_left -= 1
        info = {"gymnasium_invalid_actions": 1.0, "gymnasium_reward": reward}
        if last or self._invalid_left <= 0:
            return StepResult(done=True, reward=reward, info=info)
        answer = f"Invalid action. Expected: {self._actions.expected}."
        return StepResult(token_ids=reply(self._tokenizer, answer), reward=reward, info=info)

    async def close(self) -> None:
        self._environment.close()

    def _rules(self) -> str:
        if self._game is not None:
            return f"{self._game.rules}\n\nAnswer with one action: {self._actions.expected}."
        seen = describe(self._environment.observation_space)
        return f"You see: {seen}.\nAnswer with one action: {self._actions.expected}."

    def _seen(self, observation: Any) -> str:
        drawn = self._environment.render() if self._draw and self._environment.render_mode == "ansi" else None
        if self._game is not None:
            said = self._game.in_words(self._environment.unwrapped, observation)
        else:
            said = show(self._environment.observation_space, observation)
        if not isinstance(drawn, str):
            return said
        return f"{picture(drawn, mark=MARK if self._game else '')}\n{said}"


gymnasium = Gymnasium


def _spec(id: str) -> Any:
    """What is registered under an id, which may begin with the module that registers it, `module:Id-v0`.

    Raises ValueError for an unknown id, naming the nearest."""
    module, colon, name = id.rpartition(":")
    try:
        if colon:
            import_module(module)
        return _gymnasium.spec(name)
    except (ImportError, _gymnasium.error.Error) as error:
        raise ValueError(f"id: got {id!r}: {error}") from error


def _make(id: str, kwargs: Mapping[str, Any]) -> Any:
    """The environment, drawing as text where it can. Raises ValueError, whatever is wrong with the arguments."""
    spec = _spec(id)
    try:
        creator = spec.entry_point
        if isinstance(creator, str):
            creator = _gymnasium.envs.registration.load_env_creator(creator)
        modes: Sequence[str] = getattr(creator, "metadata", {}).get("render_modes", ())
        drawing = {"render_mode": "ansi"} if "ansi" in modes else {}
        # The checks of the package are for authors of environments, and warn.
        return _gymnasium.make(id, **({"disable_env_checker": True} | drawing | dict(kwargs)))
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        raise ValueError(f"{id!r} cannot be made with kwargs = {dict(kwargs)}: {detail}") from error
