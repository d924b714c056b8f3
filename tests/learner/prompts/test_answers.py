"""Text that is there: the tokens that are trained are those of the assistant, by transformers' own mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from stillhouse.learner.prompts.answers import Line, answer_lines
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.data import open_prompts
from stillhouse.learner.prompts.records import PromptRecord, RowError
from stillhouse.models.tokenizer import TokenizerError
from tests.actors.test_next_turn import family

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>"
    "{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2, which is no end"},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "left over"},
)


def trained(line: Line) -> list[int]:
    mask = np.zeros(len(line.token_ids), np.int64)
    for start, end in line.answers:
        mask[start:end] += 1
    return mask.tolist()


def stops(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    return (cast(int, tokenizer.convert_tokens_to_ids("<|im_end|>")),)


def marked(small_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=small_tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = MARKED
    return tokenizer


def test_what_is_trained_is_what_transformers_marks(small_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = marked(small_tokenizer)
    (line,) = answer_lines(
        PromptRecord(0, None, TURNS), tokenizer, TaskConfig(system_prompt="be kind"), stops(tokenizer)
    )
    turns = [{"role": "system", "content": "be kind"}, *TURNS[:4]]
    theirs: Any = cast(Any, tokenizer).apply_chat_template(turns, return_assistant_tokens_mask=True, return_dict=True)
    assert line.token_ids.tolist() == theirs["input_ids"][:-1]  # all but the line break behind the last answer
    assert trained(line) == theirs["assistant_masks"][:-1] and sum(trained(line)) > 10
    assert line.token_ids.dtype == np.int32


def test_a_stop_token_in_an_answer_is_text_and_at_its_end_it_is_there_once(
    small_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = marked(small_tokenizer)
    turns = (TURNS[0], {"role": "assistant", "content": "2 <|im_end|> is no end"}, *TURNS[2:4])
    ended = (TURNS[0], {"role": "assistant", "content": "2 <|im_end|> is no end<|im_end|>"}, *TURNS[2:4])
    (line,), (again,) = (
        answer_lines(PromptRecord(0, None, t), tokenizer, TaskConfig(), stops(tokenizer)) for t in (turns, ended)
    )
    right: Any = cast(Any, tokenizer).apply_chat_template([*turns], sanitize_control_tokens=True, return_dict=False)
    assert line.token_ids.tolist() == again.token_ids.tolist() == right[:-1]
    (plain,) = answer_lines(
        PromptRecord(0, "1+1=", None, response="2<|im_end|>"),
        tokenizer,
        TaskConfig(chat_template="off"),
        stops(tokenizer),
    )
    assert tokenizer.decode(plain.token_ids.tolist()) == "1+1=2<|im_end|>"


def test_a_template_that_leaves_thoughts_out_gives_each_answer_its_own_prompt() -> None:
    """Qwen3 shows thoughts in the last turn only: the second answer's prompt does not go on from the first answer."""
    tokenizer = family("qwen3")
    first = "<think>\nhm\n</think>\n\n2"
    turns = (TURNS[0], {"role": "assistant", "content": first}, TURNS[2], {"role": "assistant", "content": "4"})
    lines = answer_lines(PromptRecord(0, None, turns), tokenizer, TaskConfig(), stops(tokenizer))
    shown = [
        (tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:end]))
        for ids, ((start, end),) in ((line.token_ids, line.answers) for line in lines)
    ]
    prompts = [
        cast(Any, tokenizer).apply_chat_template([*turns[:n]], tokenize=False, add_generation_prompt=True)
        for n in (1, 3)
    ]
    assert shown == [(prompts[0], f"{first}<|im_end|>"), (prompts[1], "<think>\n\n</think>\n\n4<|im_end|>")]
    assert "hm" not in prompts[1]


def test_what_cannot_be_shown_as_it_would_be_written_is_refused(small_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = marked(small_tokenizer)
    record = PromptRecord(0, None, TURNS)
    with pytest.raises(TokenizerError, match="ends the answer in turn 1 without one of the student's stop tokens"):
        answer_lines(record, tokenizer, TaskConfig(), (cast(int, tokenizer.convert_tokens_to_ids("q")),))
    with pytest.raises(TokenizerError, match="begins with an answer"):
        answer_lines(PromptRecord(0, None, TURNS[1:]), tokenizer, TaskConfig(), stops(tokenizer))
    tokenizer.chat_template = MARKED + "{% if add_generation_prompt %}<think>{% endif %}"
    with pytest.raises(TokenizerError, match="does not show the answer in turn 1 behind the opening"):
        answer_lines(record, tokenizer, TaskConfig(), stops(tokenizer))


@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": "a", "response": "b"}',
        '{"prompt": "a", "completion": "b"}',
        '{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        '{"prompt": "a", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], '
        '"response": "b"}',
    ],
)
def test_rows_with_answers_as_people_have_them(
    small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, row: str
) -> None:
    (tmp_path / "r.jsonl").write_text(row + "\n")
    record = open_prompts(str(tmp_path / "r.jsonl"), answers=True).read(0)
    tokenizer = marked(small_tokenizer)
    (line,) = answer_lines(record, tokenizer, TaskConfig(), stops(tokenizer))
    ((start, end),) = line.answers
    assert tokenizer.decode(line.token_ids[start:end].tolist()) == "b<|im_end|>"
    (tmp_path / "n.jsonl").write_text('{"prompt": "a", "ground_truth": "b"}\n')
    with pytest.raises(RowError, match="no answer, expected 'response' or 'completion'"):
        open_prompts(str(tmp_path / "n.jsonl"), answers=True)
    two = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "response": "c"}
    (tmp_path / "n.jsonl").write_text(json.dumps(two))
    with pytest.raises(RowError, match="end with an answer other than the row's 'response'"):
        open_prompts(str(tmp_path / "n.jsonl"), answers=True)
