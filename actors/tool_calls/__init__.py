"""Tool calls in what a student wrote, by the notation of its model family. No I/O.

hermes      <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>            Qwen 2.5, Qwen 3, Hermes
qwen_xml    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>    Qwen 3 Coder
llama_json  {"name": "add", "parameters": {"a": 1}}, behind <|python_tag|> or alone      Llama 3.1 and later
mistral     [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}], or [TOOL_CALLS]add[ARGS]{"a": 1}
deepseek    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
plain       the JSON of hermes, alone or in fenced blocks, for models that were taught no notation

Every character of a text is in its content or in a call that was read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from stillhouse.actors.tool_calls import in_json
from stillhouse.actors.tool_calls.call import MAX_CALLS, Parsed, ToolCall
from stillhouse.actors.tool_calls.in_xml import qwen_xml
from stillhouse.actors.tool_calls.schemas import properties_of, write_by_schema, write_freely

__all__ = ["MAX_CALLS", "Parsed", "ToolCall", "ToolDialect", "parse_tool_calls", "render_tool_call", "tool_dialect"]

ToolDialect: TypeAlias = Literal["hermes", "qwen_xml", "llama_json", "mistral", "deepseek", "plain"]


def tool_dialect(chat_template: str | None) -> ToolDialect:
    """The notation that a chat template teaches its model."""
    template = chat_template or ""
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek"
    if "<function=" in template:
        return "qwen_xml"
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters"' in template:
        return "llama_json"
    return "plain"


def parse_tool_calls(
    text: str, dialect: ToolDialect, tools: Sequence[Mapping[str, Any]] | None = None, *, thinking: bool = False
) -> Parsed:
    """The calls in a response. Never raises: what cannot be read is counted and stays text.

    `tools`: their schemas, as OpenAI has them, which say what the values of qwen_xml are. `thinking`: the prompt has
    opened the reasoning."""
    thought = _thought(text, thinking)
    parsed = _read(text[thought:], dialect, tools)
    if not thought:
        return parsed
    space = len(text[thought:]) - len(text[thought:].lstrip())
    return parsed._replace(content=f"{text[: thought + space]}{parsed.content}".strip())


def _thought(text: str, thinking: bool) -> int:
    """Where the reasoning ends that a response begins with. A call in it is a thought."""
    end = text.find("</think>") if thinking or text.lstrip().startswith("<think>") else -1
    return end + len("</think>") if end >= 0 else 0


def _read(text: str, dialect: ToolDialect, tools: Sequence[Mapping[str, Any]] | None) -> Parsed:
    match dialect:
        case "hermes":
            return in_json.hermes(text)
        case "qwen_xml":
            return qwen_xml(text, None if tools is None else properties_of(tools))
        case "mistral":
            return in_json.mistral(text)
        case "llama_json":
            return in_json.llama_json(text)
        case "deepseek":
            return in_json.deepseek(text)
        case "plain":
            return in_json.plain(text)


def render_tool_call(call: ToolCall, dialect: ToolDialect, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """The call as a student writes it. `tools`: as for `parse_tool_calls`."""
    arguments = json.dumps(call.arguments)
    body = json.dumps({"name": call.name, "arguments": call.arguments})
    match dialect:
        case "hermes":
            return f"<tool_call>\n{body}\n</tool_call>"
        case "qwen_xml":
            return _xml(call, tools)
        case "mistral":
            return f"[TOOL_CALLS] [{body}]"
        case "llama_json":
            return json.dumps({"name": call.name, "parameters": call.arguments})
        case "deepseek":
            call_text = f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
            return f"<｜tool▁calls▁begin｜>{call_text}<｜tool▁calls▁end｜>"
        case "plain":
            return body


def _xml(call: ToolCall, tools: Sequence[Mapping[str, Any]] | None) -> str:
    write = write_freely if tools is None else write_by_schema
    lines = [f"<parameter={name}>\n{write(value)}\n</parameter>\n" for name, value in call.arguments.items()]
    return f"<tool_call>\n<function={call.name}>\n{''.join(lines)}</function>\n</tool_call>"
