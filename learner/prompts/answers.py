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
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.engines.base import Int32s
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.prompts.records import PromptRecord
from stillhouse.learner.prompts.rendering import with_template
from stillhouse.models.chat_text import ids_behind, prompt_ids, without_marked
from stillhouse.models.tokenizer import TokenizerError, as_chat_tokenizer, render_text


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
    if record.document:
        return document_lines(record.response or "", tokenizer, config.max_new_tokens)
    record = with_template(record, config)
    stops = [str(tokenizer.convert_ids_to_tokens(i)) for i in stop_token_ids]
    turns: list[dict[str, Any]] = [_without_stop(turn, stops) for turn in record.messages or ()]
    if record.prompt is not None:
        record = msgspec.structs.replace(record, response=_cut(record.response or "", stops))
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
            ids, answers = lines.pop()
        else:
            ids, answers, text = np.zeros(0, np.int32), (), ""
        ids = _extended(ids, tokenizer, text, prompt[len(text) :])
        start, ids = len(ids), _extended(ids, tokenizer, prompt, answer)
        lines.append(Line(ids, (*answers, (start, len(ids)))))
        text = prompt + answer
    return lines


def document_lines(text: str, tokenizer: PreTrainedTokenizerBase, most: int) -> list[Line]:
    """A document in pieces of at most `most` trained tokens: with the tokens that the tokenizer puts before a text, and
    the one that ends a text. Each token but the first is trained once. A later piece begins with the last token of the
    piece before, which predicts its first one."""
    end = [] if tokenizer.eos_token_id is None else [cast(int, tokenizer.eos_token_id)]
    ids = np.asarray([*prompt_ids(as_chat_tokenizer(tokenizer), text), *end], np.int32)
    pieces = [ids[start : start + most + 1] for start in range(0, max(1, len(ids) - 1), most)]
    return [Line(piece, ((1, len(piece)),)) for piece in pieces if len(piece) > 1]


def _without_stop(turn: dict[str, Any], stops: Sequence[str]) -> dict[str, Any]:
    """The turn; an answer without the token that ends a turn, which the template writes."""
    said = turn.get("content")
    return {**turn, "content": _cut(said, stops)} if turn["role"] == "assistant" and isinstance(said, str) else turn


def _cut(text: str, stops: Sequence[str]) -> str:
    return next((text.removesuffix(stop) for stop in stops if text.endswith(stop)), text)


def _answer(prompt: str, whole: str, stops: Sequence[str], turn: int) -> str:
    """What the template adds for an answer to its prompt, up to the token that ends the turn."""
    if not whole.startswith(prompt):
        raise TokenizerError(
            f"the chat template does not show the answer in turn {turn} behind the opening that it has for it: "
            f"expected text that begins with ...{prompt[-60:]!r}, got ...{whole[max(0, len(prompt) - 60) :][:80]!r}"
        )
    behind = whole[len(prompt) :]
    of_template = without_marked(behind)
    end = max((of_template.rfind(stop) + len(stop) for stop in stops if stop in of_template), default=0)
    if not end:
        raise TokenizerError(
            f"the chat template ends the answer in turn {turn} without one of the student's stop tokens "
            f"{', '.join(map(repr, stops))}; the student would learn not to stop"
        )
    return behind[:end]


def _plain(record: PromptRecord, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> Line:
    """Prompt and response as they are, and the token that ends a text."""
    end = str(tokenizer.eos_token) if tokenizer.eos_token else stops[0]
    prompt = prompt_ids(as_chat_tokenizer(tokenizer), record.prompt or "")
    ids = _extended(np.asarray(prompt, np.int32), tokenizer, record.prompt or "", f"{record.response}{end}")
    return Line(ids, ((len(prompt), len(ids)),))


def _extended(ids: Int32s, tokenizer: PreTrainedTokenizerBase, text: str, piece: str) -> Int32s:
    """The ids of a text, and those of the piece behind it."""
    behind = ids_behind(as_chat_tokenizer(tokenizer), text, piece)
    return np.concatenate([ids, np.asarray(behind, np.int32)])
