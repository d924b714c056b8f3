"""Prompt files as users write them: all formats give the same records, and what is wrong is named."""

from __future__ import annotations

import copy
import logging
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from datasets.utils.logging import disable_progress_bar
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.data import PromptSource, open_prompts
from stillhouse.learner.prompts.records import DataError, PromptRecord, RowError, columns_fault
from stillhouse.learner.prompts.rendering import render
from stillhouse.models.files import TokenizerError
from stillhouse.protocol.messages import MAX_ROW_BYTES

WriteRows = Callable[[Sequence[dict[str, Any]]], Path]
ROWS: list[dict[str, Any]] = [
    {"prompt": f"{i}+{i}=", "tag": "even" if i % 2 == 0 else None, "ground_truth": str(2 * i), "other": i}
    for i in range(25)
]
EXPECTED = [PromptRecord(i, f"{i}+{i}=", None, "even" if i % 2 == 0 else "", str(2 * i)) for i in range(25)]


@pytest.fixture(autouse=True)
def no_progress_bars() -> None:
    disable_progress_bar()


def all_of(source: PromptSource) -> list[PromptRecord]:
    """Without their columns, which the formats write in their own ways."""
    return [msgspec.structs.replace(source.read(row), columns=b"") for row in range(len(source))]


def write_bytes(folder: Path, content: bytes, name: str = "p.jsonl") -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


# ------------------------------------------------------------------------------------------------ what is read


def test_every_format_hands_over_all_columns_as_json(tmp_path: Path, write_rows: WriteRows) -> None:
    rows: list[dict[str, Any]] = [{**row, "env_options": {"n": [1, 2], "name": "\u00fc"}} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet", row_group_size=4)
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for path in (write_rows(rows), tmp_path / "p.parquet", tmp_path / "saved"):
        source = open_prompts(str(path))
        read = [msgspec.json.decode(source.read(row).columns) for row in range(len(source))]
        assert read == [{name: value for name, value in row.items() if value is not None} for row in rows], path


def test_a_row_names_its_environment_which_is_its_tag_unless_it_has_one(tmp_path: Path, write_rows: WriteRows) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "env": "game", "tag": None, "env_options": {"n": 3}},
        {"prompt": "b", "env": "game", "tag": "hard", "env_options": None},
        {"prompt": "c", "env": None, "tag": None, "env_options": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for path in (write_rows(rows), tmp_path / "p.parquet", tmp_path / "saved"):
        read = all_of(open_prompts(str(path), {"game", "single_turn"}))
        assert [(r.env, r.tag) for r in read] == [("game", "game"), ("game", "hard"), ("", "")], path
        with pytest.raises(
            RowError, match=r"(line 1|row 0): env 'game' is not an environment of this run, expected"
        ) as e:
            open_prompts(str(path), {"games", "single_turn"})
        assert "one of games, single_turn; did you mean 'games'?" in str(e.value)
        assert len(open_prompts(str(path))) == 3


@pytest.mark.parametrize("row", [{"env": 3}, {"env_options": [1]}, {"env_options": "n=3"}])
def test_an_environment_is_a_name_and_its_options_a_table(write_rows: WriteRows, row: dict[str, Any]) -> None:
    with pytest.raises(RowError, match=r"line 1: Expected .* at `\$\.env"):
        open_prompts(str(write_rows([{"prompt": "a", **row}])))


def test_columns_that_json_has_no_form_for_become_text(tmp_path: Path) -> None:
    row = {"prompt": "a", "day": date(2026, 11, 23), "price": Decimal("1.50"), "raw": b"\xff\x00", "ratio": math.nan}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "p.parquet")
    read = msgspec.json.decode(open_prompts(str(tmp_path / "p.parquet")).read(0).columns)
    assert read == {"prompt": "a", "day": "2026-11-23", "price": "1.50", "raw": "/wA=", "ratio": None}


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (b'{"a":1}', ""),
        (b'{"a":"' + b"x" * (MAX_ROW_BYTES - 8) + b'"}', ""),
        (b'{"a":"' + b"x" * (MAX_ROW_BYTES - 7) + b'"}', "row_too_large"),
        (b'{"a":"\xff"}', "bad_row"),
        (b'{"a":1e999}', "bad_row"),
    ],
)
def test_columns_that_cannot_go_to_an_environment_are_named(columns: bytes, reason: str) -> None:
    fault = columns_fault(columns)
    assert (fault.reason if fault else "") == reason


