"""Whole runs of examples/agents, on the real packages: short, and audited."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stillhouse.sglang_server.servers import DEFAULT_PYTHON
from tests.actors.adapters import openenv_server, verifiers_server
from tests.actors.sandbox.conftest import needs_bubblewrap
from tests.integration.conftest import ROOT, Launched
from tests.integration.test_whole_run import assert_balanced
from tests.patience import Limit

EXAMPLES = ROOT / "examples" / "agents"
SHORT = ("--steps=3", "--learner.eval_every=3", "--actors=1", "--buffer.heartbeat_s=0.1")
LONGER = 24
"""Steps of a run of short turns: three end before an actor's heartbeat has told the environment's figures."""


def run_example(
    launch: Callable[..., Launched], name: str, config: Path | None = None, *more: str, steps: int = 3
) -> Launched:
    """A few steps of the example. Its prompts are named from the repository's top, and runs start elsewhere."""
    path = str(config or EXAMPLES / f"{name}.toml")
    length = (f"--steps={steps}", f"--learner.eval_every={steps}")
    run = launch("--config", path, f"--prompts={EXAMPLES / name}.jsonl", *SHORT, *length, *more)
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    assert [row["step"] for row in run.steps()] == list(range(1, steps + 1))
    run.expect_clean_audit()
    return run


def invalid_actions(run: Launched) -> float:
    """The most per rollout of any step."""
    return max(row.get("env/gymnasium_invalid_actions_per_rollout", 0.0) for row in run.steps())


def test_the_student_is_taught_on_tasks_of_reasoning_gym(launch: Callable[..., Launched]) -> None:
    pytest.importorskip("reasoning_gym", reason="make agents installs what this needs")
    run = run_example(launch, "reasoning_gym")
    assert all(row["train/grad_norm"] > 0 and row["train/reverse_kl"] > 0 for row in run.steps())
    before, _ = run.summary()["eval"]
    assert 0.0 < before["accuracy_sampled"] < 1.0, "the questions reach the student in the form that it knows"
    assert run.summary()["teacher_accuracy"]["default"]["accuracy_sampled"] > 0.8


def test_the_student_plays_games_of_gymnasium(launch: Callable[..., Launched]) -> None:
    pytest.importorskip("gymnasium", reason="make agents installs what this needs")
    run = run_example(launch, "gymnasium", steps=LONGER)
    assert invalid_actions(run) > 0
    assert all(-4.0 <= row["rollouts/reward_mean"] <= 1.0 for row in run.steps())


def test_the_student_is_taught_in_an_environment_written_for_skyrl(launch: Callable[..., Launched]) -> None:
    pytest.importorskip("skyrl_gym", reason="make agents installs what this needs")
    run = run_example(launch, "skyrl_gym", steps=LONGER)
    assert all(row["train/grad_norm"] > 0 and row["train/reverse_kl"] > 0 for row in run.steps())
    before, _ = run.summary()["eval"]
    assert 0.0 < before["accuracy_sampled"] < 1.0
    assert max(row.get("env/skyrl_gym_turns_per_rollout", 0.0) for row in run.steps()) > 1.0, "some had a second try"


def test_the_student_plays_games_of_textarena(launch: Callable[..., Launched]) -> None:
    pytest.importorskip("textarena", reason="make agents installs what this needs")
    run = run_example(launch, "textarena", steps=LONGER)
    assert all(-0.5 <= row["rollouts/reward_mean"] <= 1.0 for row in run.steps())
    assert max(row.get("env/textarena_moves_per_rollout", 0.0) for row in run.steps()) > 0


def test_the_student_calls_tools_of_an_mcp_server(launch: Callable[..., Launched]) -> None:
    """The server of the example, at the address of its configuration."""
    pytest.importorskip("mcp", reason="make agents installs what this needs")
    server = EXAMPLES / "mcp_calculator.py"
    with socket.socket() as probe:
        if not probe.connect_ex(("127.0.0.1", 8931)):
            pytest.skip("something else listens on port 8931")
    with subprocess.Popen([sys.executable, str(server), "--port", "8931"], stderr=subprocess.DEVNULL) as serving:
        try:
            limit = Limit()
            while True:
                with socket.socket() as probe:
                    if not probe.connect_ex(("127.0.0.1", 8931)):
                        break
                assert not limit.passed and serving.poll() is None
                time.sleep(0.1)
            run = run_example(launch, "mcp")
        finally:
            serving.kill()
    assert all(row["train/grad_norm"] > 0 and row["train/reverse_kl"] > 0 for row in run.steps())
    assert max(row.get("env/mcp_calls_per_rollout", 0.0) for row in run.steps()) > 0.5
    assert run.summary()["eval"][-1]["failed"] == 0


