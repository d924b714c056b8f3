"""Arguments that are written without JSON's quotes: what a tool's schema says that they are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from stillhouse.actors.tool_calls.call import whole_value

_MAX_DEPTH: Final = 8
"""Levels of anyOf and the like that are looked at."""
_CHOICES: Final = ("anyOf", "oneOf", "allOf")


def properties_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schemas of each tool's parameters, by name. Tools are objects as OpenAI has them; what is none is left
    out."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        match tool:
            case {"function": {"name": str(name), **function}}:
                found.setdefault(name, _properties(function.get("parameters"), 0))
            case _:
                pass
    return found


def _properties(schema: Any, depth: int) -> Mapping[str, Any]:
    """Also those of alternatives, where the schema itself names none."""
    match schema:
        case {"properties": dict(own)}:
            return cast("dict[str, Any]", own)
        case dict() if depth < _MAX_DEPTH:
            found: dict[str, Any] = {}
            for one in _choices(cast("dict[str, Any]", schema)):
                found = {**_properties(one, depth + 1), **found}
            return found
        case _:
            return {}


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    return [one for key in _CHOICES if isinstance(schema.get(key), list) for one in schema[key]]


def read_freely(text: str) -> Any:
    """Without a schema: a text that reads as JSON is that."""
    try:
        return whole_value(text)
    except ValueError:
        return text


def write_freely(value: Any) -> str:
    """What `read_freely` reads. Text that would be taken for something else keeps its quotes."""
    if isinstance(value, str) and "<" not in value and read_freely(value) == value:
        return value
    return _in_json(value)


def read_by_schema(text: str, schema: Any) -> Any:
    """A value of the type that the schema names. Text that is none of that type stays text, so that the tool says what
    is wrong; text of an unknown type too, unless it is an object or a list."""
    types = _types(schema, 0)
    kind = _one_type(schema, types)
    if kind == "string" and "null" not in types:
        return text
    word = text.strip().lower()
    if word == "null" or (word == "none" and "null" in types):  # templates write Python's None
        return None
    match kind:
        case "string":
            return text
        case "integer":
            return _number(text, int)
        case "number":
            return _number(text, float)
        case "boolean":
            return {"true": True, "false": False}.get(text.strip().lower(), text)
        case _:
            value = read_freely(text)
            return value if isinstance(value, dict | list) else text


def write_by_schema(value: Any) -> str:
    """What `read_by_schema` reads."""
    return value if isinstance(value, str) else _in_json(value)


def _in_json(value: Any) -> str:
    return json.dumps(value).replace("<", "\\u003c")


def _number(text: str, kind: type[int | float]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        return text
    if not math.isfinite(value):
        return text
    whole = isinstance(value, float) and value.is_integer() and not set(text) & set(".eE")
    return int(text) if whole else value


def _one_type(schema: Any, types: Sequence[str]) -> str | None:
    """The type to read as: the first of a list, as vLLM and SGLang do; of alternatives string, if it is one."""
    real = [kind for kind in types if kind != "null"]
    listed = isinstance(schema, dict) and "type" in schema
    return "string" if "string" in real and not listed else next(iter(real), None)


_NAMES: Final = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def _types(schema: Any, depth: int) -> tuple[str, ...]:
    match schema:
        case {"type": str(kind)}:
            return (kind,)
        case {"type": list(kinds)}:
            return tuple(str(kind) for kind in cast("list[Any]", kinds))
        case {"enum": list(values)}:
            return tuple(_NAMES.get(type(value), "null") for value in cast("list[Any]", values))
        case {"const": value}:
            return (_NAMES.get(type(value), "null"),)
        case dict() if depth < _MAX_DEPTH:
            return tuple(kind for one in _choices(cast("dict[str, Any]", schema)) for kind in _types(one, depth + 1))
        case _:
            return ()
