"""`stillhouse try`: real episodes of the built-in student, printed turn by turn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stillhouse.tools.try_environment import main

PAGE = Path(__file__).parents[2] / "docs" / "agents" / "coroutine.md"
FAULTY = """
from stillhouse.actors.envs.base import Action, Environment, EnvTask, Observation, StepResult, TextTokenizer

class Faulty(Environment):
    def __init__(self, tokenizer: TextTokenizer) -> None: ...
    async def reset(self, task: EnvTask) -> Observation:
        return Observation()
    async def step(self, action: Action) -> StepResult:
        raise KeyError("tool")
"""


def test_episodes_are_printed_turn_by_turn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["single_turn", "--n", "2"]) == 0
    text = capsys.readouterr().out
    assert text.count("episode ") == 2 and "environment single_turn, tag 'addition'" in text
    turns = re.findall(r"  (context|student) +(\d+) tokens  '(.*)'", text)
    assert [author for author, _, _ in turns] == ["context", "student"] * 2
    assert turns[0][2].startswith("<|im_start|>user")
    ends = re.findall(r"ended: stop, reward [01], 1 turns, (\d+) tokens of context, (\d+) of the student", text)
    assert [n for pair in ends for n in pair] == [n for _, n, _ in turns]


def test_an_agent_shows_its_branches(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (tmp_path / "my_agents.py").write_text("".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    (tmp_path / "agents.toml").write_text("".join(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["pair", "--config", "agents.toml", "--n", "1"]) == 0
    assert capsys.readouterr().out.count("-- a branch behind token") >= 2


def test_a_failed_episode_says_why_and_is_the_exit_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty_environment.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["faulty_environment:Faulty", "--n", "1"]) == 1
    assert "failed: env_error (KeyError): 'tool' (at faulty_environment.py:9 in step)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--n", "0"], "--n: got '0', expected a whole number of at least 1"),
        (["singel_turn"], "did you mean 'single_turn'"),
        (["--model", "no/where"], "models.student"),
        (["single_turn", "more"], "'more': unexpected"),
    ],
)
def test_mistakes_are_refused(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
