"""Shared by the adapters' tests: a whole episode from a script of the student's turns."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from stillhouse.actors.config import EnvConfig
from stillhouse.actors.envs.base import EnvTask, TextTokenizer
from stillhouse.actors.envs.episode import Continuation, Episode
from stillhouse.actors.envs.registry import make_environment
from stillhouse.actors.episodes import EpisodeEnded, EpisodeStart, EpisodeThreads
from stillhouse.actors.failures import Failure
from stillhouse.actors.running_episode import Ask, EpisodeEnd, Response
from tests.patience import PATIENCE_S

MADE_BY = "make agents installs what this needs"


def needs(package: str) -> pytest.MarkDecorator:
    """Looks for the package without importing it: every process that collects tests would."""
    return pytest.mark.skipif(find_spec(package) is None, reason=MADE_BY)


class Played(NamedTuple):
    prompt: str
    """With its template."""
    answers: list[Continuation]
    heard: list[str]
    """Texts of the answers."""

    @property
    def end(self) -> Continuation:
        return self.answers[-1]

    @property
    def reward(self) -> float:
        """The sum over the turns."""
        return sum(answer.reward or 0.0 for answer in self.answers)

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


class Talked(NamedTuple):
    """An agent's episode."""

    prompt: str
    """With its template."""
    heard: list[str]
    """What the student read after each of its turns but the last, with the template."""
    end: EpisodeEnd | Failure

    @property
    def reward(self) -> float | None:
        assert isinstance(self.end, EpisodeEnd), self.end
        return self.end.reward

    @property
    def info(self) -> Mapping[str, float]:
        assert isinstance(self.end, EpisodeEnd), self.end
        return self.end.info


class Talk(Protocol):
    def __call__(
        self,
        name: str,
        turns: Sequence[str],
        options: Mapping[str, Any],
        *,
        row: Mapping[str, Any] = ...,
        truth: str | None = ...,
        seed: int = ...,
    ) -> Talked: ...


@pytest.fixture
def talk(tokenizer: TextTokenizer, hf_tokenizer: PreTrainedTokenizerBase) -> Talk:
    """`talk(name, turns, options, row=...)`: an agent asks for the student's turns, as an actor runs it. When there are
    no more, its request is refused."""

    def talk(
        name: str,
        turns: Sequence[str],
        options: Mapping[str, Any],
        *,
        row: Mapping[str, Any] | None = None,
        truth: str | None = None,
        seed: int = 5,
    ) -> Talked:
        config = EnvConfig(name=name, options=dict(options), step_timeout_s=PATIENCE_S)
        stop = int(tokenizer.encode("<|im_end|>")[0])
        threads = EpisodeThreads(
            {name: config}, tokenizer, max_threads=2, stop_token_ids=(stop,), max_context_tokens=99_999
        )
        prompt = tokenizer.chat_prompt([{"role": "user", "content": "the row's own"}])
        columns = json.dumps(row or {}).encode()
        threads.start(EpisodeStart("train-0-0-0", name, prompt, truth, "", seed, columns, 9_999, 99))
        script, read = iter(turns), list[list[int]]()
        written: list[list[int]] = []
        limit_s = time.monotonic() + PATIENCE_S
        try:
            while time.monotonic() < limit_s:
                for news in threads.take():
                    if isinstance(news, EpisodeEnded):
                        heard = [r[len(p) + len(w) :] for p, w, r in zip(read, written, read[1:], strict=False)]
                        texts = [str(hf_tokenizer.decode(ids)) for ids in (read[0] if read else [], *heard)]
                        return Talked(texts[0], texts[1:], news.end)
                    assert isinstance(news, Ask)
                    turn = next(script, None)
                    if turn is None:
                        threads.refuse(news.rollout_id, news.number, "the script is over")
                        continue
                    ids = tokenizer.encode(f"{turn}<|im_end|>")
                    read.append(news.prompt_ids.tolist())
                    written.append(ids.tolist())
                    logprobs = np.zeros(ids.size, np.float32)
                    threads.deliver(news.rollout_id, news.number, Response(ids, logprobs, "stop", 9_999))
                time.sleep(0.001)
            raise AssertionError("the episode never ended")
        finally:
            threads.finish("train-0-0-0")
            threads.close()

    return talk
