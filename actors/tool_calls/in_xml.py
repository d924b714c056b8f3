"""Calls that are written in tags: qwen_xml.

A value is written as it is, so it may hold the tags themselves, as a program about this notation does. Tags of
parameters are read like brackets: a value goes to the </parameter> that closes it. Where one was left out, as students
do, the value ends at the next tag that can end it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stillhouse.actors.tool_calls.call import Parsed, Taken, ToolCall
from stillhouse.actors.tool_calls.schemas import read_by_schema, read_freely

_TAG: Final = re.compile(
    r"<(?P<opens>function|parameter)=(?P<name>[^<>\s]+)>|</(?:function|parameter|tool_call)>|<tool_call>"
)


def qwen_xml(text: str, properties: Mapping[str, Mapping[str, Any]] | None) -> Parsed:
    """Functions in <tool_call> tags, which the student may leave out. `properties`: the schemas of each tool's
    parameters; None: not known, so a value that reads as JSON is one."""
    return _Reader(text, properties).parsed()


class _Block:
    """What stands between <tool_call> and </tool_call>."""

    def __init__(self, tag: re.Match[str]) -> None:
        self.tag = tag
        self.read = 0
        """Functions that were read."""
        self.failed = 0


class _Reader:
    """Goes through the tags from left to right, each once."""

    def __init__(self, text: str, properties: Mapping[str, Mapping[str, Any]] | None) -> None:
        self._text = text
        self._properties = properties
        self._tags = list(_TAG.finditer(text))
        self._closed_by = _brackets(self._tags)
        self._closing = set(self._closed_by.values())
        self._taken = Taken(text)

    def parsed(self) -> Parsed:
        """Everything, read."""
        block: _Block | None = None
        end = at = 0
        """Where the last function ended; the next tag."""
        while at < len(self._tags):
            tag = self._tags[at]
            if tag["opens"] == "function":
                call, spans, behind = self._function(at)
                if call is not None and self._taken.add([call]):
                    self._take(block, spans)
                    end = spans[-1][1]
                elif block is not None or self._is_begun(at):
                    self._taken.malformed += int(call is None)
                    if block is not None:
                        block.failed += 1
                at = max(behind, at + 1)
                continue
            if tag[0] in ("<tool_call>", "</tool_call>"):
                opens = tag[0] == "<tool_call>"
                self._end(block)
                behind_call = block is None and end > 0 and not self._text[end : tag.start()].strip()
                if not opens and (behind_call or (block is not None and block.read)):
                    self._taken.take(*tag.span())
                block = _Block(tag) if opens else None
                end = 0
            at += 1
        self._end(block)
        return self._taken.parsed()

    def _take(self, block: _Block | None, spans: Sequence[tuple[int, int]]) -> None:
        """A function that was read; and the tag of its block, once."""
        if block is not None:
            if not block.read:
                self._taken.take(*block.tag.span())
            block.read += 1
        for start, end in spans:
            self._taken.take(start, end)

    def _end(self, block: _Block | None) -> None:
        if block is not None and not block.read and not block.failed:
            self._taken.malformed += 1

    def _is_begun(self, at: int) -> bool:
        """Whether a function that cannot be read, outside <tool_call>, is more than a word about functions."""
        tag = self._tags[at]
        behind = self._tags[at + 1] if at + 1 < len(self._tags) else None
        return (
            behind is not None and behind["opens"] == "parameter" and not self._text[tag.end() : behind.start()].strip()
        )

    def _function(self, at: int) -> tuple[ToolCall | None, list[tuple[int, int]], int]:
        """The call that begins at a tag, None if it cannot be read; what it takes of the text; the next tag behind it.
        Text between parameters is not taken."""
        opening = self._tags[at]
        found: list[tuple[str, str]] = []
        spans = [opening.span()]
        at += 1
        while at < len(self._tags):
            tag = self._tags[at]
            if tag["opens"] == "parameter":
                end = self._value_end(at)
                if end is None:
                    return None, [], at + 1
                ends = self._tags[end]
                closed = ends[0] == "</parameter>"
                value = self._text[tag.end() : ends.start()]
                found.append((tag["name"], value if closed else value.rstrip()))
                spans.append((tag.start(), ends.end() if closed else ends.start()))
                at = end + closed
            elif tag[0] in ("</function>", "</tool_call>"):  # the latter where the former was left out
                closed = tag[0] == "</function>"
                if closed:
                    spans.append(tag.span())
                bare = not found and self._text[opening.end() : tag.start()].strip()
                return None if bare else self._call(opening["name"], found), spans, at + closed
            elif tag[0] == "</parameter>":
                at += 1
            else:
                return None, [], at
        return None, [], at

    def _value_end(self, at: int) -> int | None:
        """The tag at which a parameter's value ends; None: nothing ends it, so it may have been cut."""
        end = self._closed_by.get(at)
        if end is None:
            behind = self._tags[at + 1] if at + 1 < len(self._tags) else None
            ends = behind is not None and (
                behind["opens"] == "parameter" or behind[0] in ("</function>", "</tool_call>")
            )
            return at + 1 if ends else None
        while (too_many := self._stray_behind(end)) is not None:
            end = too_many
        return end

    def _stray_behind(self, at: int) -> int | None:
        """A </parameter> that closes nothing else: then the one at `at` is part of the value."""
        behind = at + 1
        if behind < len(self._tags) and self._text[self._tags[at].end() : self._tags[behind].start()].strip():
            while behind < len(self._tags) and self._tags[behind][0] == "</function>":
                behind += 1
        stray = behind < len(self._tags) and self._tags[behind][0] == "</parameter>" and behind not in self._closing
        return behind if stray else None

    def _call(self, name: str, found: Sequence[tuple[str, str]]) -> ToolCall | None:
        """None if a parameter is there twice: one of them would be lost."""
        schemas = None if self._properties is None else self._properties.get(name, {})
        arguments: dict[str, Any] = {}
        for key, written in found:
            if key in arguments:
                return None
            value = written.removeprefix("\n").removesuffix("\n")
            arguments[key] = read_freely(value) if schemas is None else read_by_schema(value, schemas.get(key))
        return ToolCall(name, arguments)


def _brackets(tags: Sequence[re.Match[str]]) -> dict[int, int]:
    """The <parameter=...> that are closed, and what closes them; as indices."""
    open_ones: list[int] = []
    closed_by: dict[int, int] = {}
    for at, tag in enumerate(tags):
        if tag["opens"] == "parameter":
            open_ones.append(at)
        elif tag[0] == "</parameter>" and open_ones:
            closed_by[open_ones.pop()] = at
    return closed_by
