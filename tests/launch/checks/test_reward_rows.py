"""Rows that a reward can never judge are refused before a run, wherever they are in the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stillhouse.launch.checks.preflight import check
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError

GOOD = [{"assert_code": "assert add(1, 2) == 3"}]
CODE = {"reward": "code", "reward_options": {"isolation": "none"}}


def refused(tmp_path: Path, options: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    """What is said of a file with these rows behind 1,200 good ones; empty: nothing."""
    first = [{"prompt": "add", "tag": "code", "test_cases": json.dumps(GOOD)}] * 1200
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*first, *rows]))
    tasks = {"prompts": str(file), "env": "single_turn", "eval_share": 0.01}
    plain = {"learner": {"tasks": tasks}, "actor": {"environments": {"single_turn": {"options": options}}}}
    try:
        check(build(RunConfig, plain))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_row_far_behind_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    wrong = {"prompt": "add", "test_cases": '[{"stdin": "1"}]'}
    said = refused(tmp_path, CODE, [wrong, {"prompt": "add", "case_type": "text", "test_cases": json.dumps(GOOD)}])
    assert "2 of 1,202 rows have values that their reward cannot read, the first: row 1200: test_cases: got" in said


def test_the_reward_of_the_rows_tag_decides(tmp_path: Path) -> None:
    options = {"reward": "answer", "rewards": {"code": CODE}}
    wrong = {"prompt": "add", "test_cases": "[{"}
    assert not refused(tmp_path, options, [wrong, {**wrong, "tag": "other"}])
    assert "1 of 1,201 rows" in refused(tmp_path, options, [{**wrong, "tag": "code"}])
    of_its_own = {"env_options": {"reward": "pattern", "reward_options": {"pattern": "x"}}}
    assert not refused(tmp_path, options, [{**wrong, "tag": "code", **of_its_own}])


@pytest.mark.parametrize("options", [{"reward": "answer"}, {"reward": "pattern", "reward_options": {"pattern": "x"}}])
def test_rewards_that_read_no_such_column_refuse_no_row(tmp_path: Path, options: Mapping[str, Any]) -> None:
    assert not refused(tmp_path, options, [{"prompt": "add", "test_cases": "[{"}])


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ({"code": {"reward_options": {}}}, "rewards.code: got"),
        ({"code": "cod"}, "did you mean 'code'?"),
        ({"code": {"reward": "code", "reward_options": {"limit": 1}}}, "has no option 'limit'"),
    ],
)
def test_rewards_by_tag_that_cannot_be_made_are_refused(tmp_path: Path, rewards: Mapping[str, Any], said: str) -> None:
    assert said in refused(tmp_path, {"rewards": rewards}, [])
