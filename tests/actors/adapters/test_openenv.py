"""Environments behind a real server of OpenEnv, which runs in a Python environment of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stillhouse.actors.envs.registry import check_options
from tests.actors.adapters.conftest import Talk
from tests.actors.adapters.openenv_server import MADE_BY, PYTHON, ROOT, free_port, serving

served = pytest.mark.skipif(not PYTHON.exists(), reason=MADE_BY)
ODD = '''
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Count(Action):
    number: int

class Seen(Observation):
    total: int
    note: dict = {}

class Odd(Environment):
    """Adds numbers; breaks at 13."""
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, start=0, **kwargs):
        self.total = start
        return Seen(total=start, note={"seed": seed})
    def step(self, action, timeout_s=None, **kwargs):
        if action.number == 13:
            raise RuntimeError("no thirteen")
        self.total += action.number
        return Seen(total=self.total, done=self.total > 9, reward=None if action.number == 1 else 0.25)
    @property
    def state(self):
        return State()

app = create_app(Odd, Count, Seen, max_concurrent_envs=1)
'''
ADD: dict[str, Any] = {"action": {"number": "{text}"}, "answer_pattern": r"(\d+)", "fields": ["total"]}


@pytest.fixture(scope="module")
def sums() -> Iterator[str]:
    with serving(ROOT / "examples" / "agents", "openenv_sums:app") as url:
        yield url


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "odd_server.py").write_text(ODD)
    with serving(folder, "odd_server:app") as url:
        yield url


@served
@pytest.mark.slow
def test_a_wrong_sum_is_asked_again_and_the_rewards_are_added(talk: Talk, sums: str) -> None:
    options: dict[str, Any] = {"url": sums, "fields": ["prompt"], "reset": {"tries": 3}}
    row = {"prompt": "Add: {observation}", "seed": 4}
    asked = talk("openenv", ["#0"], options, row=row).prompt
    left, _, right = asked.partition("Add: ")[2].partition("=")[0].partition("+")
    talked = talk("openenv", ["#0", f"#{int(left) + int(right)}", "never said"], options, row=row)
    assert talked.prompt == asked, "the seed of the row"
    assert talked.heard == [f"\n<|im_start|>user\n{left}+{right}=<|im_end|>\n<|im_start|>assistant\n"]
    assert (talked.reward, talked.info["openenv_steps"]) == (1.0, 2.0)
    other = talk("openenv", ["#0"], options, row={"prompt": "Add: {observation}"}, seed=77).prompt
    assert other != asked, "the rollout's own seed"


@served
@pytest.mark.slow
def test_many_episodes_have_a_session_each(talk: Talk, sums: str) -> None:
    def play(seed: int) -> tuple[str, float | None]:
        talked = talk("openenv", ["#0", "#0"], {"url": sums, "fields": ["prompt"]}, row={"seed": seed})
        return talked.prompt, talked.reward

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(play, range(16)))
    assert together == [play(seed) for seed in range(16)]


@served
@pytest.mark.slow
def test_observations_and_actions_of_any_form(talk: Talk, odd: str) -> None:
    options = {name: value for name, value in ADD.items() if name != "fields"}
    talked = talk("openenv", ["plus 1", "and 9"], options | {"url": odd, "reset": {"start": 2}}, row={"seed": 3})
    assert '{"total": 2, "note": {"seed": 3}}' in talked.prompt
    assert '{"total": 3, "note": {}}' in talked.heard[0]
    assert talked.reward == 0.25


@served
@pytest.mark.slow
def test_an_action_that_the_server_refuses_is_told_and_the_session_goes_on(talk: Talk, odd: str) -> None:
    talked = talk("openenv", ["none", "9", "2"], ADD | {"url": odd})
    assert "Invalid action: Input should be a valid integer" in talked.heard[0]
    assert (talked.reward, talked.info["openenv_invalid_actions"], talked.info["openenv_steps"]) == (0.5, 1.0, 2.0)


@served
@pytest.mark.slow
def test_an_environment_that_breaks_fails_its_rollout_with_its_words(talk: Talk, odd: str) -> None:
    end = talk("openenv", ["13", "9"], ADD | {"url": odd}).end
    assert "OpenEnvError" in str(end) and "EXECUTION_ERROR: no thirteen" in str(end)
    missing = talk("openenv", ["1"], ADD | {"url": odd, "fields": ["text"]}).end
    assert "no ['text']; it has: metadata, total, note" in str(missing)


@served
@pytest.mark.slow
def test_a_server_without_a_free_session_is_waited_for(talk: Talk, odd: str) -> None:
    """It has one."""

    def play(seed: int) -> float | None:
        return talk("openenv", ["9", "9"], ADD | {"url": odd}, seed=seed).reward

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(play, range(4))) == [0.5] * 4


def test_a_server_that_is_not_there_fails_the_rollout(talk: Talk) -> None:
    end = talk("openenv", ["1"], {"url": f"http://127.0.0.1:{free_port()}"}).end
    assert "ClientConnectorError" in str(end)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"url": "localhost:8000"}, "url: got 'localhost:8000', expected the server's address"),
        ({"url": "http://a", "action": {"message": "text"}}, r"action: .* expected \{text\} in it"),
        ({"url": "http://a", "answer_pattern": "x"}, "0 groups"),
        ({"url": "http://a", "field": []}, "no option 'field'; did you mean 'fields'"),
        ({}, "url: got '', expected the server's address"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_options("openenv", options)
