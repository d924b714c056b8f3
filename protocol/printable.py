"""Makes texts from other processes safe to show: no control character gets into a log or onto a terminal.

    on arrival at the buffer    `printable_texts`, for all texts of a message, so that the texts in ledger, metrics,
                                status and summary are safe
    in every log                `LineFormatter`: a record is one line, whatever it quotes; its traceback is indented,
                                and what stands before the host of a URL is hidden
    elsewhere                   `printable`, and `in_one_line` for a quotation

Characters that cannot be printed are escaped as in Python: `\\n`, `\\x1b`, `\\u202e`.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from typing import Final, TypeVar, cast

import msgspec

LONGEST_QUOTE: Final = 200
"""Most characters of a peer's text in a log line."""
INDENT: Final = "    "
USER_AT_HOST: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://([^\s/?#]+)@")
"""Scheme, and the part of a URL before the host, which may hold a password."""
MessageT = TypeVar("MessageT", bound=msgspec.Struct)


def printable(text: str) -> str:
    """`text` with all characters escaped that are invisible, or that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def without_credentials(text: str) -> str:
    """`text` with the user's part of every URL hidden."""
    return USER_AT_HOST.sub(r"\1://(hidden)@", text) if "://" in text else text


def in_one_line(text: str) -> str:
    """A peer's text, shortened and escaped, so that it can neither fill a log nor add lines to it."""
    quoted = printable(without_credentials(text)[:LONGEST_QUOTE])
    return quoted if len(text) <= LONGEST_QUOTE else f"{quoted}... ({len(text)} characters)"


def printable_texts(message: MessageT) -> MessageT:
    """The message with printable texts in its fields and in the keys of its tables. Deeper texts (a task's ground
    truth) are data and stay unchanged; most messages are returned as they are."""
    changed: dict[str, object] = {}
    for field in _text_fields(type(message)):
        value: object = getattr(message, field)
        if isinstance(value, str):
            if not value.isprintable():
                changed[field] = printable(value)
        elif isinstance(value, dict):
            table = cast(dict[object, object], value)
            if not all(key.isprintable() for key in table if isinstance(key, str)):
                changed[field] = {printable(k) if isinstance(k, str) else k: v for k, v in table.items()}
    return msgspec.structs.replace(message, **changed) if changed else message


@cache
def _text_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Fields whose declared type may hold a text or a table."""
    return tuple(f.name for f in msgspec.structs.fields(kind) if any(t in str(f.type) for t in ("str", "dict")))


class LineFormatter(logging.Formatter):
    """`HH:MM:SS.mmm NAME LEVEL module: message` in one line. A traceback is indented, so that none of its lines looks
    like a record, whatever it quotes."""

    def __init__(self, process_name: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d {process_name} %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = printable(without_credentials(record.message).rstrip("\n"))
        return super().formatMessage(record)

    def formatException(self, ei: logging._SysExcInfoType) -> str:  # noqa: N802 # pyright: ignore[reportPrivateUsage]
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(INDENT + printable(line) for line in without_credentials(text).split("\n"))
