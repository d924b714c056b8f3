"""What teachers read in place of the prompt: the text in front, prompts dropped without it, and the way to the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from learner.evaluation.evaluation import Evaluation, render_eval_set
from learner.prompts.config import TaskConfig
from learner.prompts.records import PromptRecord
from learner.prompts.rendering import teacher_prompt
from learner.prompts.tasks import TaskStream, load_prompts
from models.tokenizer import TokenizerError, render_prompt
from protocol.messages import WeightVersion

Write = Callable[[Sequence[dict[str, Any]]], Path]
CONFIG = TaskConfig(privileged="The answer is {ground_truth}.\n", chat_template="off")


def text(tokenizer: PreTrainedTokenizerFast, ids: Any) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def test_the_text_stands_in_front_of_a_plain_prompt(small_tokenizer: PreTrainedTokenizerFast) -> None:
    record = PromptRecord(0, "1+2=", None, ground_truth="3 {hint}")
    assert text(small_tokenizer, teacher_prompt(record, small_tokenizer, CONFIG).ids) == "The answer is 3 {hint}.\n1+2="


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
    evaluation = Evaluation(CONFIG, rendered.prompts, small_tokenizer, version=WeightVersion(0, 0), seed=0)
    greedy, sampled = evaluation.tasks()
    assert greedy.task.teacher_prompt_tokens == 0 and text(small_tokenizer, greedy.frame) == "1+1="
    assert text(small_tokenizer, sampled.frame) == "1+1=The answer is 2.\n1+1="


def test_a_student_s_own_prompt_is_one_frame(small_tokenizer: PreTrainedTokenizerFast, write_rows: Write) -> None:
    config = TaskConfig(prompts=str(write_rows([{"prompt": "1"}, {"prompt": "1"}])), eval_share=0.0)
    (offer,) = TaskStream(config, small_tokenizer, load_prompts(config), seed=0).next(1)
    assert offer.task.teacher_prompt_tokens == 0
    np.testing.assert_array_equal(offer.frame, offer.prompt_ids)
