"""Text that is there: a row with answers as the token sequences that train a student on them.

    turns    system user assistant user assistant
    tokens   ----------  #########  ---  #########      # trained: what the student would have had to sample

What is trained of a turn is its text as the chat template shows it, up to the token that ends it. Each answer follows
the prompt that the student would read at that place, rendered as for generation. Where a template changes earlier turns
(thoughts that are left out later), one sequence cannot show all answers as they would be written: then a new sequence
begins, and each answer is still trained once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from engines.base import Int32s
from learner.prompts.config import TaskConfig
from learner.prompts.records import PromptRecord
from learner.prompts.rendering import with_template
from models.tokenizer import TokenizerError, render_text


class Line(NamedTuple):
    """One sequence. Answers are [start, end) in it, in order, with their last tokens at `end` - 1."""

    token_ids: Int32s
    """[n]"""
    answers: tuple[tuple[int, int], ...]


def answer_lines(
    record: PromptRecord, tokenizer: PreTrainedTokenizerBase, config: TaskConfig, stop_token_ids: Sequence[int]
) -> list[Line]:
    """The sequences of a row that was read with `answers`. `stop_token_ids`: those that end a turn of the student.
    Raises TokenizerError."""
    record = with_template(record, config)
    stops = [str(tokenizer.convert_ids_to_tokens(i)) for i in stop_token_ids]
    turns: list[dict[str, Any]] = [dict(turn) for turn in record.messages or ()]
    if record.prompt is not None:
        if config.chat_template == "off" or tokenizer.chat_template is None:
            return [_plain(record, tokenizer, stops)]
        turns = [{"role": "user", "content": record.prompt}, {"role": "assistant", "content": record.response}]
    if config.system_prompt is not None and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": config.system_prompt})
    kwargs = config.template_kwargs_for(record.tag, record.chat_template_kwargs)
    lines: list[Line] = []
    text = ""
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        if i == 0:
            raise TokenizerError("the conversation begins with an answer, expected a turn of the user before it")
        prompt, whole = (
            render_text(tokenizer, turns[: i + n], config.chat_template, record.tools, kwargs, opened=n == 0)
            for n in range(2)
        )
        answer = _answer(prompt, whole, stops, i)
        if lines and prompt.startswith(text):
            ids, answers, between = lines[-1].token_ids, lines.pop().answers, prompt[len(text) :]
        else:
            ids, answers, between = np.zeros(0, np.int32), (), prompt
        ids = np.concatenate([ids, _encoded(tokenizer, between)])
        start, ids = len(ids), np.concatenate([ids, _encoded(tokenizer, answer)])
        lines.append(Line(ids, (*answers, (start, len(ids)))))
        text = prompt + answer
    return lines


def _answer(prompt: str, whole: str, stops: Sequence[str], turn: int) -> str:
    """What the template adds for an answer to its prompt, up to the token that ends the turn."""
    if not whole.startswith(prompt):
        raise TokenizerError(
            f"the chat template does not show the answer in turn {turn} behind the opening that it has for it: "
            f"expected text that begins with ...{prompt[-60:]!r}, got ...{whole[max(0, len(prompt) - 60) :][:80]!r}"
        )
    behind = whole[len(prompt) :]
    end = max((behind.rfind(stop) + len(stop) for stop in stops if stop in behind), default=0)
    if not end:
        raise TokenizerError(
            f"the chat template ends the answer in turn {turn} without one of the student's stop tokens "
            f"{', '.join(map(repr, stops))}; the student would learn not to stop"
        )
    return behind[:end]


def _plain(record: PromptRecord, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> Line:
    """Prompt and response as they are, and the token that ends a text."""
    end = str(tokenizer.eos_token) if tokenizer.eos_token else stops[0]
    prompt = np.asarray(tokenizer(record.prompt)["input_ids"], np.int32)
    answer = _encoded(tokenizer, f"{record.response}{end}")
    return Line(np.concatenate([prompt, answer]), ((len(prompt), len(prompt) + len(answer)),))


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> Int32s:
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
