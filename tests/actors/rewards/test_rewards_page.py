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

from stillhouse.actors.config import ActorConfig
from stillhouse.actors.envs.registry import check_options, options_of_row
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
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
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