def test_a_folder_of_parquet_files_is_read_one_after_another(tmp_path: Path) -> None:
    for i in range(3):
        pq.write_table(pa.Table.from_pylist(ROWS[i * 5 : i * 5 + 5]), tmp_path / f"part-{i}.parquet", row_group_size=2)
    source = open_prompts(str(tmp_path))
    assert source.blocks == (2, 2, 1) * 3
    assert all_of(source) == EXPECTED[:15]


def test_messages_come_from_every_format_without_the_nulls_that_tables_add(
    tmp_path: Path, write_rows: WriteRows
) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "a", "name": "ann"}]},
        {
            "messages": [
                {"role": "system", "content": "s", "name": None},
                {"role": "user", "content": "b", "name": None},
            ]
        },
    ]
    expected = [
        ({"role": "user", "content": "a", "name": "ann"},),
        ({"role": "system", "content": "s"}, {"role": "user", "content": "b"}),
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for path in (write_rows(rows), tmp_path / "m.parquet", tmp_path / "saved"):
        assert [record.messages for record in all_of(open_prompts(str(path)))] == expected, path


def objects(**values: Any) -> Any:
    """Objects with some of these keys, or null for them. One is always there: tables have no objects without any."""
    return st.fixed_dictionaries(
        {"z": st.just(1)}, optional={name: st.none() | value for name, value in values.items()}
    )


NESTED = objects(
    a=st.integers(0, 9),
    b=st.text(max_size=3),
    c=st.lists(st.integers(0, 9) | st.none()),
    d=objects(e=st.text(max_size=2)),
)
CALLS = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": st.just("f")}, optional={"arguments": NESTED})}),
    min_size=1,
    max_size=2,
)
ROWS_WITH_GAPS = st.fixed_dictionaries(
    {
        "content": st.text("ab\u00e9 ", min_size=1),
        "answer": st.fixed_dictionaries(
            {"content": st.just("x")}, optional={"tool_calls": CALLS, "name": st.none() | st.just("n")}
        ),
    },
    optional={
        "ground_truth": NESTED,
        "env_options": NESTED,
        "tools": st.lists(NESTED, min_size=1, max_size=2),
        "reward_model": objects(ground_truth=NESTED),
        "extra": NESTED,
    },
)
SHOWS_ALL = (
    "{% for m in messages %}{{ m | tojson(sort_keys=true) }}{{ m.content }}{% endfor %}"
    "{{ tools | tojson(sort_keys=true) }}"
)
"""Sorted, because tables have one order of keys for all rows."""


def bare(value: Any) -> Any:
    """Without keys that are null: a row of JSONL as somebody would write it who leaves out what is not there."""
    if isinstance(value, dict):
        return {name: bare(one) for name, one in value.items() if one is not None}
    return [bare(one) for one in value] if isinstance(value, list) else value


