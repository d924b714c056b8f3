"""The first rows of prompts files are looked at before anything is started: columns, environments and their options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillhouse.actors.config import EnvConfig
from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.actors.envs.registry import check_options
from stillhouse.actors.envs.single_turn import SingleTurn
from stillhouse.launch.checks.prompt_files import ROWS_CHECKED, check_prompts

RUNS = {
    "single_turn": EnvConfig(name="single_turn"),
    "tools": EnvConfig(name="calculator", options={"result_role": "tool"}),
}
"""Environments of the run; the first is that of rows that name none."""
FINE: list[dict[str, Any]] = [
    {"prompt": "a"},
    {"prompt": "b", "env": None, "env_options": None},
    {"prompt": "c", "env_options": {"answer_pattern": "(x)"}},
    {"prompt": "d", "env": "tools", "env_options": {"answer_pattern": "(x)", "result_role": "user"}},
]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        (
            '{"prompt": "x"}\n{"question": "x"}\n',
            "expected prompt (text) or messages (--learner.tasks.columns.prompt NAME",
        ),
        ("not json\n", ":1 cannot be read: Expecting value"),
        ('{"prompt": "a", "prompt": "b"}\n', ":1 cannot be read: the field 'prompt' is there twice"),
        ("[1]\n", ":1: got list, expected an object"),
    ],
)
def test_wrong_rows_of_a_jsonl_file_are_told_with_their_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    (mistake,) = check_prompts("learner.tasks.prompts", tmp_path / "p.jsonl", RUNS)
    assert mistake.startswith("learner.tasks.prompts: ")
    assert message in mistake


def test_a_later_row_may_leave_out_what_is_optional_under_another_name_too(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"q": "a", "answer": "1"}\n{"q": "b"}\n')
    assert check_prompts("p", tmp_path / "p.jsonl", RUNS, {"prompt": "q", "ground_truth": "answer"}) == []
    (mistake,) = check_prompts("p", tmp_path / "p.jsonl", RUNS, {"prompt": "q", "ground_truth": "anwser"})
    assert "no column 'anwser'; did you mean 'answer'?" in mistake


def test_parquet_columns_are_checked(tmp_path: Path) -> None:
    pq.write_table(pa.table({"messages": [["x"]]}), tmp_path / "good.parquet")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "bad.parquet")
    assert check_prompts("p", tmp_path / "good.parquet", RUNS) == []
    assert "got the fields text" in check_prompts("p", tmp_path / "bad.parquet", RUNS)[0]


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    (mistake,) = check_prompts("p", tmp_path / "promts.jsonl", RUNS)
    assert mistake.endswith(f"did you mean {str(tmp_path / 'prompts.jsonl')!r}?")


def test_rows_may_name_any_environment_of_the_run_and_set_its_options(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in FINE))
    pq.write_table(pa.Table.from_pylist(FINE), tmp_path / "p.parquet")
    for name in ("p.jsonl", "p.parquet"):
        assert check_prompts("p", tmp_path / name, RUNS) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"env": "tolls"},
            "env 'tolls' is not an environment of this run, expected one of single_turn, tools; did you mean 'tools'? "
            "(others are added as actor.environments.NAME)",
        ),
        (
            {"env": "tools", "env_options": {"result_rule": "x"}},
            "may not set 'result_rule' of environment 'calculator'",
        ),
        ({"env_options": {"result_role": "x"}}, "may not set 'result_role' of environment 'single_turn'"),
    ],
)
def test_a_row_for_no_environment_of_the_run_is_told_with_its_place(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    rows = [{"prompt": "a", "env": None}, {"prompt": "b", **row}]
    (tmp_path / "p.jsonl").write_text("\n" + "".join(f"{json.dumps(row)}\n" for row in rows))
    pq.write_table(
        pa.Table.from_pylist([{"env": None, "env_options": None, **row} for row in rows]), tmp_path / "p.parquet"
    )
    for name, place in (("p.jsonl", "p.jsonl:3: "), ("p.parquet", "p.parquet, row 1: ")):
        (mistake,) = check_prompts("learner.tasks.prompts", tmp_path / name, RUNS)
        assert place in mistake and message in mistake


@pytest.mark.parametrize("row", [{"env": 3}, {"env_options": "n=3"}])
def test_an_environment_is_a_name_and_its_options_a_table(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", **row}))
    (mistake,) = check_prompts("p", tmp_path / "p.jsonl", RUNS)
    assert "expected the name of an environment and a table of its options" in mistake


class Level(SingleTurn):
    """Needs an option, and refuses some values of it."""

    row_options = ("level",)
    made: ClassVar[list[int]] = []

    def __init__(self, tokenizer: TextTokenizer, *, level: int) -> None:
        super().__init__(tokenizer)
        self.made.append(level)
        if level > 9:
            raise RuntimeError(f"there is no level {level}")

    @classmethod
    def check_options(cls, **options: Any) -> None:
        cls(cast(TextTokenizer, None), **options)


def test_options_that_an_environment_needs_may_be_in_the_rows_and_are_then_in_all_of_them(tmp_path: Path) -> None:
    """Each combination is tried once, because that may take long."""
    runs = {"level": EnvConfig(name=f"{__name__}:Level")}
    check_consistent = check_options(runs["level"].name, {}, more_in_rows=True)
    assert check_consistent is Level

    def checked(*options: dict[str, Any] | None) -> list[str]:
        Level.made.clear()
        rows = [json.dumps({"prompt": "a", "env_options": each}) for each in options]
        (tmp_path / "p.jsonl").write_text("\n".join(rows))
        return check_prompts("p", tmp_path / "p.jsonl", runs)

    assert checked({"level": 1}, {"level": 2}, {"level": 1}) == [] and Level.made == [1, 2]
    (mistake,) = checked({"level": 1}, None)
    assert "p.jsonl:2: env_options" in mistake and "missing a required argument: 'level'" in mistake
    (mistake,) = checked({"level": 1}, {"level": 10})
    assert "p.jsonl:2: env_options" in mistake and "RuntimeError: there is no level 10" in mistake


def test_only_the_first_rows_are_read(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "a"})] * ROWS_CHECKED + [json.dumps({"prompt": "a", "env": "none"})]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    assert check_prompts("p", tmp_path / "p.jsonl", RUNS) == []
    (tmp_path / "p.jsonl").write_text("\n".join(lines[1:]))
    assert len(check_prompts("p", tmp_path / "p.jsonl", RUNS)) == 1
