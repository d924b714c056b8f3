"""docs/agents: the commands that make prompts make the examples' files, and the configurations are accepted."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest

from stillhouse.actors.config import ActorConfig
from stillhouse.actors.envs.registry import check_options
from tests.actors.adapters import verifiers_server
from tests.actors.adapters.conftest import MADE_BY
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
PAGES = ("gymnasium", "reasoning_gym", "skyrl_gym", "textarena", "openenv")
ALL_PAGES = (*PAGES, "verifiers")


def skip_without(name: str) -> None:
    if name not in ("openenv", "verifiers"):  # their packages are the servers'
        pytest.importorskip(name, reason=MADE_BY)


@pytest.mark.parametrize("name", PAGES)
def test_the_command_on_the_page_makes_the_examples_prompts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    skip_without(name)
    page = (ROOT / "docs" / "agents" / f"{name}.md").read_text()
    (code,) = re.findall(r"^\.venv/bin/python -c '(.*?)' >", page, re.DOTALL | re.MULTILINE)
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out == (ROOT / "examples" / "agents" / f"{name}.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not verifiers_server.PYTHON.exists(), reason=verifiers_server.MADE_BY)
def test_the_command_on_the_page_of_verifiers_makes_the_examples_prompts() -> None:
    page = (ROOT / "docs" / "agents" / "verifiers.md").read_text()
    (command,) = re.findall(r"^\.venv-verifiers/bin/python (.* --rows \d+) >", page, re.MULTILINE)
    line = [str(verifiers_server.PYTHON), *command.split()]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == (ROOT / "examples" / "agents" / "verifiers.jsonl").read_text()


@pytest.mark.parametrize("name", ALL_PAGES)
def test_the_configuration_on_the_page_is_one(name: str) -> None:
    skip_without(name)
    page = (ROOT / "docs" / "agents" / f"{name}.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    config = tomllib.loads(text)
    env = config["learner"]["tasks"]["env"]
    environment = msgspec.convert(config["actor"], ActorConfig).environments_of(env)[env]
    assert environment.name == name
    check_options(name, environment.options)


@pytest.mark.parametrize("name", ALL_PAGES)
def test_every_option_is_on_the_page(name: str) -> None:
    skip_without(name)
    page = (ROOT / "docs" / "agents" / f"{name}.md").read_text()
    with pytest.raises(ValueError, match="It has: ") as raised:
        check_options(name, {"zzzzz": 0})
    options = str(raised.value).rpartition("It has: ")[2].split(", ")
    rows = " ".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))
    assert set(options) == set(re.findall(r"`(\w+)`", rows))
