"""What teachers read in place of the prompt: the text in front, prompts dropped without it, and the way to the wire."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from stillhouse.builtin.tokenizer import build_tokenizer
from stillhouse.learner.evaluation.evaluation import EvaluationRun, render_eval_set
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.data import open_prompts
from stillhouse.learner.prompts.records import DataError, PromptRecord, RowError
from stillhouse.learner.prompts.rendering import NONE, render, teacher_prompt
from stillhouse.learner.prompts.tasks import TaskStream, load_prompts
from stillhouse.models.tokenizer import TokenizerError, render_prompt
from stillhouse.protocol.messages import WeightVersion

Write = Callable[[Sequence[dict[str, Any]]], Path]
CONFIG = TaskConfig(privileged="The answer is {ground_truth}.\n", chat_template="off")


def text(tokenizer: PreTrainedTokenizerFast, ids: Any) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def test_in_a_chat_it_stands_in_the_last_turn_of_the_user(small_tokenizer: PreTrainedTokenizerFast) -> None:
    turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})
    config = TaskConfig(privileged="[{hint}] ", system_prompt="s")
    record = PromptRecord(0, None, turns, hint="h")
    shown = PromptRecord(0, None, (*turns[:2], {"role": "user", "content": "[h] c"}))
    got = teacher_prompt(record, small_tokenizer, config)
    np.testing.assert_array_equal(got.ids, render_prompt(small_tokenizer, shown, "s"))
    assert turns[2]["content"] == "c"
    with pytest.raises(TokenizerError, match="no user turn"):
        teacher_prompt(PromptRecord(0, None, ({"role": "tool", "content": "x"},), hint="h"), small_tokenizer, config)


def test_tags_may_have_a_text_of_their_own_or_none(small_tokenizer: PreTrainedTokenizerFast) -> None:
    config = TaskConfig(privileged="A", privileged_tags={"math": "B", "code": ""}, chat_template="off")
    shown = {
        tag: text(small_tokenizer, teacher_prompt(PromptRecord(0, "x", None, tag), small_tokenizer, config).ids)
        for tag in ("math", "code", "other")
    }
    assert shown == {"math": "Bx", "code": "", "other": "Ax"}


def test_tasks_carry_both_prompts_and_drop_rows_without_the_text(
    small_tokenizer: PreTrainedTokenizerFast, write_rows: Write
) -> None:
    rows = [
        {"prompt": "1+1=", "ground_truth": 2},
        {"prompt": "1+2="},
        {"prompt": "1+3=", "ground_truth": "4" * 100},
        {"prompt": "1+4=", "ground_truth": 5},
    ]
    config = TaskConfig(
        prompts=str(write_rows(rows)),
        privileged=CONFIG.privileged,
        chat_template="off",
        shuffle=False,
        eval_share=0.0,
        max_teacher_prompt_tokens=50,
    )
    prompts = load_prompts(config)
    stream = TaskStream(config, small_tokenizer, prompts, seed=0)
    offers = stream.next(2)
    assert [text(small_tokenizer, o.prompt_ids) for o in offers] == ["1+1=", "1+4="]
    assert [text(small_tokenizer, o.frame) for o in offers] == [
        "1+1=The answer is 2.\n1+1=",
        "1+4=The answer is 5.\n1+4=",
    ]
    assert [o.task.teacher_prompt_tokens for o in offers] == [len(o.teacher_prompt_ids) for o in offers] == [21, 21]
    assert stream.dropped == {"no_privileged": 1, "teacher_prompt_too_long": 1}
    again = TaskStream.from_state(config, small_tokenizer, prompts, seed=0, state=stream.state()).next(2)
    for before, after in zip(offers, again, strict=True):
        assert before.task == after.task
        np.testing.assert_array_equal(before.frame, after.frame)
        assert after.frame.dtype == np.int32


def test_evaluation_measures_against_the_teacher_that_trains(small_tokenizer: PreTrainedTokenizerFast) -> None:
    records = [PromptRecord(0, "1+1=", None, ground_truth="2"), PromptRecord(1, "1+2=", None)]
    rendered = render_eval_set(records, small_tokenizer, CONFIG)
    assert rendered.dropped == 1
    evaluation = EvaluationRun(CONFIG, rendered.prompts, small_tokenizer, version=WeightVersion(0, 0), seed=0)
    greedy, sampled = evaluation.tasks()
    assert greedy.task.teacher_prompt_tokens == 0 and text(small_tokenizer, greedy.frame) == "1+1="
    assert text(small_tokenizer, sampled.frame) == "1+1=The answer is 2.\n1+1="


THINKS = (
    "{% if tools %}{% for t in tools %}<{{ t.function.name }}>{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>"
    "{% if enable_thinking is defined and not enable_thinking %}(no){% endif %}{{ effort | default('low') }}{% endif %}"
)
"""A chat template that reads two arguments and the tools."""


@pytest.fixture
def thinking(small_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer = copy.copy(small_tokenizer)
    tokenizer.chat_template = THINKS
    return tokenizer


def test_every_prompt_is_rendered_with_the_arguments_of_its_row_over_its_tag_s_over_all(
    thinking: PreTrainedTokenizerFast, write_rows: Write
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "tag": "x"},
        {"prompt": "b", "tag": "y"},
        {"prompt": "c", "tag": "y", "chat_template_kwargs": {"effort": "row", "enable_thinking": None}},
        {"prompt": "d", "tag": "y", "chat_template_kwargs": '{"enable_thinking": true}'},
    ]
    expected: list[dict[str, Any]] = [
        {"enable_thinking": False},
        {"enable_thinking": False, "effort": "tag"},
        {"enable_thinking": False, "effort": "row"},
        {"enable_thinking": True, "effort": "tag"},
    ]
    config = TaskConfig(
        prompts=str(write_rows(rows)),
        privileged="P",
        chat_template_kwargs={"enable_thinking": False},
        chat_template_kwargs_tags={"y": {"effort": "tag"}},
        shuffle=False,
        eval_share=0.5,
    )
    prompts = load_prompts(config)
    records = [prompts.source.read(row) for row in range(4)]
    stream = TaskStream(config, thinking, dataclasses.replace(prompts, held_out=NONE), seed=0)
    for offer, row, kwargs in zip(stream.next(4), rows, expected, strict=True):
        for ids, said in ((offer.prompt_ids, row["prompt"]), (offer.teacher_prompt_ids, f"P{row['prompt']}")):
            turns = [{"role": "user", "content": said}]
            whole: list[int] = cast(Any, thinking).apply_chat_template(
                turns, add_generation_prompt=True, return_dict=False, **kwargs
            )
            assert ids.tolist() == whole
        assert msgspec.json.decode(offer.task.row) == {**row, "chat_template_kwargs": kwargs}
    rendered = render_eval_set(records, thinking, config).prompts
    assert [msgspec.json.decode(one.row)["chat_template_kwargs"] for one in rendered] == expected
    assert text(thinking, rendered[1].ids).endswith("(no)tag")


def test_an_argument_that_the_template_does_not_read_is_named(
    thinking: PreTrainedTokenizerFast, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    record = PromptRecord(0, "a", None)
    with pytest.raises(TokenizerError, match="does not read 'enable_thinkng'; did you mean 'enable_thinking'"):
        render(record, thinking, TaskConfig(chat_template_kwargs={"enable_thinkng": False}))
    with pytest.raises(TokenizerError, match="does not read 'messages'; it reads effort, enable_thinking"):
        render(record, thinking, TaskConfig(chat_template_kwargs={"messages": []}))
    with pytest.raises(TokenizerError, match="does not read 'effort'; it reads no arguments"):
        render(record, small_tokenizer, TaskConfig(chat_template_kwargs={"effort": "low"}))
    with pytest.raises(TokenizerError, match="effort: only a chat template reads this, got chat_template=off"):
        render(record, thinking, TaskConfig(chat_template_kwargs={"effort": "low"}, chat_template="off"))
    with pytest.raises(TokenizerError, match="the chat template shows no tools"):
        render(PromptRecord(0, "a", None, tools=(TOOL,)), small_tokenizer, TaskConfig())


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_tools_of_a_row_go_into_the_template_also_from_tables_and_texts(
    thinking: PreTrainedTokenizerFast, tmp_path: Path, write_rows: Write
) -> None:
    other = {"type": "function", "function": {"name": "go", "description": "d", "parameters": None}}
    rows: list[dict[str, Any]] = [{"prompt": "a", "tools": [TOOL]}, {"prompt": "b", "tools": [other, TOOL]}]
    as_text: list[dict[str, Any]] = [{**row, "tools": json.dumps(row["tools"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    pq.write_table(pa.Table.from_pylist(as_text), tmp_path / "t.parquet")
    for path in (write_rows(rows), tmp_path / "p.parquet", tmp_path / "t.parquet"):
        source = open_prompts(str(path))
        shown = [text(thinking, render(source.read(row), thinking, TaskConfig())) for row in range(2)]
        assert [each[: each.index("<|im")] for each in shown] == ["<look>", "<go><look>"], path
        assert source.read(0).tools == (TOOL,), path
        assert isinstance(msgspec.json.decode(source.read(0).columns)["tools"], list), path


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tools": "look"}, "line 1: 'tools' is a text, expected a list of objects in JSON"),
        ({"tools": ["look"]}, r"line 1: Expected `object`, got `str` - at `\$\.tools"),
        ({"chat_template_kwargs": "[1]"}, "'chat_template_kwargs' is a text, expected an object in JSON"),
    ],
)
def test_what_is_no_tool_and_no_argument_is_refused(write_rows: Write, row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        open_prompts(str(write_rows([{"prompt": "a", **row}])))


def test_tags_with_arguments_must_exist(thinking: PreTrainedTokenizerFast, write_rows: Write) -> None:
    config = TaskConfig(
        prompts=str(write_rows([{"prompt": "a", "tag": "math"}])), chat_template_kwargs_tags={"maths": {"effort": 1}}
    )
    with pytest.raises(DataError, match=r"chat_template_kwargs_tags: .* 'maths'; did you mean 'math'"):
        TaskStream(config, thinking, load_prompts(config), seed=0)


def test_teachers_with_another_tokenizer_read_the_prompt_in_their_own_template(
    small_tokenizer: PreTrainedTokenizerFast, write_rows: Write
) -> None:
    """Of the pool that scores the tag; with the privileged text, if there is one."""
    other = build_tokenizer(pairs=True)
    other.chat_template = "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}{% endfor %}<|pad|>"
    config = TaskConfig(routes={"default": ("a",), "far": ("b",)}, privileged_tags={"b": "see {ground_truth}: "})
    rows = [{"prompt": "12+34=", "tag": tag, "ground_truth": "46"} for tag in "ab"]
    config = msgspec.structs.replace(config, prompts=str(write_rows(rows)), shuffle=False, eval_share=0.0)
    stream = TaskStream(config, small_tokenizer, load_prompts(config), seed=0, readers={"far": other})
    plain, far = sorted(stream.next(2), key=lambda offer: offer.task.tag)
    assert not len(plain.teacher_prompt_ids)
    assert text(other, far.teacher_prompt_ids) == "<|im_start|>user: see 46: 12+34=<|pad|>"
    assert text(small_tokenizer, far.prompt_ids) == "<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n"
    (evaluated,) = render_eval_set([PromptRecord(0, "1+2=", None, "b", "3")], small_tokenizer, config, {"far": other})[
        0
    ]
    assert text(other, evaluated.teacher_ids) == "<|im_start|>user: see 3: 1+2=<|pad|>"
