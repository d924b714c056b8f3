"""Drives one environment through one rollout, and holds it to the rules of `actors.envs.base`.

The actor calls `start`, then `advance` after each turn of the student, then `close`, each as a coroutine on the
environments' event loop. What comes back is tokens to append, or how the rollout ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from actors.envs.base import Action, Environment, EnvTask, TextTokenizer, TurnEnd, no_tokens
from engines.base import Int32s

FinishReason: TypeAlias = Literal["stop", "length", "env_done"]


class EnvironmentFault(RuntimeError):
    """The environment broke a rule: ids outside the vocabulary, a reward that is no number, going on with nothing."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What follows a turn."""

    token_ids: Int32s = field(default_factory=no_tokens)
    """[n] Environment tokens to append; the student goes on behind them. Empty when finished."""
    finish_reason: FinishReason | None = None
    """None = go on. stop: the last turn ended on a stop token of the model's own; length: it did not, and tokens or
    turns were used up; env_done: it did not, and the environment had enough."""
    reward: float | None = None
    info: Mapping[str, float] = field(default_factory=dict[str, float])


class Episode:
    """One environment, one rollout. `model_stop_token_ids` are the model's own; the environment may add some."""

    def __init__(
        self,
        environment: Environment,
        task: EnvTask,
        tokenizer: TextTokenizer,
        *,
        model_stop_token_ids: tuple[int, ...],
        max_turns: int,
    ) -> None:
        self._environment = environment
        self._task = task
        self._tokenizer = tokenizer
        self._max_turns = max_turns
        self._model_stops = frozenset(model_stop_token_ids)
        self._turns_done = 0
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(self._model_stops | set(environment.stop_token_ids)))
        """For the generation requests of this rollout."""

    async def start(self) -> Int32s:
        """Reset; token ids [n] to append to the prompt as environment tokens (mostly none)."""
        observation = await self._environment.reset(self._task)
        return self._checked_ids(observation.token_ids)

    async def advance(
        self, token_ids: Int32s, finish_reason: TurnEnd, *, budget_left: int, context_left: int
    ) -> Continuation:
        """Give the environment one finished turn.

        `token_ids` [n] are the turn as sampled. `budget_left` tokens may still be sampled, and `context_left` tokens
        fit into the context window. Raises EnvironmentFault, and whatever the environment raises."""
        turn_ids = token_ids.copy()
        turn_ids.flags.writeable = False
        turn, self._turns_done = self._turns_done, self._turns_done + 1
        last = finish_reason == "length" or min(budget_left, context_left) <= 0 or self._turns_done >= self._max_turns
        text = self._tokenizer.decode(turn_ids)
        result = await self._environment.step(Action(turn_ids, text, finish_reason, turn, last))
        reward = self._checked_reward(result.reward)
        if result.done:
            return Continuation(finish_reason=self._end_of(turn_ids, last), reward=reward, info=result.info)
        if last:
            return Continuation(finish_reason="length", reward=reward, info=result.info)
        reply_ids = self._checked_ids(result.token_ids)
        if reply_ids.size == 0:
            raise EnvironmentFault(
                f"{type(self._environment).__name__} neither ended the episode nor gave the student anything to read"
            )
        if reply_ids.size >= context_left:
            # No room to sample a token behind it.
            return Continuation(finish_reason="length", reward=reward, info=result.info)
        return Continuation(token_ids=reply_ids, info=result.info)

    async def close(self) -> None:
        await self._environment.close()

    def _end_of(self, turn_ids: Int32s, last: bool) -> FinishReason:
        if turn_ids.size and int(turn_ids[-1]) in self._model_stops:
            return "stop"
        return "length" if last else "env_done"

    def _checked_ids(self, token_ids: Int32s) -> Int32s:
        ids = np.asarray(token_ids)
        name = type(self._environment).__name__
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise EnvironmentFault(f"{name} gave {ids.dtype} of shape {ids.shape}, expected token ids int32 [n]")
        limit = self._tokenizer.vocab_size
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
            raise EnvironmentFault(
                f"{name} gave token ids {int(ids.min())} to {int(ids.max())}, expected 0 to {limit - 1}"
            )
        return ids.astype(np.int32)

    def _checked_reward(self, reward: float | None) -> float | None:
        if reward is None:
            return None
        if not math.isfinite(reward):
            raise EnvironmentFault(
                f"{type(self._environment).__name__} gave the reward {reward}, expected a finite number"
            )
        return float(reward)
