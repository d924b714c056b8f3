"""A tool call, a response taken apart, and JSON as calls are written in it. No I/O."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

MAX_CALLS: Final = 64
"""Calls that are read of one response; the rest stays text and counts as malformed."""


class ToolCall(NamedTuple):
    """One call."""

    name: str
    arguments: dict[str, Any]


class Parsed(NamedTuple):
    """A response, taken apart."""

    content: str
    """The text without its calls; malformed ones stay."""
    calls: tuple[ToolCall, ...]
    malformed: int
    """Calls that were begun but cannot be read."""


class Taken:
    """What was read of a text so far: calls, and where they stand. What is not taken is content."""

    def __init__(self, text: str) -> None:
        self.calls: list[ToolCall] = []
        self.malformed = 0
        self._text = text
        self._spans: list[tuple[int, int]] = []
        """Without overlaps."""

    @property
    def hopeless(self) -> bool:
        """So much cannot be read that looking on would only take time."""
        return self.malformed >= MAX_CALLS

    def take(self, start: int, end: int) -> None:
        self._spans.append((start, end))

    def add(self, calls: Sequence[ToolCall]) -> bool:
        """Add calls, if these are not too many. If they are, they count as malformed."""
        if len(self.calls) + len(calls) > MAX_CALLS:
            self.malformed += 1
            return False
        self.calls += calls
        return True

    def parsed(self) -> Parsed:
        """Space between two things that were taken is taken as well."""
        kept: list[str] = []
        at = 0
        for start, end in sorted(self._spans):
            piece = self._text[at:start]
            kept.append(piece if piece.strip() else "")
            at = end
        kept.append(self._text[at:])
        return Parsed("".join(kept).strip(), tuple(self.calls), self.malformed)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice in an object")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_JSON: Final = json.JSONDecoder(object_pairs_hook=_once, parse_float=_finite, parse_constant=_no_constant)
SPACE: Final = " \t\r\n"


def value_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins there, behind space, and where it ends. Raises ValueError, also for what is no strict
    JSON: a key twice (one of them would be lost), NaN and Infinity (no client could read them)."""
    while at < len(text) and text[at] in SPACE:
        at += 1
    try:
        return _JSON.raw_decode(text, at)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def whole_value(text: str) -> Any:
    """The JSON value that a text is. Raises ValueError."""
    value, end = value_at(text, 0)
    if text[end:].strip(SPACE):
        raise ValueError("text behind the value")
    return value


def calls_of(value: Any, *, marked: bool) -> list[ToolCall] | None:
    """The calls that a JSON value is, alone or in a list; None: it is something else. `marked`: the notation says that
    it is a call; then arguments may be left out, for a tool that takes none."""
    values: list[Any] = value if isinstance(value, list) else [value]
    calls: list[ToolCall] = []
    for one in values[: MAX_CALLS + 1]:
        match one:
            case {"arguments": _, "parameters": _}:  # which are meant?
                return None
            case {"name": str(name), "arguments": arguments} | {"name": str(name), "parameters": arguments}:
                pass
            case {"name": str(name)} if marked:
                arguments = {}
            case _:
                return None
        if isinstance(arguments, str):
            try:
                arguments = whole_value(arguments)
            except ValueError:
                return None
        if not isinstance(arguments, dict) or not name:
            return None
        calls.append(ToolCall(name, {str(key): each for key, each in arguments.items()}))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return calls if 0 < len(calls) <= MAX_CALLS else None
