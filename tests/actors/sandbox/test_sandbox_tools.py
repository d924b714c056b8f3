"""The environment `sandbox`: a scripted student calls Python and bash."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stillhouse.actors.config import ActorConfig
from stillhouse.actors.envs.registry import check_options
from stillhouse.actors.failures import Failure
from stillhouse.actors.running_episode import EpisodeEnd
from tests.actors.adapters.conftest import Talk
from tests.actors.sandbox.conftest import needs_bubblewrap

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "agents" / "sandbox.md").read_text()
OPEN: Mapping[str, Any] = {"isolation": "none"}
"""Most of these tests are about the conversation."""


def ended(end: EpisodeEnd | Failure) -> EpisodeEnd:
    assert isinstance(end, EpisodeEnd), end
    return end


def call(name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments})


@pytest.mark.parametrize("isolation", ["none", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def test_the_student_reads_what_its_programs_print(talk: Talk, isolation: str) -> None:
    turns = [
        call("python", code="open('a', 'w').write('6')\nprint('x')\n6 * 7"),
        call("bash", command="cat a; exit 2"),
        "#42",
    ]
    talked = talk("sandbox", turns, {"isolation": isolation}, row={"prompt": "6*7="}, truth="42")
    assert '"code"' in talked.prompt and '"command"' in talked.prompt and "6*7=" in talked.prompt
    assert "x\n42" in talked.heard[0]
    assert "6\n[exit code 2]" in talked.heard[1]
    end = ended(talked.end)
    assert (end.reward, dict(end.info)) == (1.0, {"sandbox_calls": 2.0})


def test_what_cannot_be_run_is_an_error_that_is_read_and_counted(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillhouse.actors.sandbox.sandbox.MAX_TEXT", 1000)
    turns = [
        call("shell", command="ls"),
        call("python", command="ls"),
        call("python", code=["ls"]),
        call("python", code="x" * 1001),
        '{"name": "python", "arguments": {"code": ',
        "#1",
    ]
    talked = talk("sandbox", turns, {**OPEN, "tools": ["python"]}, row={"prompt": "?"}, truth="1")
    assert "there is no tool 'shell'; there are: python" in talked.heard[0]
    assert "python needs the argument 'code', a text" in talked.heard[1]
    assert "python needs the argument 'code', a text" in talked.heard[2]
    assert "source: 1001 characters" in talked.heard[3]
    assert "could not be read" in talked.heard[4]
    assert dict(ended(talked.end).info) == {"sandbox_calls": 4.0, "sandbox_errors": 5.0}


def test_a_program_that_is_stopped_is_told_and_counted(talk: Talk) -> None:
    turns = [call("python", code="print('begun')\nwhile True: pass"), call("python", code="[0] * 10**10"), "#1"]
    options = {**OPEN, "time_limit_s": 0.3, "memory_mb": 100}
    talked = talk("sandbox", turns, options, row={"prompt": "?"}, truth="1")
    assert "begun\n[stopped: it computed for more than 0.3 s]" in talked.heard[0]
    assert "MemoryError\n[exit code 1]" in talked.heard[1]
    assert ended(talked.end).info["sandbox_stopped_time"] == 1.0


def test_a_notation_of_the_student_s_own_goes_on_in_its_turn(talk: Talk) -> None:
    example = tomllib.loads((ROOT / "examples" / "agents" / "sandbox.toml").read_text())
    options = example["actor"]["environments"]["tools"]["options"]
    talked = talk("sandbox", ["<calc>12+34</calc>", "#46"], {**options, **OPEN}, row={"prompt": "12+34="}, truth="46")
    assert talked.heard[0].count("<result>46</result>") == 1
    assert ended(talked.end).reward == 1.0
    wrong = {**options["notation"], "argument": "expression"}
    with pytest.raises(ValueError, match="'python' with 'expression', expected python with code or bash with command"):
        check_options("sandbox", {**OPEN, "notation": wrong})


def test_any_reward_judges_the_last_turn(talk: Talk) -> None:
    options = {**OPEN, "reward": "pattern", "reward_options": {"pattern": "yes"}}
    assert ended(talk("sandbox", ["yes"], options, row={"prompt": "?"}).end).reward == 1.0
    with pytest.raises(ValueError, match="unknown reward 'patern'"):
        check_options("sandbox", {**OPEN, "reward": "patern"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": []}, "tools: got"),
        ({"tools": ["ruby"]}, "expected some of python, bash"),
        ({"max_output": 0}, "max_output: got 0"),
        ({"isolation": "chroot"}, "expected one of bubblewrap, none"),
        ({"memory": 1}, "did you mean 'memory_mb'"),
        ({"max_processes": True}, "max_processes: got True"),
    ],
)
def test_wrong_options_are_refused(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_options("sandbox", {**OPEN, **options})


def test_the_page_names_every_option_and_its_configuration_is_one() -> None:
    with pytest.raises(ValueError, match="It has: ") as raised:
        check_options("sandbox", {"zzzzz": 0})
    options = str(raised.value).rpartition("It has: ")[2].split(", ")
    table = " ".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE))
    assert set(options) == set(re.findall(r"`(\w+)`", table))
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    environment = msgspec.convert(tomllib.loads(text)["actor"], ActorConfig).environments["tools"]
    given = {name: value for name, value in environment.options.items() if name not in ("python", "reward")}
    check_options(environment.name, {**OPEN, **given})


def test_the_agent_on_the_page_runs(talk: Talk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "boxed.py").write_text(code.replace('"bubblewrap"', '"none"'))
    monkeypatch.syspath_prepend(tmp_path)
    talked = talk("boxed:rollout", ["print(input()[:3])", "the"], {}, row={"prompt": "?"}, truth="the")
    assert "the" in talked.heard[0] and ended(talked.end).reward == 1.0
