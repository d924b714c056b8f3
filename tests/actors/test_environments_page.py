"""The environment written out in docs/environments.md is short, and works as it stands there."""

from __future__ import annotations

import asyncio
import importlib
import random
import re
import sys
import tomllib
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stillhouse.actors.config import ActorConfig
from stillhouse.actors.envs.base import EnvTask, TextTokenizer
from stillhouse.actors.envs.episode import Continuation, Episode
from stillhouse.actors.envs.registry import make_environment

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


@pytest.fixture
def guess_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's code as an importable module; its name."""
    code, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) < 40
    (tmp_path / "guess_from_the_page.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "guess_from_the_page", raising=False)
    return "guess_from_the_page"


def episode(module: str, tokenizer: TextTokenizer, *, seed: int, max_turns: int) -> Episode:
    make = partial(make_environment, f"{module}:GuessTheNumber", tokenizer, {"highest": 63})
    task = EnvTask(np.array([1], dtype=np.int32), None, "", "train-0-0-0", seed=seed)
    stop = int(tokenizer.encode("<|im_end|>")[0])
    return Episode(make, task, tokenizer, model_stop_token_ids=(stop,), max_turns=max_turns)


async def bisect(game: Episode, tokenizer: TextTokenizer) -> list[Continuation]:
    """A student that halves the range each time."""
    low, high = 0, 63
    answers: list[Continuation] = []
    assert (await game.start()).token_ids.size == 0
    while not answers or answers[-1].finish_reason is None:
        middle = (low + high) // 2
        turn = tokenizer.encode(f"#{middle}<|im_end|>")
        answers.append(await game.advance(turn, "stop", budget_left=100, context_left=100))
        hint = tokenizer.decode(answers[-1].token_ids)
        low, high = (middle + 1, high) if "higher" in hint else (low, middle - 1)
    await game.close()
    return answers


def test_the_pages_environment_plays_its_game(guess_module: str, tokenizer: TextTokenizer) -> None:
    answers = asyncio.run(bisect(episode(guess_module, tokenizer, seed=4, max_turns=7), tokenizer))
    assert (answers[-1].finish_reason, answers[-1].reward) == ("stop", 1.0)
    assert all("assistant" in tokenizer.decode(a.token_ids) for a in answers[:-1])


def test_the_pages_environment_gives_no_reward_when_turns_run_out(guess_module: str, tokenizer: TextTokenizer) -> None:
    seed = next(s for s in range(99) if random.Random(s).randint(0, 63) != 31)
    answers = asyncio.run(bisect(episode(guess_module, tokenizer, seed=seed, max_turns=1), tokenizer))
    assert [(a.finish_reason, a.reward) for a in answers] == [("stop", 0.0)]


def test_the_pages_configuration_is_one() -> None:
    found = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    text = next(t for t in found if "my_package" in t and "max_turns" in t)
    config = msgspec.convert(tomllib.loads(text)["actor"], ActorConfig)
    guess = config.environments_of("guess")["guess"]
    assert (guess.name, guess.max_turns, guess.options) == ("my_package.guess:GuessTheNumber", 6, {"highest": 63})
