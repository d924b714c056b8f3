"""Rows that a reward can never judge are refused before a run, wherever they are in the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stillhouse.actors.rewards import Answered
from stillhouse.launch.checks.preflight import check
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError
from tests.actors.adapters.conftest import MADE_BY

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
        warned = check(build(RunConfig, plain)).warnings
    except ConfigError as error:
        return str(error)
    assert not any("their reward cannot read" in one for one in warned), warned
    return ""


def test_ground_truths_of_who_named_no_reward_are_a_warning(tmp_path: Path) -> None:
    """Whoever only distils has columns that the default reward cannot read, and wants none."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "?", "ground_truth": f"City {i}"}) + "\n" for i in range(300)))
    plain = {"learner": {"tasks": {"prompts": str(file), "env": "single_turn"}}}
    (warned,) = [one for one in check(build(RunConfig, plain)).warnings if "reward" in one]
    assert "300 of 300 rows" in warned and "their reward is always 0" in warned


def test_a_row_far_behind_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    wrong = {"prompt": "add", "test_cases": '[{"stdin": "1"}]'}
    said = refused(tmp_path, CODE, [wrong, {"prompt": "add", "case_type": "text", "test_cases": json.dumps(GOOD)}])
    assert (
        "2 of 1,202 rows have values that their reward cannot read, the first: " in said
        and "line 1201: test_cases: got" in said
    )


def test_the_reward_of_the_rows_tag_decides(tmp_path: Path) -> None:
    options = {"reward": "answer", "rewards": {"code": CODE}}
    wrong = {"prompt": "add", "test_cases": "[{"}
    assert not refused(tmp_path, options, [wrong, {**wrong, "tag": "other"}])
    assert "1 of 1,201 rows" in refused(tmp_path, options, [{**wrong, "tag": "code"}])
    of_its_own = {"env_options": {"reward": "pattern", "reward_options": {"pattern": "x"}}}
    assert not refused(tmp_path, options, [{**wrong, "tag": "code", **of_its_own}])


@pytest.mark.parametrize(
    ("options", "wrong", "fine"),
    [
        (
            {"reward": "answer"},
            ["x = 5", [], "", "about 7", "#", {"value": 7}, "Infinity"],
            ["1,234", 7, "-.5", "24 - 6 = 18\n#### 18", None],
        ),
        ({"answer_pattern": r"is (\w+)"}, [], ["x", ""]),
        ({"reward": "answer", "reward_options": {"answer_pattern": r"is (\w+)"}}, [], ["x", []]),
        (
            {"reward": "math"},
            [[], ["one", "two"], "", "  ", "$$", "\\boxed{}", {"a": 1}, "\\$5"],
            [r"\frac{1}{2}", r"$\sqrt{2}$", "Monday", [1, 2], None, r"so \boxed{3}", "1/2", 0.5],
        ),
    ],
)
def test_ground_truths_that_no_answer_can_equal_are_named(
    tmp_path: Path, options: Mapping[str, Any], wrong: list[Any], fine: list[Any]
) -> None:
    if options.get("reward") == "math":
        pytest.importorskip("math_verify", reason=MADE_BY)
    rows = [{"prompt": "?", "ground_truth": truth} for truth in [*fine, *wrong]]
    said = refused(tmp_path, options, rows)
    if wrong:
        assert f"{len(wrong)} of {1200 + len(rows):,} rows have values" in said, said
        assert f"line {1201 + len(fine)}: ground_truth: got" in said and "expected" in said
    else:
        assert not said


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"reward": "pattern", "reward_options": {"pattern": "("}}, "is not a regular expression"),
        ({"reward": "json_schema", "reward_options": {"schema": {"type": "objekt"}}}, "not a JSON schema"),
        ({"reward": "json_schema"}, "needs the option schema"),
        ({"answer_pattern": "x"}, "0 groups, expected 1"),
    ],
)
def test_a_rewards_options_are_read_in_every_row(tmp_path: Path, own: Mapping[str, Any], said: str) -> None:
    if own.get("reward") == "json_schema":
        pytest.importorskip("jsonschema", reason=MADE_BY)
    assert said in refused(tmp_path, {}, [{"prompt": "?", "env_options": own}])


def even(answered: Answered, *, limit: int = 10) -> float:
    return float(answered.response == answered.ground_truth)


def why_not_even(answered: Answered, *, limit: int = 10) -> str:
    return "" if int(answered.ground_truth or 0) <= limit else f"ground_truth: above {limit}"


even.why_unreadable = why_not_even  # pyright: ignore[reportFunctionMemberAccess]


def test_a_function_of_ones_own_may_say_what_it_cannot_read(tmp_path: Path) -> None:
    options = {"reward": f"{__name__}:even", "reward_options": {"limit": 20}}
    rows = [{"prompt": "?", "ground_truth": truth} for truth in ("20", "21")]
    assert "1 of 1,202 rows" in refused(tmp_path, options, rows)


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
