"""Drives one environment through one rollout, and checks that it keeps the rules of `actors.envs.base`.

`play` is the whole episode: `start`, then `advance` after each turn of the student. `close` comes after it, also when
it failed. All run on the episode's own thread.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np

from stillhouse.actors.env_thread import CURRENT_CALL
from stillhouse.actors.envs.base import (
    Action,
    Environment,
    EnvTask,
    Observation,
    StepResult,
    TextTokenizer,
    TurnEnd,
    no_tokens,
)
from stillhouse.engines.base import Int32s

if TYPE_CHECKING:
    from stillhouse.actors.agent import Context

FinishReason: TypeAlias = Literal["stop", "length", "env_done"]


class EnvironmentFault(RuntimeError):
    """The environment broke a rule: a result of the wrong type, ids outside the vocabulary, a reward that is not a
    number, a continuation without tokens. The message says what was got and what was expected."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The environment's checked answer to a turn."""

    token_ids: Int32s = field(default_factory=no_tokens)
    """[n] Environment tokens to append; the student continues after them. Empty when finished."""
    finish_reason: FinishReason | None = None
    """None: the rollout continues. stop: the last turn ended on one of the model's stop tokens; otherwise length when
    tokens or turns are used up, or env_done when the environment ended the episode."""
    reward: float | None = None
    """For this turn."""
    info: Mapping[str, float] = field(default_factory=dict[str, float])


