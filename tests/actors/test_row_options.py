"""A row of the prompts file sets only what its environment or its reward declares: before a start, and on the actor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillhouse.actors.agent import Context
from stillhouse.actors.config import ActorConfig, EnvConfig
from stillhouse.actors.envs.base import EnvTask, TextTokenizer
from stillhouse.actors.envs.registry import BUILT_IN, UnknownEnvironment, find_environment, options_of_row
from stillhouse.actors.rewards import Answered
from stillhouse.actors.rewards.registry import BUILT_IN as REWARDS
from stillhouse.actors.row_options import RowRefused, declared_by, row_may_set
from stillhouse.launch.checks.prompt_files import ROWS_CHECKED, check_prompts
from stillhouse.protocol.messages import RolloutFailed
from stillhouse.protocol.plugins import load
from tests.actors.in_hand import InHand, ScriptedEngine, ids_of, ticket

HERE = __name__
JUDGE = {"base_url": "http://127.0.0.1:9/v1", "model": "x", "key_env": "PATH"}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("single_turn", {}, {"reward": "os:spawnvp", "reward_options": {"file": "true", "args": ["true"]}}),
    ("single_turn", {}, {"reward": "os:spawnvp"}),
    ("single_turn", {}, {"reward": f"{HERE}:worth"}),
    ("single_turn", {}, {"reward": ["answer"]}),
    ("single_turn", {}, {"reward": "code"}),
    ("single_turn", {}, {"reward": "judge", "reward_options": JUDGE}),
    ("single_turn", {"reward": "judge", "reward_options": JUDGE}, {"reward_options": {"base_url": "http://x/v1"}}),
    ("single_turn", {"reward": "judge", "reward_options": JUDGE}, {"reward_options": {"timeout_s": 1e9}}),
    ("single_turn", {"reward": "code"}, {"reward_options": {"isolation": "none"}}),
    ("single_turn", {"reward": "code"}, {"reward_options": {"python": "/bin/sh"}}),
    ("single_turn", {"reward": f"{HERE}:worth"}, {"reward_options": {"path": "/etc/passwd"}}),
    ("single_turn", {"reward": f"{HERE}:worth"}, {"answer_pattern": "(x)"}),
    ("single_turn", {"reward": "pattern", "reward_options": {"pattern": "x"}}, {"reward_options": {"timeout_s": 1e9}}),
    ("single_turn", {}, {"isolation": "none"}),
    ("sandbox", {}, {"isolation": "none"}),
    ("sandbox", {"memory_mb": 64}, {"memory_mb": 1 << 20}),
    ("sandbox", {"tools": ["python"]}, {"tools": ["bash"]}),
    ("sandbox", {}, {"reward": "os:spawnvp"}),
    ("command", {"argv": ["{python}", "agent.py"]}, {"argv": ["sh", "-c", "true"]}),
    ("openai_agent", {"agent": f"{HERE}:worth"}, {"agent": "os:spawnvp"}),
    ("openenv", {"url": "http://127.0.0.1:1"}, {"url": "http://x"}),
    ("openenv_session", {"factory": f"{HERE}:worth"}, {"options": {"path": "/"}}),
    ("verifiers", {"server": "tcp://127.0.0.1:1"}, {"server": "tcp://x:1"}),
    (f"{HERE}:agent", {}, {"path": "/etc/passwd"}),
]


def worth(answered: Answered, *, path: str = "", answer_pattern: str = "") -> float:
    return 1.0


@row_may_set("level")
async def agent(ctx: Context, task: EnvTask, *, level: int = 0, path: str = "") -> None:
    await ctx.generate()
    ctx.reward(float(level))


@pytest.mark.parametrize(("env", "configured", "row"), REFUSED)
def test_a_row_sets_nothing_that_is_not_declared(env: str, configured: dict[str, Any], row: dict[str, Any]) -> None:
    with pytest.raises(RowRefused):
        options_of_row(configured, row, env)


@pytest.mark.parametrize(("env", "configured", "row"), [REFUSED[0], REFUSED[8], REFUSED[-1]])
def test_such_a_row_is_found_before_a_start(
    env: str, configured: dict[str, Any], row: dict[str, Any], tmp_path: Path
) -> None:
    """Also behind the rows that are checked first, from Parquet, and with letters of JSON written as escapes."""
    runs = {"plain": EnvConfig(name="single_turn"), "own": EnvConfig(name=env, options=configured)}
    bad = {"prompt": "x", "env": "own", "env_options": row}
    many: list[dict[str, Any]] = [{"prompt": "x"}] * (ROWS_CHECKED + 5)
    escaped = json.dumps(bad).replace('"env_options"', '"\\u0065nv_options"')
    (tmp_path / "first.jsonl").write_text(json.dumps(bad))
    (tmp_path / "last.jsonl").write_text("\n".join([*map(json.dumps, many), escaped]))
    pq.write_table(
        pa.Table.from_pylist([{**one, "env": "plain", "env_options": None} for one in many] + [bad]),
        tmp_path / "last.parquet",
    )
    for name in ("first.jsonl", "last.jsonl", "last.parquet"):
        (mistake,) = check_prompts("p", tmp_path / name, runs)
        assert "a row may not" in mistake


def test_a_saved_data_set_is_read_to_its_end(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    runs = {"single_turn": EnvConfig(name="single_turn")}
    rows = [{"prompt": "x", "env_options": {"reward": "answer"}}] * (ROWS_CHECKED + 5)
    for last, n_mistakes in (("answer", 0), ("os:getcwd", 1)):
        made = datasets.Dataset.from_list([*rows, {"prompt": "x", "env_options": {"reward": last}}])
        made.save_to_disk(str(tmp_path / last))
        assert len(check_prompts("p", tmp_path / last, runs)) == n_mistakes
        made.to_json(str(tmp_path / f"{last}-json" / "train.jsonl"))
        assert len(check_prompts("p", f"hf:{tmp_path / f'{last}-json'}", runs)) == n_mistakes


def test_the_actor_asks_again(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """What comes by the wire was checked by nobody."""
    mark = tmp_path / "mark"
    row = {"reward": "os:spawnlp", "reward_options": {"file": "touch", "args": ["touch", str(mark)]}}
    config = ActorConfig(environments={"own": EnvConfig(name=f"{HERE}:agent")})
    hand = InHand(ScriptedEngine(), tokenizer, config)
    for number, (env, options) in enumerate([("single_turn", row), ("own", {"path": "x"})]):
        one = ticket(number, env=env, row=json.dumps({"prompt": "x", "env_options": options}).encode())
        hand.rollouts.add(one, ids_of(1, 2))
    hand.until(lambda: len(hand.failures) == 2)
    assert [failed.error for failed in hand.messages(RolloutFailed)] == ["RowRefused"] * 2
    assert not mark.exists()


def test_what_is_declared_comes_over_the_configured_options_of_the_same_reward() -> None:
    pattern = {"reward": "pattern", "reward_options": {"pattern": "x", "timeout_s": 0.5}}
    given = options_of_row(pattern, {"reward_options": {"pattern": "y", "full": None}}, "single_turn")
    assert given == {"reward": "pattern", "reward_options": {"pattern": "y", "timeout_s": 0.5}}
    given = options_of_row(pattern, {"reward": "answer"}, "single_turn")
    assert given == {"reward": "answer", "reward_options": {}}
    assert options_of_row({}, {"level": 3}, f"{HERE}:agent") == {"level": 3}
    with pytest.raises(RowRefused):
        options_of_row({}, {"level": 3})  # nobody declares it


def test_nothing_of_ours_declares_what_names_code_a_process_a_file_an_address_a_secret_or_a_limit() -> None:
    """By name, so that whoever declares another one reads this."""
    harmless = {"answer_pattern", "result_role", "instructions", "action_names", "draw", "id", "dataset", "player"}
    harmless |= {"reset", "reward", "reward_options", "pattern", "full", "schema", "prompt"}
    declared = {option for path in REWARDS.values() for option in declared_by(load(path))}
    for name in BUILT_IN:
        try:
            declared |= {*declared_by(find_environment(name))}
        except UnknownEnvironment:  # its package is not installed
            continue
    assert declared <= harmless


@pytest.mark.parametrize("name", ["gymnasium", "skyrl_gym"])
def test_a_registered_name_of_a_row_imports_no_module(name: str) -> None:
    pytest.importorskip(name, reason="make agents installs what this needs")
    assert options_of_row({}, {"id": "Taxi-v4"}, name) == {"id": "Taxi-v4"}
    with pytest.raises(RowRefused):
        options_of_row({}, {"id": "antigravity:Taxi-v4"}, name)
