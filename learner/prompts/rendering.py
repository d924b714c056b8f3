"""Renders a row as the token ids of a prompt: its tag's template, the system turn, the chat template.

With privileged context, the teachers' prompt has a text before it that the student does not see:

    student    <|user|>8293+4758=<|assistant|>                           13051
    teacher    <|user|>The answer is 13051. 8293+4758=<|assistant|>      13051
                                                                         ^ scored: the student's tokens

The text goes in front of the prompt, or of the last user turn, so it works with any chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.engines.base import Int32s
from stillhouse.learner.prompts.config import PROMPT_PLACE, TaskConfig
from stillhouse.learner.prompts.records import ColumnsFault, PromptRecord, columns_fault
from stillhouse.models.tokenizer import TokenizerError, render_prompt


def render(record: PromptRecord, tokenizer: PreTrainedTokenizerBase, config: TaskConfig, *, before: str = "") -> Int32s:
    """Prompt ids int32 [n_prompt], by the template of the record's tag. `before`: text in front of the prompt, or of
    the last user turn. Raises TokenizerError."""
    record = with_template(record, config)
    if before:
        record = _behind(record, before)
    return render_prompt(
        tokenizer,
        record,
        config.system_prompt,
        chat_template=config.chat_template,
        tools=record.tools,
        template_kwargs=config.template_kwargs_for(record.tag, record.chat_template_kwargs),
    )


def with_template(record: PromptRecord, config: TaskConfig) -> PromptRecord:
    """The record with its prompt in the template of its tag. Raises TokenizerError."""
    template = config.templates.get(record.tag)
    if template is not None:
        if record.prompt is None:
            raise TokenizerError(
                f"learner.tasks.templates.{record.tag} is for rows with 'prompt', got one with 'messages'; apply the "
                "template to its turns in the file, or use another tag"
            )
        record = msgspec.structs.replace(record, prompt=template.replace(PROMPT_PLACE, record.prompt))
    return record


def for_actors(record: PromptRecord, config: TaskConfig) -> PromptRecord | ColumnsFault:
    """The record with all arguments of its chat template in its columns, because its environment renders later turns;
    or why its columns cannot be handed to one."""
    kwargs = config.template_kwargs_for(record.tag, record.chat_template_kwargs)
    fault = columns_fault(record.columns)
    if fault is not None or kwargs == record.chat_template_kwargs:
        return fault or record
    columns = {**msgspec.json.decode(record.columns or b"{}", type=dict[str, Any]), KWARGS_COLUMN: kwargs}
    record = msgspec.structs.replace(record, chat_template_kwargs=kwargs, columns=msgspec.json.encode(columns))
    return columns_fault(record.columns) or record


def _behind(record: PromptRecord, text: str) -> PromptRecord:
    if record.prompt is not None:
        return msgspec.structs.replace(record, prompt=text + record.prompt)
    turns: list[dict[str, Any]] = [dict(turn) for turn in record.messages or ()]
    for turn in reversed(turns):
        if turn["role"] == "user":
            content: Any = turn.get("content") or ""
            turn["content"] = (
                [{"type": "text", "text": text}, *content] if isinstance(content, list) else text + content
            )
            return msgspec.structs.replace(record, messages=tuple(turns))
    raise TokenizerError(f"no user turn to put {text!r} in front of, got roles {[turn['role'] for turn in turns]}")


KWARGS_COLUMN: Final = "chat_template_kwargs"
_FIELDS: Final = re.compile(r"\{(ground_truth|hint)\}")
NONE: Final = np.empty(0, np.int32)
NONE.setflags(write=False)


class TeacherPrompt(NamedTuple):
    """Token ids for the teachers, empty if they read the student's prompt; or the reason why the row is dropped."""

    ids: Int32s
    drop_reason: str = ""
    detail: str = ""


Readers: TypeAlias = Mapping[str, PreTrainedTokenizerBase]
"""Tokenizers of the teachers' pools that have another one than the student."""
NO_READERS: Final[Readers] = MappingProxyType({})


def teacher_prompt(
    record: PromptRecord, tokenizer: PreTrainedTokenizerBase, config: TaskConfig, readers: Readers = NO_READERS
) -> TeacherPrompt:
    """A pool in `readers` reads the prompt in its own tokens and chat template. Raises TokenizerError as `render`
    does, and for messages without a user turn."""
    reader = next((readers[pool] for pool in config.teachers_for(record.tag) if pool in readers), None)
    template = config.privileged_for(record.tag)
    if not template and reader is None:
        return TeacherPrompt(NONE)
    values = {"ground_truth": record.ground_truth, "hint": record.hint}
    lacking = [name for name in _FIELDS.findall(template) if values[name] is None]
    if lacking:
        return TeacherPrompt(NONE, "no_privileged", f"no {lacking[0]} for the teachers' text {template!r}")
    text = _FIELDS.sub(lambda found: values[found[1]] or "", template)
    ids = render(record, reader or tokenizer, config, before=text)
    if len(ids) > config.max_teacher_prompt_tokens:
        limit = f"{len(ids)} tokens, max_teacher_prompt_tokens is {config.max_teacher_prompt_tokens}"
        return TeacherPrompt(NONE, "teacher_prompt_too_long", limit)
    return TeacherPrompt(ids)
