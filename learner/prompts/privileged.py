"""What a teacher reads in place of the student's prompt: the same prompt behind a text that the student does not see.

    student    <|user|>8293+4758=<|assistant|>                           13051
    teacher    <|user|>The answer is 13051. 8293+4758=<|assistant|>      13051
                                                                         ^ graded: the student's tokens

The text goes in front of the prompt's, or of the last user turn's, so that any chat template takes it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from engines.base import Int32s
from learner.prompts.config import TaskConfig
from learner.prompts.records import PromptRecord
from learner.prompts.rendering import render

_FIELDS: Final = re.compile(r"\{(ground_truth|hint)\}")
NONE: Final = np.empty(0, np.int32)
NONE.setflags(write=False)


class TeacherPrompt(NamedTuple):
    """Token ids, empty where teachers read the student's prompt; or why there are none."""

    ids: Int32s
    drop_reason: str = ""
    detail: str = ""


def teacher_prompt(record: PromptRecord, tokenizer: PreTrainedTokenizerBase, config: TaskConfig) -> TeacherPrompt:
    """Raises TokenizerError as `render` does, and for messages without a user turn."""
    template = config.privileged_for(record.tag)
    if not template:
        return TeacherPrompt(NONE)
    values = {"ground_truth": record.ground_truth, "hint": record.hint}
    lacking = [name for name in _FIELDS.findall(template) if values[name] is None]
    if lacking:
        return TeacherPrompt(NONE, "no_privileged", f"no {lacking[0]} for the teachers' text {template!r}")
    text = _FIELDS.sub(lambda found: values[found[1]] or "", template)
    ids = render(record, tokenizer, config, before=text)
    if len(ids) > config.max_teacher_prompt_tokens:
        limit = f"{len(ids)} tokens, max_teacher_prompt_tokens is {config.max_teacher_prompt_tokens}"
        return TeacherPrompt(NONE, "teacher_prompt_too_long", limit)
    return TeacherPrompt(ids)