class Episode:
    """One environment, one rollout. `make` builds the environment when the episode starts. The environment may add stop
    tokens to `model_stop_token_ids`."""

    def __init__(
        self,
        make: Callable[[], Environment],
        task: EnvTask,
        tokenizer: TextTokenizer,
        *,
        model_stop_token_ids: tuple[int, ...],
        max_turns: int,
    ) -> None:
        self._make = make
        self._environment: Environment | None = None
        self._task = task
        self._tokenizer = tokenizer
        self._max_turns = max_turns
        self._model_stops = frozenset(model_stop_token_ids)
        self._turns_done = 0
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(self._model_stops))
        """Stop tokens for this rollout's generation requests; complete once it has started."""

    async def play(self, ctx: Context) -> FinishReason:
        """The episode on one line of conversation. Raises EnvironmentFault, EpisodeOver when a first turn has no room,
        and whatever the environment raises."""
        call = CURRENT_CALL.get()
        call.what = "reset"
        observation = await self.start()
        call.what = "step"
        line = ctx if observation.prompt_ids is None else ctx.root(observation.prompt_ids)
        answer = Continuation(observation.token_ids)
        while answer.finish_reason is None:
            line.observe(answer.token_ids)
            turn = await line.generate(stop_token_ids=self.stop_token_ids)
            answer = await self.advance(
                turn.token_ids, turn.finish_reason, budget_left=ctx.budget_left, context_left=line.context_left
            )
            ctx.note(**answer.info)
            if answer.reward is not None:
                line.reward(answer.reward)
        return answer.finish_reason

    async def start(self) -> Observation:
        """Build and reset the environment; returns what `reset` gave, checked."""
        self._environment = self._make()
        stops = self._checked_ids(self._environment.stop_token_ids, "stop_token_ids")
        self.stop_token_ids = tuple(sorted(self._model_stops | set(stops.tolist())))
        observation = await self._call("reset", self._task)
        if not isinstance(observation, Observation):
            raise self._fault("reset", observation, "an Observation")
        prompt_ids = observation.prompt_ids
        if prompt_ids is not None:
            prompt_ids = self._checked_ids(prompt_ids, "reset")
            if prompt_ids.size == 0:
                raise EnvironmentFault(
                    f"{self._name}.reset gave a prompt without tokens, expected prompt_ids [n], n >= 1, or None to "
                    "keep the task's prompt"
                )
        return Observation(self._checked_ids(observation.token_ids, "reset"), prompt_ids)

    async def advance(
        self, token_ids: Int32s, finish_reason: TurnEnd, *, budget_left: int, context_left: int
    ) -> Continuation:
        """Give the environment one finished turn.

        `token_ids` [n]: the turn as sampled. `budget_left`: tokens that may still be sampled. `context_left`: tokens
        that still fit into the context window. Raises EnvironmentFault, and whatever the environment raises."""
        turn_ids = token_ids.copy()
        turn_ids.flags.writeable = False
        turn, self._turns_done = self._turns_done, self._turns_done + 1
        last = finish_reason == "length" or min(budget_left, context_left) <= 0 or self._turns_done >= self._max_turns
        text = self._tokenizer.decode(turn_ids)
        result = await self._call("step", Action(turn_ids, text, finish_reason, turn, last))
        if not isinstance(result, StepResult):
            raise self._fault("step", result, "a StepResult, e.g. StepResult(done=True, reward=1.0)")
        reward = self._checked_reward(result.reward)
        self._check_info(result.info)
        if result.done:
            return Continuation(finish_reason=self._end_of(turn_ids, last), reward=reward, info=result.info)
        if last:
            return Continuation(finish_reason="length", reward=reward, info=result.info)
        reply_ids = self._checked_ids(result.token_ids, "step")
        if reply_ids.size == 0:
            raise EnvironmentFault(f"{self._name} neither ended the episode nor gave the student anything to read")
        if reply_ids.size >= context_left:
            # No room is left to sample a token after it.
            return Continuation(finish_reason="length", reward=reward, info=result.info)
        return Continuation(token_ids=reply_ids, reward=reward, info=result.info)

    async def close(self) -> None:
        """Close the environment, if it was built."""
        if self._environment is not None:
            await self._call("close")

    @property
    def _name(self) -> str:
        return type(self._environment).__name__

    async def _call(self, method: str, *arguments: object) -> object:
        given: object = getattr(self._environment, method)(*arguments)
        if not inspect.isawaitable(given):
            raise self._fault(method, given, f"a coroutine: write `async def {method}`")
        return await given

    def _fault(self, method: str, got: object, expected: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self._name}.{method} gave {_shown(got)}, expected {expected}")

    def _end_of(self, turn_ids: Int32s, last: bool) -> FinishReason:
        if turn_ids.size and int(turn_ids[-1]) in self._model_stops:
            return "stop"
        return "length" if last else "env_done"

    def _checked_ids(self, token_ids: object, method: str) -> Int32s:
        try:
            ids = np.asarray(cast(Any, token_ids))
        except ValueError:
            raise self._fault(method, token_ids, "token ids int32 [n]") from None
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            got = f"{ids.dtype} of shape {ids.shape}" if ids.size else _shown(token_ids)
            raise EnvironmentFault(f"{self._name}.{method} gave {got}, expected token ids int32 [n]")
        limit = self._tokenizer.vocab_size
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
            raise EnvironmentFault(
                f"{self._name}.{method} gave token ids {int(ids.min())} to {int(ids.max())}, expected 0 to {limit - 1}"
            )
        return ids.astype(np.int32)

    def _checked_reward(self, reward: object) -> float | None:
        if reward is None:
            return None
        number = _number(reward)
        if number is None:
            raise EnvironmentFault(
                f"{self._name}.step gave the reward {_shown(reward)}, expected a number, or None where there is "
                "nothing to judge"
            )
        return number

    def _check_info(self, info: object) -> None:
        if not isinstance(info, Mapping):
            raise self._fault("step", info, "StepResult.info to be a mapping from names to numbers")
        for name, value in cast(Mapping[object, object], info).items():
            if not isinstance(name, str) or _finite(value) is None:
                got = f"{_shown(name)}: {_shown(value)}"
                raise EnvironmentFault(f"{self._name}.step gave the info {got}, expected a name and a finite number")


def _finite(value: object) -> float | None:
    """The value as a float if it is a finite number (of Python, numpy or torch), else None."""
    number = _number(value)
    return number if number is not None and math.isfinite(number) else None


def _number(value: object) -> float | None:
    if isinstance(value, str | bytes):
        return None
    try:
        return float(cast(Any, value))
    except OverflowError:  # a whole number beyond floats
        return math.inf
    except (TypeError, ValueError):
        return None


def _shown(value: object) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    if isinstance(value, str | int | float):
        return f"{repr(value)[:60]} ({kind})"
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"
