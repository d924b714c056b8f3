"""Flags, files and dotted overrides; and that a wrong one is told at once, without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stillhouse.launch import cluster
from stillhouse.launch.config.command_line import parse_arguments, resolve_config
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.help import help_text
from stillhouse.launch.config.keys import find_key, keys_of
from stillhouse.launch.config.peers import PEERS
from stillhouse.launch.config.run import ALIASES, RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


def resolve(*arguments: str) -> RunConfig:
    return resolve_config(parse_arguments(arguments))


def test_the_flags_that_are_promised_by_name() -> None:
    line = parse_arguments(
        [
            *("--actors", "32", "--teachers", "8", "--steps", "9", "--seed", "4", "--max-staleness", "0"),
            *("--run-dir", "D", "--student", "S", "--teacher", "T", "--prompts", "P.jsonl", "--env", "calculator"),
            *("--actor.engine", "torch", "--teacher.engine", "torch"),
        ]
    )
    config = resolve_config(line)
    assert line.run_dir == Path("D")
    assert (config.actors, config.teachers, config.steps, config.seed) == (32, 8, 9, 4)
    assert (config.buffer.max_staleness, config.models.student, config.models.teacher) == (0, "S", "T")
    assert (config.learner.tasks.prompts, config.learner.tasks.env) == ("P.jsonl", "calculator")
    assert (config.actor.engine, config.teacher.engine) == ("torch", "torch")


def test_urls_say_how_many_workers_there_are_unless_the_user_does() -> None:
    urls = ("--actor.engine", "sglang", "--actor.urls", "http://a:1,http://b:2,http://c:3")
    assert (resolve(*urls).actors, resolve(*urls).teachers) == (3, 1)
    assert resolve(*urls, "--actors", "2").actors == 2  # which preflight refuses
    assert resolve("--teacher.engine=sglang", "--teacher.urls=http://a:1").actor.urls == ()


def test_lists_of_numbers_are_written_with_commas() -> None:
    config = resolve("--actor.server.gpus", "2", "--teacher.server.gpus=0,1", "--actor.server.args=--kv,0.5")
    assert (config.actor.server.gpus, config.teacher.server.gpus) == ((2,), (0, 1))
    assert config.actor.server.args == ("--kv", "0.5")


def test_both_ways_of_writing_a_value_and_both_dashes() -> None:
    assert resolve("--learner.lr", "1e-4").learner.lr == 1e-4
    assert resolve("--learner.lr=1e-4").learner.lr == 1e-4
    assert resolve("--learner.warmup-steps=3").learner.warmup_steps == 3
    assert resolve("--learner.tasks.shuffle", "false").learner.tasks.shuffle is False
    assert resolve("--learner.tasks.shuffle", "--steps", "3").learner.tasks.shuffle is True


def test_flags_win_over_the_file_and_later_flags_over_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("steps = 3\nactors = 5\n")
    config = resolve("--steps", "4", "--config", str(tmp_path / "c.toml"), "--steps", "6")
    assert (config.steps, config.actors) == (6, 5)


def test_resume_starts_from_the_configuration_of_the_run(tmp_path: Path) -> None:
    write_config(build(RunConfig, {"steps": 3, "actors": 7}), tmp_path / "config.yaml")
    config = resolve("--resume", "--run-dir", str(tmp_path), "--steps", "11")
    assert (config.steps, config.actors) == (11, 7)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--actor", "3"], r"--actor: unknown key; did you mean actors\?"),
        (["--max-stalenes=3"], r"did you mean max_staleness\?"),
        (["--lr", "3"], r"did you mean learner\.lr\?"),
        (["--resume-or-start=yes"], "--resume-or-start: takes no value, got 'yes'"),
        (["--steps"], r"--steps: needs a value \(int >= 1\)"),
        (["--steps", "x"], "steps: got 'x', expected int >= 1"),
        (["steps=3"], "flags look like --key value"),
        (["--buffer.max_staleness", "-1"], "buffer.max_staleness: got '-1', expected int >= 0"),
    ],
)
def test_a_wrong_flag_is_told(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve(*arguments)


def test_help_on_everything_lists_every_key_with_docstring() -> None:
    text = help_text(["all"])
    for key in keys_of(RunConfig):
        assert f"--{key.name}" in text
    flat = " ".join(text.split())
    for key in keys_of(RunConfig):
        assert key.doc in flat


def test_a_wrong_configuration_ends_with_code_2_before_torch_is_imported() -> None:
    code = (
        "import sys; from stillhouse.launch.run import main; codes = {main(arg.split()) for arg in sys.argv[1:]};"
        "heavy = {'torch', 'transformers'} & sys.modules.keys(); print('heavy:', sorted(heavy)); sys.exit(*codes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--actor 3", "--student ./nowhere", "--prompts nothing.jsonl"],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2, done.stderr
    assert "heavy: []" in done.stdout
    assert done.stderr.count("stillhouse: ") == 3 and done.stderr.startswith("stillhouse: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--actor.environments.mcp.options.url", "http://user:hunter2@127.0.0.1:9/v1"),
        ("--actor.environments.openenv.options.url", "http://h/v1?x=1&api_key=hunter2"),
        ("--actor.urls", '["http://a:1", "http://hunter2@a:2"]'),
        ("--actor.environments.mcp.options.command", '["prog", "--url=https://h/?X-Amz-Signature=hunter2"]'),
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(words: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(*words, "--steps", "http://hunter2:hunter2@x")
    assert "hunter2" not in str(error.value) and words[0].removeprefix("--") in str(error.value)


@pytest.mark.parametrize("url", ["http://h:1/v1?tokenizer=a&key=", "ssh://git@h/x", "http://h/a@b?c=d:e@f"])
def test_a_url_without_a_secret_is_none(url: str) -> None:
    options = resolve("--actor.environments.mcp.options.url", url).actor.environments["mcp"].options
    assert options["url"] == url


def test_names_of_other_trainers_are_those_of_the_page_and_lead_to_keys() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    page = page.split("## Names of settings")[1].split("\n## ")[0]
    rows = [re.findall(r"`([a-zA-Z0-9_.-]+)`", line) for line in page.splitlines() if line.startswith("| `")]
    assert {name: ours for ours, *names in rows for name in names} == dict(PEERS)
    for name, ours in PEERS.items():
        key = find_key(RunConfig, ours)
        if not ours.startswith("--"):  # else a flag of the command
            assert key is not None and (key.type is not Any or key.doc or ".options." in ours), ours
        if find_key(RunConfig, name) is None and name not in ALIASES:
            with pytest.raises(ConfigError, match=rf"unknown key; did you mean {re.escape(ours)}( or |\?)"):
                parse_arguments([f"--trainer.{name}", "1"])


def test_the_bare_command_prints_its_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["stillhouse"])
    assert cluster.main() == 0
    assert capsys.readouterr().out.startswith("usage: stillhouse ")


def test_what_a_run_is_resumed_with_may_choose_another_member(tmp_path: Path) -> None:
    """The folder says every option of its own one; none of them is left in the way."""
    first = resolve_config(parse_arguments(["--divergence=jsd", "--learner.objective.divergence.beta=0.3"]))
    write_config(first, tmp_path / "config.yaml")
    resume = ["--resume", f"--run-dir={tmp_path}"]
    assert resolve_config(parse_arguments(resume)) == first
    other = resolve_config(parse_arguments([*resume, "--learner.objective.importance.high=1.3", "--importance", "ppo"]))
    assert other.learner.objective.divergence == first.learner.objective.divergence
    assert other.learner.objective.importance.name == "ppo"
    changed = resolve_config(parse_arguments([*resume, "--divergence", "k3"]))
    assert changed.learner.objective.divergence.name == "k3"
