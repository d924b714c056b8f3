"""docs/rewards.md: its options, counts and examples are those of the code."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stillhouse.actors.config import ActorConfig
from stillhouse.actors.envs.base import Action, EnvTask
from stillhouse.actors.envs.registry import check_options, make_environment, options_of_row
from stillhouse.actors.rewards import Answered
from stillhouse.actors.rewards.custom import custom_reward
from stillhouse.actors.rewards.registry import BUILT_IN
from stillhouse.protocol.plugins import load

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "rewards.md").read_text()


def test_every_option_is_on_the_page() -> None:
    rows: dict[str, str] = dict(re.findall(r"^\| `(\w+)`.*? \|.*? \| (.*?) \|$", PAGE, re.MULTILINE))
    assert set(rows) == set(BUILT_IN)
    for name, path in BUILT_IN.items():
        maker: Any = load(path)
        assert set(inspect.signature(maker).parameters) <= set(re.findall(r"`(\w+)`", rows[name])), name


def test_every_count_is_on_the_page() -> None:
    code = "".join(file.read_text() for file in (ROOT / "actors" / "rewards").glob("*.py"))
    reasons = set(re.findall(r'(?:unscored\(|_Failed\(|CheckerLost\(|"unscored": |else )"(\w+)"', code))
    assert len(reasons) > 10
    reasons.remove("by_function")  # said by the user's own
    assert {reason for reason in reasons if f"_{reason}`" not in PAGE} == set()


def test_the_configuration_on_the_page_is_one_for_each_of_its_rows() -> None:
    text = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0]
    config = tomllib.loads(text)
    options = msgspec.convert(config["actor"], ActorConfig).environments["single_turn"].options
    (rows,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    for line in rows.splitlines():
        check_options("single_turn", options_of_row(options, json.loads(line).get("env_options", {}), "single_turn"))


def test_the_functions_on_the_page_work() -> None:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(code, names)
    assert inspect.iscoroutinefunction(names["rollout"])
    reward = custom_reward("brief", names["brief"], {"most": 3})
    assert [asyncio.run(reward(Answered(text))).reward for text in ("abc", "abcd", "")] == [1.0, 0.0, None]


def test_rewards_by_tag_judge_the_rows_of_their_tag() -> None:
    """With the options of the page's example."""
    example = tomllib.loads(re.findall(r"```toml\n(.*?)```", PAGE.split("## A reward per tag")[1], re.DOTALL)[0])
    options = example["actor"]["environments"]["single_turn"]["options"]
    check_options("single_turn", options)
    options["rewards"]["brief"] = {"reward": "pattern", "reward_options": {"pattern": "^.{1,4}$"}}
    tokenizer: Any = None

    def reward(tag: str, text: str, of_row: dict[str, Any] | None = None) -> float | None:
        environment = make_environment("single_turn", tokenizer, options_of_row(options, of_row or {}, "single_turn"))
        task = EnvTask(np.zeros(1, np.int32), "7", tag, "r", 0, {"prompt": "?"})

        async def judge() -> float | None:
            await environment.reset(task)
            return (await environment.step(Action(np.zeros(1, np.int32), text, "stop", 0, True))).reward

        return asyncio.run(judge())

    assert [reward(tag, "#7") for tag in ("brief", "math", "")] == [1.0, 1.0, 1.0]
    assert [reward(tag, "it is #7") for tag in ("brief", "math", "")] == [0.0, 1.0, 1.0]
    assert reward("code_KodCode", "#7") is None, "it has no test cases"
    assert reward("brief", "it is #7", {"reward": "answer"}) == 1.0, "the row's own comes first"
