"""What a message of a conversation must be, so that a chat template shows all of it. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, cast

SAYS_MORE: Final = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""What an assistant may have said where there is no content."""
_ROLES_OF_OTHERS: Final = {"human": "user", "gpt": "assistant", "ai": "assistant", "bot": "assistant"}
_ROLES: Final = ("user", "assistant", "system", "tool", "developer")


def message_fault(message: Mapping[str, Any]) -> str:
    """Why this message cannot be what its writer means; empty if it can."""
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    needs = f"every message needs a 'role' and a 'content', got keys {sorted(message)}"
    if "from" in message or "value" in message:
        needs += "; 'from' and 'value' are other names for them: write role = user, assistant or system, and content"
    if not isinstance(role, str):
        return needs
    meant = _ROLES_OF_OTHERS.get(role.strip().lower(), role.strip().lower())
    if role != meant and meant in _ROLES:
        return f"the role {role!r} is one that chat templates write as it is or leave out; write {meant!r}"
    if calls and not (isinstance(calls, list) and all(map(_is_call, cast("list[object]", calls)))):
        return f"'tool_calls' of a {role} message: expected a list of functions' names and arguments, got {calls!r:.80}"
    match content:
        case None:
            return "" if role == "assistant" and any(message.get(name) for name in SAYS_MORE) else needs
        case str():
            return ""
        case list():
            parts = cast("list[object]", content)
            return next((fault for part in parts if (fault := _part_fault(part))), "")
        case _:
            return (
                f"'content' of a {role} message is of type {type(content).__name__}, expected text or a list of parts"
            )


def parsed_arguments(arguments: object) -> object:
    """Arguments of a tool call as an object, where they are JSON in a text; an empty text, as vLLM has it, says that
    there are none. Any other text stays as it is: templates show it so."""
    if arguments == "":
        return {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            return json.loads(arguments)
    return arguments


def with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects."""
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    if not calls:
        return message
    return {**message, "tool_calls": [_parsed(call) for call in calls]}


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _parsed(call["function"])}
    return {**call, "arguments": parsed_arguments(call["arguments"])} if "arguments" in call else call


def _is_call(call: object) -> bool:
    match call:
        case {"function": {"name": str()}} | {"name": str()}:
            return True
        case _:
            return False


def _part_fault(part: object) -> str:
    match part:
        case {"type": "text", "text": str()}:
            return ""
        case {"type": str(kind)} if kind != "text":
            return f"got a part of type {kind!r} in a 'content', expected text: the student only reads text"
        case _:
            return f'a part of a \'content\' is {str(part)[:80]!r}, expected {{"type": "text", "text": ...}}'
