"""Environments by name, by installed package and by path; mistakes name the nearest."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stillhouse.actors.config import ActorConfig, EnvConfig
from stillhouse.actors.envs.base import Action, EnvTask, TextTokenizer
from stillhouse.actors.envs.calculator import Calculator
from stillhouse.actors.envs.registry import (
    UnknownEnvironment,
    check_options,
    find_environment,
    load_environments,
    make_environment,
)
from stillhouse.actors.envs.single_turn import SingleTurn

OWN_ENVIRONMENT = """
from stillhouse.actors.envs.base import Environment
from stillhouse.actors.envs.single_turn import SingleTurn

class Own(SingleTurn):
    pass

class Sync:
    def __init__(self, tokenizer): pass
    stop_token_ids = ()
    async def reset(self, task): pass
    def step(self, action): pass
    async def close(self): pass

class NoStep(Environment):
    def __init__(self, tokenizer): pass
    async def reset(self, task): pass

class NoClose:
    def __init__(self, tokenizer): pass
    async def reset(self, task): pass
    async def step(self, action): pass

not_a_class = 3
"""


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package as importlib.metadata sees one: a module, and a dist-info folder with entry points."""
    (tmp_path / "own_environments.py").write_text(OWN_ENVIRONMENT)
    info = tmp_path / "own_environments-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-environments\nVersion: 1.0\n")
    entries = "own = own_environments:Own\nsingle_turn = own_environments:Own\ngone = own_environments:Gone\n"
    (info / "entry_points.txt").write_text(f"[stillhouse.environments]\n{entries}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_environments", raising=False)


def test_built_in_names_and_paths(tokenizer: TextTokenizer) -> None:
    assert find_environment("single_turn") is SingleTurn
    assert find_environment("stillhouse.actors.envs.calculator:Calculator") is Calculator
    assert isinstance(make_environment("calculator", tokenizer, {}), Calculator)


@pytest.mark.usefixtures("own_package")
def test_an_installed_package_adds_its_own(tokenizer: TextTokenizer) -> None:
    assert type(make_environment("own", tokenizer, {})).__name__ == "Own"


@pytest.mark.usefixtures("own_package")
def test_a_package_cannot_take_a_built_in_name() -> None:
    assert find_environment("single_turn") is SingleTurn


@pytest.mark.usefixtures("own_package")
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("calcualtor", "did you mean 'calculator'"),
        (
            "zzz",
            "Known: calculator, command, gone, gymnasium, mcp, openai_agent, openenv, openenv_session",
        ),
        ("gone", "cannot load 'own_environments:Gone'"),
        ("no_such_module:Own", "cannot load"),
        ("own_environments:", "cannot load"),
        ("own_environments:not_a_class", "is a int, expected a class"),
    ],
)
def test_unknown_names_say_what_is_known(name: str, complaint: str) -> None:
    with pytest.raises(UnknownEnvironment, match=complaint):
        find_environment(name)


@pytest.mark.usefixtures("own_package")
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("Sync", r"its step is a plain function, expected `async def step\(self, action\)`"),
        ("NoStep", r"has no step: expected `async def step\(self, action\)`"),
        ("NoClose", r"has no close: expected `async def close\(self\)`"),
    ],
)
def test_a_class_without_the_three_coroutines_is_refused_before_anything_starts(name: str, complaint: str) -> None:
    with pytest.raises(UnknownEnvironment, match=complaint):
        check_options(f"own_environments:{name}", {})


def test_an_unknown_option_names_the_nearest(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ValueError, match="no option 'answer_patern'; did you mean 'answer_pattern'"):
        make_environment("single_turn", tokenizer, {"answer_patern": "(x)"})


def test_an_actor_finds_environments_by_the_names_tasks_use() -> None:
    strict = EnvConfig(name="single_turn", options={"answer_pattern": "(x)"}, max_turns=1)
    config = ActorConfig(environments={"strict": strict})
    assert config.environments_of("strict") == {"strict": strict}
    assert config.environments_of("calculator") == {"calculator": EnvConfig(name="calculator"), "strict": strict}


def test_an_environment_without_a_name_of_its_own_is_found_by_the_name_that_tasks_use() -> None:
    config = ActorConfig(environments={"calculator": EnvConfig(max_turns=3)})
    assert config.environments_of("single_turn") == {
        "single_turn": EnvConfig(name="single_turn"),
        "calculator": EnvConfig(name="calculator", max_turns=3),
    }


def test_options_of_a_row_lie_over_the_configured_ones_and_null_changes_nothing(tokenizer: TextTokenizer) -> None:
    config = EnvConfig(name="single_turn", options={"answer_pattern": "=(.*)"})
    make = load_environments({"answers": config})["answers"].make
    task = EnvTask(np.array([1], dtype=np.int32), "7", "", "train-0-0-0", seed=0)

    async def rewarded(options: dict[str, Any], text: str) -> float | None:
        environment = make(tokenizer, options)
        await environment.reset(task)
        ids = np.array([1], dtype=np.int32)
        return (await environment.step(Action(ids, text, "stop", 0, last=True))).reward

    assert asyncio.run(rewarded({}, "=7")) == asyncio.run(rewarded({"answer_pattern": None}, "=7")) == 1.0
    assert asyncio.run(rewarded({"answer_pattern": "#(.*)"}, "=7")) == 0.0
    with pytest.raises(ValueError, match="may not set 'pattern'"):
        make(tokenizer, {"pattern": "x"})


@pytest.mark.parametrize("field", [{"max_turns": 0}, {"step_timeout_s": 0.0}])
def test_senseless_environment_settings_are_refused(field: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        EnvConfig(**field)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["segment_tokens", "max_concurrent_rollouts"])
def test_senseless_actor_settings_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ActorConfig(**{field: 0})  # type: ignore[arg-type]