@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(drawn=st.lists(ROWS_WITH_GAPS, min_size=2, max_size=4))
def test_rows_with_gaps_give_the_same_in_every_format(
    drawn: list[dict[str, Any]], tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Gaps are nulls in tables. Right are the tokens of transformers for a row without them."""
    rows: list[dict[str, Any]] = []
    for row in drawn:
        messages = [{"role": "user", "content": row.pop("content")}, {"role": "assistant", **row.pop("answer")}]
        rows.append({"messages": [*messages, {"role": "user", "content": "go on"}], **row})
    columns = {name for row in rows for name in row}
    table = [{name: row.get(name) for name in columns} for row in rows]  # otherwise the first row says which there are
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    pq.write_table(pa.Table.from_pylist(table), folder / "p.parquet")
    Dataset.from_list(table).save_to_disk(str(folder / "saved"))
    for name, given_rows in (("nulls.jsonl", rows), ("bare.jsonl", bare(rows))):
        (folder / name).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in given_rows))
    tokenizer = copy.deepcopy(small_tokenizer)
    tokenizer.chat_template = SHOWS_ALL
    kinds = ("bare.jsonl", "nulls.jsonl", "p.parquet", "saved")
    read = [
        [source.read(i) for i in range(len(rows))] for source in (open_prompts(str(folder / kind)) for kind in kinds)
    ]
    for i, row in enumerate(bare(rows)):
        right = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False)
        for kind, records in zip(kinds, read, strict=True):
            record = records[i]
            assert render(record, tokenizer, TaskConfig()).tolist() == right, kind
            assert msgspec.json.decode(record.columns) == row, kind
            truths = [msgspec.json.decode(one.ground_truth or "null") for one in (record, read[0][i])]
            assert truths[0] == truths[1], kind


def test_arguments_as_json_text_are_read_and_environments_get_them_so(write_rows: WriteRows) -> None:
    def turns(arguments: Any) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "b"},
        ]

    given = ('{"a": 1}', {"a": 1}, "not JSON", "", {})
    source = open_prompts(str(write_rows([{"messages": turns(one)} for one in given])))
    for row, right in enumerate(map(turns, ({"a": 1}, {"a": 1}, "not JSON", {}, {}))):
        assert source.read(row).messages == tuple(right)
        assert msgspec.json.decode(source.read(row).columns) == {"messages": right}


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "value": "hello"}, "'from' and 'value' are other names for them"),
        ({"from": "human", "value": "hello"}, "write role = user, assistant or system"),
        ({"role": "user"}, r"needs a 'role' and a 'content', got keys \['role'\]"),
        ({"role": "user", "content": None}, "needs a 'role' and a 'content'"),
        ({"role": "user", "content": 3}, "is of type int, expected text or a list of parts"),
        ({"role": "user", "content": {"text": "a"}}, "is of type dict"),
        ({"role": "user", "content": ["a"]}, "a part of a 'content' is 'a', expected"),
        ({"role": "user", "content": [{"type": "text"}]}, "a part of a 'content' is"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "the student only reads text"),
        ({"role": "assistant", "tool_calls": []}, "needs a 'role' and a 'content'"),
        ({"role": "assistant", "tool_calls": "f()"}, "expected a list of functions' names and arguments"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "expected a list of functions' names and arguments"),
        ({"role": 1, "content": "a"}, "needs a 'role' and a 'content'"),
        ({"role": "human", "content": "a"}, "the role 'human' is one that .* write 'user'"),
        ({"role": "Assistant", "content": "a"}, "write 'assistant'"),
    ],
)
def test_a_message_that_cannot_be_shown_is_refused(message: dict[str, Any], says: str, write_rows: WriteRows) -> None:
    with pytest.raises(RowError, match=says):
        open_prompts(str(write_rows([{"messages": [message, USER]}])))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "reasoning_content": "hm"},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]},
        {"role": "critic", "content": [{"type": "text", "text": "a"}], "weight": 1},
    ],
)
def test_unusual_messages_are_read(message: dict[str, Any], write_rows: WriteRows) -> None:
    assert open_prompts(str(write_rows([{"messages": [message, USER]}]))).read(0).messages == (message, USER)


def test_parts_of_a_content_are_refused_by_a_template_that_takes_none(small_tokenizer: PreTrainedTokenizerFast) -> None:
    record = PromptRecord(0, None, ({"role": "user", "content": [{"type": "text", "text": "a"}]},))
    tokenizer = copy.deepcopy(small_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(TokenizerError, match="takes no content that is a list of parts"):
        render(record, tokenizer, TaskConfig())


@pytest.mark.parametrize("role", ["critic", "system"])
def test_a_turn_that_the_template_leaves_out_is_refused(role: str, small_tokenizer: PreTrainedTokenizerFast) -> None:
    turns = ({"role": role, "content": "Be nice"}, {"role": "user", "content": "a"})
    tokenizer = copy.deepcopy(small_tokenizer)
    tokenizer.chat_template = "{% for m in messages if m.role != 'critic' %}{{ m.content | tojson }}{% endfor %}"
    if role == "system":
        assert len(render(PromptRecord(0, None, turns), tokenizer, TaskConfig()))
        tokenizer.chat_template = tokenizer.chat_template.replace("critic", "system")
    with pytest.raises(TokenizerError, match=f"leaves out a turn with the role '{role}'"):
        render(PromptRecord(0, None, turns), tokenizer, TaskConfig())


def test_a_ground_truth_that_is_not_text_becomes_json(write_rows: WriteRows) -> None:
    truths: list[Any] = [42, 1.5, ["a"], True, None, "text"]
    source = open_prompts(str(write_rows([{"prompt": "p", "ground_truth": truth} for truth in truths])))
    assert [record.ground_truth for record in all_of(source)] == ["42", "1.5", '["a"]', "true", None, "text"]


@pytest.mark.parametrize(
    ("truth", "right"),
    [(Decimal("1.50"), "1.50"), (date(2024, 1, 2), "2024-01-02"), (math.nan, None)],
)
def test_ground_truths_of_tables_are_text_without_quotes_and_a_gap_is_none(
    truth: object, right: str | None, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"prompt": ["p"], "ground_truth": [truth]}), tmp_path / "rows.parquet")
    assert open_prompts(str(tmp_path / "rows.parquet")).read(0).ground_truth == right


def test_lines_of_white_space_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt":"a"}\r\n  \t \r\n{"prompt":"b"}\r\n   ')
    assert [record.prompt for record in all_of(open_prompts(str(tmp_path / "rows.jsonl")))] == ["a", "b"]


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_wrong_path_names_the_nearest_file(tmp_path: Path, write_rows: WriteRows) -> None:
    write_rows(ROWS)
    with pytest.raises(DataError, match=r"did you mean '.*/prompts\.jsonl'"):
        open_prompts(str(tmp_path / "promts.jsonl"))
    with pytest.raises(DataError, match="no folder"):
        open_prompts(str(tmp_path / "nowhere" / "prompts.jsonl"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"promt": "a", "tag": "t"}', r"found 'promt', 'tag'; rename 'promt' to 'prompt'\?"),
        (b'{"question": "a"}', r"found 'question'; expected one of: 'prompt' \(text\), 'messages'"),
        (b'{"prompt": null}', "found 'prompt', but it is null"),
        (b'{"prompt": 5}', r"at `\$\.prompt`"),
        (b'{"prompt": "a", "tag": 3}', r"at `\$\.tag`"),
        (b'{"prompt": "  "}', "'prompt' is blank"),
        (b'{"messages": "no list"}', "'messages' is a text, expected a list of objects in JSON"),
        (b'{"prompt": "a", "messages": "[]"}', "'messages' is empty"),
        (b'{"messages": []}', "'messages' is empty"),
        (b'{"messages": [{"content": "b"}]}', "needs a 'role'"),
        (b'{"messages": [{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}', "end with an assistant"),
        (b'{"prompt": "a", "tag": "x", "prompt": "b"}', "the field 'prompt' is there twice"),
        (b'{"prompt": "a", "env_options": {"n": 1, "n": 2}}', "the field 'n' is there twice"),
        (b'{"prompt": "a"', "not a JSON object on one line"),
        (b'["a"]', "Expected `object`, got `array`"),
        (b'{"prompt": "\xff"}', "not a JSON object"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = write_bytes(tmp_path, b'{"prompt":"fine"}\n\n' + line + b"\n")
    with pytest.raises(RowError, match=message) as error:
        open_prompts(path)
    assert "p.jsonl, line 3: " in str(error.value)


def test_a_bad_row_deep_in_a_large_file_is_found_before_the_run(tmp_path: Path) -> None:
    lines = [b'{"prompt":"a"}\n'] * 30_000
    lines[25_000] = b'{"prmpt":"a"}\n'
    with pytest.raises(RowError, match="line 25001: no 'prompt' and no 'messages'"):
        open_prompts(write_bytes(tmp_path, b"".join(lines)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b"", "no rows"),
        ("p.jsonl", b"\n \n", "no rows"),
        ("p.json", b'[{"prompt": "a"}]', "one JSON array; expected one JSON object per line"),
        ("p.csv", b"prompt,answer\na,b\n", "neither JSONL nor Parquet"),
        ("p.jsonl.gz", b"\x1f\x8b\x08abc", "compressed; unpack it first"),
        ("p.parquet", b'{"prompt": "a"}', "not a Parquet file: it begins with"),
        ("p.parquet", b"PAR1 and nothing more", "not a whole Parquet file"),
    ],
)
def test_other_formats_are_refused_with_advice(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_prompts(write_bytes(tmp_path, content, name))


def test_a_table_without_prompts_names_its_columns(tmp_path: Path) -> None:
    rows = [{"Prompts": "a", "answer": "b"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for path in ("p.parquet", "saved"):
        with pytest.raises(DataError, match=r"found 'Prompts', 'answer'; rename 'Prompts' to 'prompt'\?"):
            open_prompts(str(tmp_path / path))


def test_invalid_rows_are_named_together_by_their_lines(tmp_path: Path) -> None:
    good, file = '{"prompt": "a"}', tmp_path / "p.jsonl"
    file.write_text("\n".join([good, "", "{}", good, "", "", '{"prompt": 3}', good]))
    with pytest.raises(RowError, match=r"^\S+p\.jsonl, line 3: .*; \S+p\.jsonl, line 7: Expected") as error:
        open_prompts(str(file))
    assert "more rows" not in str(error.value)
    file.write_text("\n".join([good, *["{}"] * 12]))
    with pytest.raises(RowError, match=r"line 2: .*line 6: .*; and 7 more rows$"):
        open_prompts(str(file))


def test_a_table_row_with_a_null_prompt_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}, {"prompt": None}]), tmp_path / "p.parquet")
    with pytest.raises(RowError, match=r"p\.parquet, row 1: .*it is null"):
        open_prompts(str(tmp_path / "p.parquet"))


def test_a_dataset_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    part = Dataset.from_list(ROWS)
    DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "both"))
    DatasetDict({"train": part}).save_to_disk(str(tmp_path / "one"))
    with pytest.raises(DataError, match=r"holds the splits \['test', 'train'\]: name one of them"):
        open_prompts(str(tmp_path / "both"))
    assert all_of(open_prompts(str(tmp_path / "both" / "train"))) == EXPECTED
    assert all_of(open_prompts(str(tmp_path / "one"))) == EXPECTED


def test_any_other_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "readme.md").touch()
    with pytest.raises(DataError, match=r"expected a folder written by .* found \['readme\.md'\]"):
        open_prompts(str(tmp_path))


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ("groundtruth", "'groundtruth' is not read; the field is called 'ground_truth'"),
        ("images", "'images' is not read: the student only reads text"),
    ],
)
def test_a_column_that_nobody_reads_is_warned_of(
    column: str, says: str, write_rows: WriteRows, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        open_prompts(str(write_rows([{"prompt": "a", column: "b", "source": "c"}])))
    assert [says in m for m in caplog.messages] == [True]


def test_a_file_that_changes_during_the_run_stops_it(write_rows: WriteRows, tmp_path: Path) -> None:
    source = open_prompts(str(write_rows(ROWS)))
    write_rows(ROWS[1:])
    with pytest.raises(DataError, match="has changed"):
        source.read(3)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "p.parquet", row_group_size=1)
    table = open_prompts(str(tmp_path / "p.parquet"))
    os.utime(tmp_path / "p.parquet", (1, 1))
    with pytest.raises(DataError, match="has changed"):
        table.read(3)


def test_a_text_is_read_as_a_whole_too(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Once.")
    source = open_prompts(str(tmp_path / "book.txt"), answers=True)
    assert [*source.read_all()] == [source.read(0)] and source.read(0).response == "Once."
