"""Shared by the adapters' tests: a whole episode from a script of the student's turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from actors.envs.base import EnvTask, TextTokenizer
from actors.envs.episode import Continuation, Episode
from actors.envs.registry import make_environment

MADE_BY = "make agents installs what this needs"


class Played(NamedTuple):
    prompt: str
    """With its template."""
    answers: list[Continuation]
    heard: list[str]
    """Texts of the answers."""

    @property
    def end(self) -> Continuation:
        return self.answers[-1]

    def total(self, name: str) -> float:
        """Sum of an environment's number over the episode."""
        return sum(answer.info.get(name, 0.0) for answer in self.answers)


class Play(Protocol):
    def __call__(
        self,
        name: str,
        turns: Sequence[str],
        options: Mapping[str, object],
        *,
        row: Mapping[str, Any] = ...,
        max_turns: int = ...,
        end: Literal["stop", "length"] = ...,
    ) -> Played: ...


@pytest.fixture
def play(tokenizer: TextTokenizer, hf_tokenizer: PreTrainedTokenizerBase) -> Play:
    """`play(name, turns, options, row=...)`: the student says the turns, until the environment ends the episode. The
    last of them ends for `end`."""

    def play(
        name: str,
        turns: Sequence[str],
        options: Mapping[str, object],
        *,
        row: Mapping[str, Any] | None = None,
        max_turns: int = 50,
        end: Literal["stop", "length"] = "stop",
    ) -> Played:
        task = EnvTask(np.array([1], dtype=np.int32), None, "", "train-0-0-0", seed=5, row={} if row is None else row)
        stop = int(tokenizer.encode("<|im_end|>")[0])
        make = partial(make_environment, name, tokenizer, options)
        episode = Episode(make, task, tokenizer, model_stop_token_ids=(stop,), max_turns=max_turns)
        return asyncio.run(_play(episode, turns, end, tokenizer, hf_tokenizer.decode))

    return play


async def _play(
    episode: Episode,
    turns: Sequence[str],
    end: Literal["stop", "length"],
    tokenizer: TextTokenizer,
    decode: Callable[[list[int]], Any],
) -> Played:
    begun = await episode.start()
    assert begun.prompt_ids is not None and begun.token_ids.size == 0
    answers: list[Continuation] = []
    for i, turn in enumerate(turns):
        how = end if i == len(turns) - 1 else "stop"
        ids = tokenizer.encode(turn + ("<|im_end|>" if how == "stop" else ""))
        answers.append(await episode.advance(ids, how, budget_left=9_999, context_left=9_999))
        if answers[-1].finish_reason is not None:
            break
    await episode.close()
    return Played(decode(begun.prompt_ids.tolist()), answers, [tokenizer.decode(a.token_ids) for a in answers])