def test_an_agent_of_the_openai_sdk_teaches_the_student(launch: Callable[..., Launched]) -> None:
    pytest.importorskip("openai", reason="make agents installs what this needs")
    run = run_example(launch, "openai")
    assert all(row["train/grad_norm"] > 0 and row["train/reverse_kl"] > 0 for row in run.steps())
    before, _ = run.summary()["eval"]
    assert 0.0 < before["accuracy_sampled"] < 1.0
    calls = [row["env/endpoint_calls_per_rollout"] for row in run.steps() if "env/endpoint_calls_per_rollout" in row]
    assert calls and min(calls) >= 1.0 and all(row.get("agents/forks_per_rollout", 0.0) == 0.0 for row in run.steps())


@pytest.mark.skipif(not openenv_server.PYTHON.exists(), reason=openenv_server.MADE_BY)
def test_the_student_is_taught_behind_a_server_of_openenv(launch: Callable[..., Launched], tmp_path: Path) -> None:
    with openenv_server.serving(EXAMPLES, "openenv_sums:app") as url:
        config = tmp_path / "openenv.toml"
        config.write_text((EXAMPLES / "openenv.toml").read_text().replace("http://127.0.0.1:8765", url))
        run = run_example(launch, "openenv", config)
    assert all(row["train/grad_norm"] > 0 for row in run.steps())
    assert max(row.get("env/openenv_steps_per_rollout", 0.0) for row in run.steps()) > 1.0


@pytest.mark.skipif(not verifiers_server.PYTHON.exists(), reason=verifiers_server.MADE_BY)
@pytest.mark.parametrize("engine", ["torch", "sglang"])
def test_the_student_is_taught_by_the_train_client_of_verifiers(
    launch: Callable[..., Launched], tmp_path: Path, engine: str
) -> None:
    """Also on a server of SGLang, which has not the route that the client asks for."""
    if engine == "sglang" and not DEFAULT_PYTHON.exists():
        pytest.skip("no .venv-sglang: make sglang-cpu")
    with verifiers_server.serving("verifiers_sums") as server:
        config, student = tmp_path / "verifiers.toml", verifiers_server.ROOT / "builtin" / "data" / "student"
        text = (EXAMPLES / "verifiers.toml").read_text().replace("tcp://127.0.0.1:8766", server.address)
        config.write_text(text.replace('"builtin/data/student"', f'"{student}"'))
        run = run_example(launch, "verifiers", config, f"--actor.engine={engine}", "--device=cpu")
    assert all(row["train/grad_norm"] > 0 for row in run.steps())
    assert max(row.get("env/verifiers_tries_per_rollout", 0.0) for row in run.steps()) > 1.0
    assert run.summary()["eval"][-1]["failed"] == 0


def test_rows_mix_games_and_tasks_in_one_run(launch: Callable[..., Launched], tmp_path: Path) -> None:
    for package in ("gymnasium", "reasoning_gym"):
        pytest.importorskip(package, reason="make agents installs what this needs")
    games = """
[actor.environments.games]
name = "gymnasium"
options = { id = "Blackjack-v1", instructions = "", max_invalid_actions = 1 }
"""
    config, prompts = tmp_path / "both.toml", tmp_path / "both.jsonl"
    config.write_text((EXAMPLES / "reasoning_gym.toml").read_text() + games)
    sums = (EXAMPLES / "reasoning_gym.jsonl").read_text().splitlines()[:48]
    cards = [{"prompt": "{game}", "env": "games", "seed": seed} for seed in range(24)]
    lakes = [row | {"tag": "lake", "env_options": {"id": "FrozenLake-v1"}} for row in cards]
    prompts.write_text("\n".join([*sums, *map(json.dumps, [*cards, *lakes])]))
    run = launch("--config", str(config), f"--prompts={prompts}", *SHORT)
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    run.expect_clean_audit()
    assert invalid_actions(run) > 0
    assert run.summary()["eval"][-1]["tags"].keys() >= {"games", "lake"}


@needs_bubblewrap
def test_the_student_runs_python_in_a_sandbox(launch: Callable[..., Launched]) -> None:
    prompts = ROOT / "builtin" / "data" / "calculator_train.jsonl"
    run = launch("--config", str(EXAMPLES / "sandbox.toml"), f"--prompts={prompts}", *SHORT)
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    run.expect_clean_audit()
    assert all(row["train/grad_norm"] > 0 and row["train/reverse_kl"] > 0 for row in run.steps())
    assert max(row.get("env/sandbox_calls_per_rollout", 0.0) for row in run.steps()) > 0.5
    assert run.summary()["eval"][-1]["failed"] == 0
    assert run.summary()["teacher_accuracy"]["default"]["accuracy_sampled"] > 0.8, "it reads the results, and goes on"
