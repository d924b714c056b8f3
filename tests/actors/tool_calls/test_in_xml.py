"""Calls of Qwen 3 Coder: values without quotes, and tags that students leave out."""

from __future__ import annotations

from typing import Any

import pytest

from stillhouse.actors.tool_calls import Parsed, ToolCall, parse_tool_calls


def function(*parameters: str) -> str:
    return "<function=f>\n" + "\n".join(parameters) + "\n</function>"


def parameter(name: str, value: object) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>"


def qwen(text: str, **types: Any) -> Parsed:
    schema = {"type": "object", "properties": types}
    return parse_tool_calls(text, "qwen_xml", [{"type": "function", "function": {"name": "f", "parameters": schema}}])


@pytest.mark.parametrize(
    ("text", "content", "arguments", "malformed"),
    [
        pytest.param(function(parameter("a", 1)), "", [{"a": 1}], 0, id="without the outer tag"),
        pytest.param(f"{function(parameter('a', 1))}\n</tool_call>", "", [{"a": 1}], 0, id="only the outer end"),
        pytest.param(
            f"<tool_call>{function(parameter('a', 1))} {function(parameter('a', 2))}</tool_call>",
            *("", [{"a": 1}, {"a": 2}], 0),
            id="two functions in one call",
        ),
        pytest.param(
            f"<tool_call>{function(parameter('a', 1), 'Then', parameter('b', 2))}</tool_call>",
            *("Then", [{"a": 1, "b": 2}], 0),
            id="text between parameters",
        ),
        pytest.param(
            f"<tool_call>Now {function(parameter('a', 1))} so </tool_call>.",
            *("Now  so .", [{"a": 1}], 0),
            id="text around the function",
        ),
        pytest.param(
            f"<tool_call>{function(parameter('a', 1), parameter('a', 2))}</tool_call>",
            *(f"<tool_call>{function(parameter('a', 1), parameter('a', 2))}</tool_call>", [], 1),
            id="one parameter twice",
        ),
        pytest.param(
            "<tool_call><function=f><parameter=a>1\n<parameter=b>2\n</function></tool_call>",
            *("", [{"a": 1, "b": 2}], 0),
            id="ends left out",
        ),
        pytest.param("<function=f><parameter=a>1", "<function=f><parameter=a>1", [], 1, id="cut in a value"),
        pytest.param(
            f"<tool_call>{function(parameter('a', 1))[:-11]}",
            *(f"<tool_call>{function(parameter('a', 1))[:-11].strip()}", [], 1),
            id="cut behind a value",
        ),
        pytest.param("<function=f>{}</function>", "<function=f>{}</function>", [], 0, id="no parameters but text"),
        pytest.param("I call <function=f>.", "I call <function=f>.", [], 0, id="words about functions"),
        pytest.param("a </tool_call> b", "a </tool_call> b", [], 0, id="an end without a beginning"),
        pytest.param(
            f"<tool_call>{function(parameter('a', 1))}</tool_call><tool_call>x</tool_call>",
            *("<tool_call>x</tool_call>", [{"a": 1}], 1),
            id="one good, one bad",
        ),
    ],
)
def test_qwen_xml_as_students_write_it(
    text: str, content: str, arguments: list[dict[str, Any]], malformed: int
) -> None:
    parsed = parse_tool_calls(text, "qwen_xml")
    assert (parsed.content, [call.arguments for call in parsed.calls], parsed.malformed) == (
        content,
        arguments,
        malformed,
    )


@pytest.mark.parametrize(
    "value",
    [
        "<parameter=x>1</parameter>",
        "an </parameter> too many",
        "</function>",
        "<tool_call><function=g></function></tool_call>",
        'if "<parameter=" in text:',
        "\n two\n lines \n",
        "",
        "123",
        '{"a": 1}',
        "null",
    ],
)
def test_a_string_of_qwen_xml_may_be_any_text(value: str) -> None:
    text = f"<tool_call>{function(parameter('a', value), parameter('b', 1))}</tool_call>"
    assert qwen(text, a={"type": "string"}, b={"type": "integer"}) == Parsed(
        "", (ToolCall("f", {"a": value, "b": 1}),), 0
    )


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "number"}, "12", 12),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "inf", "inf"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "array"}, "[1]", [1]),
        ({"type": "object"}, "{", "{"),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["null", "integer"]}, "7", 7),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": "integer"}, "None", "None"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", "7"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": 3}, "3", 3),
        ({"$ref": "#/$defs/P"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/P"}, "5", "5"),
        (True, "5", "5"),
    ],
)
def test_a_schema_says_what_a_value_of_qwen_xml_is(schema: Any, written: str, value: Any) -> None:
    (call,) = qwen(function(parameter("a", written)), a=schema).calls
    assert call.arguments == {"a": value}
    assert type(call.arguments["a"]) is type(value)


@pytest.mark.parametrize(
    "tools", [[{}], [{"function": 1}], [{"function": {"name": "f"}}], [{"function": {"name": "f", "parameters": 3}}]]
)
def test_tools_without_a_schema_do_no_harm(tools: list[dict[str, Any]]) -> None:
    assert parse_tool_calls(function(parameter("a", 1)), "qwen_xml", tools).calls == (ToolCall("f", {"a": "1"}),)
