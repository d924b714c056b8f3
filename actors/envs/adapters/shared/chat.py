"""What an adapter says to the student: a prompt made from a row and the adapter's own text, and replies to turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from stillhouse.actors.envs.base import TextTokenizer
from stillhouse.engines.base import Int32s

Message = dict[str, Any]


def own_prompt(tokenizer: TextTokenizer, row: Mapping[str, Any], text: str, *, place: str) -> Int32s:
    """Token ids [n] of the prompt that a row begins and `text` completes.

    `text` stands for `place` (e.g. "{question}") where the row's last turn of the user contains it, and else follows
    that turn after a blank line. Raises ValueError for a row whose prompt or messages are not chat turns."""
    turns = turns_of(row)
    if not turns or turns[-1].get("role") != "user":
        turns.append({"role": "user", "content": ""})
    said = turns[-1].get("content")
    if not isinstance(said, str):
        raise ValueError(f"the last turn of the row's messages has the content {said!r}, expected text")
    said = said.replace(place, text) if place in said else "\n\n".join(part for part in (said, text) if part)
    return tokenizer.chat_prompt([*turns[:-1], turns[-1] | {"content": said}], row.get("tools") or None)


def turns_of(row: Mapping[str, Any]) -> list[Message]:
    """The turns of the row's `messages` or `prompt`, which may also be text. Raises ValueError for anything else."""
    given = row.get("messages") or row.get("prompt") or ""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, Sequence):
        turns = cast(Sequence[object], given)
        if all(isinstance(turn, Mapping) for turn in turns):
            return [dict(cast(Mapping[str, Any], turn)) for turn in turns]
    raise ValueError(f"the row has the messages {given!r}, expected a list of turns with role and content, or text")


def reply(tokenizer: TextTokenizer, text: str) -> Int32s:
    """Token ids [n] of a turn that answers the student: one of the chat, or a line where there is no template."""
    return tokenizer.chat_turn(text) if tokenizer.has_template else tokenizer.encode(f"\n{tokenizer.plain(text)}\n")


def whole_number(row: Mapping[str, Any], column: str) -> int | None:
    """The number in a column of a row, or None where there is none. Raises ValueError for anything but 0, 1, 2, ..."""
    value = row.get(column)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"the row has {column} = {value!r}, expected a whole number of at least 0")
    return value
