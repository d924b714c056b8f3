"""A row as the token ids of a prompt: its tag's template, the system turn, the chat template."""

from __future__ import annotations

from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase

from engines.base import Int32s
from learner.prompts.config import PROMPT_PLACE, TaskConfig
from learner.prompts.records import PromptRecord
from models.tokenizer import TokenizerError, render_prompt


def render(record: PromptRecord, tokenizer: PreTrainedTokenizerBase, config: TaskConfig, *, before: str = "") -> Int32s:
    """Prompt ids int32 [n_prompt], by the template of the record's tag. `before`: text in front of the prompt's, or of
    the last user turn's. Raises TokenizerError."""
    template = config.templates.get(record.tag)
    if template is not None:
        if record.prompt is None:
            raise TokenizerError(
                f"learner.tasks.templates.{record.tag} is for rows with 'prompt', got one with 'messages'; write its "
                "turns as they should be, or give it another tag"
            )
        record = msgspec.structs.replace(record, prompt=template.replace(PROMPT_PLACE, record.prompt))
    if before:
        record = _behind(record, before)
    return render_prompt(tokenizer, record, config.system_prompt, chat_template=config.chat_template)


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
