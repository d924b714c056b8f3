"""Tool calls in what a student wrote, by the notation of its model family. No I/O.

hermes      <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>            Qwen 2.5, Qwen 3, Hermes
qwen_xml    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>    Qwen 3 Coder
llama_json  {"name": "add", "parameters": {"a": 1}}, behind <|python_tag|> or alone      Llama 3.1 and later
mistral     [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]
plain       the JSON of hermes, alone or in a fenced block, for models that were taught no notation
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple, TypeAlias

ToolDialect: TypeAlias = Literal["hermes", "qwen_xml", "llama_json", "mistral", "plain"]
MAX_CALLS: Final = 64
"""Calls that are read of one response; the rest stays text and counts as malformed."""
_JSON: Final = json.JSONDecoder()


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


def tool_dialect(chat_template: str | None) -> ToolDialect:
    """The notation that a chat template teaches its model."""
    template = chat_template or ""
    if "<function=" in template:
        return "qwen_xml"
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters"' in template:
        return "llama_json"
    return "plain"


def parse_tool_calls(text: str, dialect: ToolDialect) -> Parsed:
    """The calls in a response. Never raises: what cannot be read is counted and stays text."""
    match dialect:
        case "hermes":
            return _tagged(text, _json_calls)
        case "qwen_xml":
            return _tagged(text, _xml_calls)
        case "mistral":
            before, mark, behind = text.partition("[TOOL_CALLS]")
            return _all_json(before, mark, behind) if mark else Parsed(text, (), 0)
        case "llama_json":
            before, mark, behind = text.partition("<|python_tag|>")
            return _all_json(before, mark, behind) if mark else _bare(text)
        case "plain":
            return _bare(text)


def render_tool_call(call: ToolCall, dialect: ToolDialect) -> str:
    """The call as a student writes it."""
    body = json.dumps({"name": call.name, "arguments": call.arguments})
    match dialect:
        case "hermes":
            return f"<tool_call>\n{body}\n</tool_call>"
        case "qwen_xml":
            lines = [
                f"<parameter={name}>\n{_xml_value(value)}\n</parameter>\n" for name, value in call.arguments.items()
            ]
            return f"<tool_call>\n<function={call.name}>\n{''.join(lines)}</function>\n</tool_call>"
        case "mistral":
            return f"[TOOL_CALLS][{body}]"
        case "llama_json":
            return json.dumps({"name": call.name, "parameters": call.arguments})
        case "plain":
            return body


_TAG: Final = re.compile(r"</?tool_call>")


def _tagged(text: str, read: Any) -> Parsed:
    """Calls between <tool_call> tags. A last one that was not closed may still be whole: its stop token may have been
    the closing tag."""
    kept: list[str] = []
    calls: list[ToolCall] = []
    malformed = at = 0
    opened: re.Match[str] | None = None
    for tag in [*_TAG.finditer(text), None]:
        end = len(text) if tag is None else tag.start()
        if opened is None:
            kept.append(text[at:end])
        else:
            found = read(text[opened.end() : end]) if len(calls) < MAX_CALLS else None
            if found is None:
                malformed += 1
                kept.append(text[opened.start() : end if tag is None else tag.end()])
            else:
                calls += found
        if tag is not None:
            at = tag.end()
            opened = tag if tag[0] == "<tool_call>" else None
    return Parsed("".join(kept).strip(), tuple(calls), malformed)


def _json_calls(body: str) -> list[ToolCall] | None:
    try:
        return _calls_of(json.loads(body))
    except (ValueError, RecursionError):
        return None


_FUNCTION: Final = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)


def _xml_calls(body: str) -> list[ToolCall] | None:
    found = _FUNCTION.fullmatch(body)
    if found is None:
        return None
    arguments: dict[str, Any] = {}
    for part in found[2].split("<parameter=")[1:]:
        name, closes, rest = part.partition(">")
        value, ends, _ = rest.partition("</parameter>")
        if not (closes and ends):
            return None
        arguments[name] = _value(value.removeprefix("\n").removesuffix("\n"))
    return [ToolCall(found[1], arguments)]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _xml_value(value: Any) -> str:
    """Text that reads as something else in JSON keeps its quotes."""
    return value if isinstance(value, str) and _value(value) == value else json.dumps(value)


def _all_json(before: str, mark: str, behind: str) -> Parsed:
    """One JSON value, or several behind one another, up to the end."""
    calls: list[ToolCall] = []
    for value in _values(behind):
        found = _calls_of(value)
        if found is None:
            return Parsed(f"{before}{mark}{behind}".strip(), (), 1)
        calls += found
        if len(calls) > MAX_CALLS:
            return Parsed(f"{before}{mark}{behind}".strip(), (), 1)
    return Parsed(before.strip(), tuple(calls), 0)


def _values(text: str) -> Iterator[Any]:
    """JSON values, separated by space, commas or semicolons; None for what is none."""
    at = 0
    empty = True
    while at < len(text):
        if text[at] in " \t\r\n;,":
            at += 1
            continue
        empty = False
        try:
            value, at = _JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield None
            return
        yield value
    if empty:
        yield None


# Two searches, one behind the other: one expression for both would take the square of a long text's length.
_FENCE_OPENS: Final = re.compile(r"```(?:json|tool_call)?[ \t\r]*\n")
_FENCE_CLOSES: Final = re.compile(r"\n[ \t\r]*```")


def _bare(text: str) -> Parsed:
    """A response that is a call, or has one in a fenced block. Other JSON is an answer and no call."""
    stripped = text.strip()
    opens = _FENCE_OPENS.search(stripped)
    closes = None if opens is None else _FENCE_CLOSES.search(stripped, opens.end())
    body, outside = stripped, ""
    if opens is not None and closes is not None:
        body = stripped[opens.end() : closes.start()].strip()
        outside = (stripped[: opens.start()] + stripped[closes.end() :]).strip()
    if not body.startswith(("{", "[")):
        return Parsed(stripped, (), 0)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return Parsed(stripped, (), int('"name"' in body and ('"arguments"' in body or '"parameters"' in body)))
    calls = _calls_of(value)
    if calls is None:
        return Parsed(stripped, (), 0)
    return Parsed(outside, tuple(calls), 0)


def _calls_of(value: Any) -> list[ToolCall] | None:
    """The calls that a JSON value is, alone or in a list; None: it is something else."""
    values: list[Any] = value if isinstance(value, list) else [value]
    calls: list[ToolCall] = []
    for one in values[: MAX_CALLS + 1]:
        match one:
            case {"name": str(name), "arguments": arguments} | {"name": str(name), "parameters": arguments}:
                if isinstance(arguments, str):
                    arguments = _value(arguments)
                if not isinstance(arguments, dict) or not name:
                    return None
                calls.append(ToolCall(name, {str(key): each for key, each in arguments.items()}))
            case _:
                return None
    return calls if 0 < len(calls) <= MAX_CALLS else None
