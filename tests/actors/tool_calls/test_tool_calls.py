"""Tool calls of each model family, as their templates write them."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.actors.tool_calls import (
    MAX_CALLS,
    Parsed,
    ToolCall,
    ToolDialect,
    parse_tool_calls,
    render_tool_call,
    tool_dialect,
)

DIALECTS: tuple[ToolDialect, ...] = get_args(ToolDialect)
ADD = ToolCall("add", {"a": 1, "b": [2, "x"]})


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        (None, "plain"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "plain"),
        ("... within <tool_call></tool_call> XML tags", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=p>", "qwen_xml"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama_json"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}", "deepseek"),
    ],
)
def test_a_template_tells_the_notation(template: str | None, dialect: ToolDialect) -> None:
    assert tool_dialect(template) == dialect


@pytest.mark.parametrize(
    ("dialect", "text", "parsed"),
    [
        (
            "hermes",
            'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>',
            Parsed("Let me see.", (ADD,), 0),
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', Parsed("", (ToolCall("f", {}),), 0)),
        ("hermes", "<tool_call>nonsense</tool_call> 5", Parsed("<tool_call>nonsense</tool_call> 5", (), 1)),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call><tool_call>{}</tool_call>',
            Parsed("<tool_call>{}</tool_call>", (ToolCall("f", {"a": 1}),), 1),
        ),
        (
            "qwen_xml",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\ntwo words\n</parameter>\n"
            "</function>\n</tool_call>",
            Parsed("", (ToolCall("add", {"a": 1, "b": "two words"}),), 0),
        ),
        ("qwen_xml", "<tool_call><function=add></tool_call>", Parsed("", (ToolCall("add", {}),), 0)),
        ("mistral", 'Hm.[TOOL_CALLS][{"name": "f", "arguments": {}}]', Parsed("Hm.", (ToolCall("f", {}),), 0)),
        ("mistral", "[TOOL_CALLS]", Parsed("[TOOL_CALLS]", (), 1)),
        ("llama_json", '{"name": "f", "parameters": {"x": "y"}}', Parsed("", (ToolCall("f", {"x": "y"}),), 0)),
        (
            "llama_json",
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            Parsed("", (ToolCall("f", {}), ToolCall("g", {})), 0),
        ),
        ("plain", 'So:\n```json\n{"name": "f", "arguments": {}}\n```', Parsed("So:", (ToolCall("f", {}),), 0)),
        ("plain", '{"answer": 5}', Parsed('{"answer": 5}', (), 0)),
        ("plain", '{"name": "f", "arguments": {', Parsed('{"name": "f", "arguments": {', (), 1)),
        ("plain", "#12", Parsed("#12", (), 0)),
    ],
)
def test_calls_are_read_and_what_is_none_stays_text(dialect: ToolDialect, text: str, parsed: Parsed) -> None:
    assert parse_tool_calls(text, dialect) == parsed


@pytest.mark.parametrize(
    ("dialect", "text", "content", "arguments", "malformed"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [{}], 0),
        ("hermes", "a </tool_call> b", "a </tool_call> b", [], 0),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', None, [], 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, [], 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', None, [], 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>', None, [], 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} and so on', None, [], 1),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}', "", [{"a": 1}], 0),
        ("mistral", 'So[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{"a": 2}!', "So!", [{"a": 1}, {"a": 2}], 0),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', "", [{"a": 1}], 0),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ', None, [], 1),
        ("mistral", "[TOOL_CALLS]f[ARGS]1", None, [], 1),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}] then {', "then {", [{}], 0),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}, {"name"', ', {"name"', [{}], 1),
        ("llama_json", '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', "", [{}, {}], 0),
        ("llama_json", '{"name": "f", "parameters": {}} I called f.', "I called f.", [{}], 0),
        ("llama_json", '<|python_tag|>{"name": "f", "parameters": {}};{"na', ';{"na', [{}], 1),
        ("llama_json", '{"name": "Ann"}', None, [], 0),
        ("llama_json", '{} <|python_tag|>{"name": "f"}', "{}", [{}], 0),
        ("llama_json", "<|python_tag|>print(1)", None, [], 1),
        ("llama_json", '<|python_tag|>I try {"name": "f", "parameters": {}}', "<|python_tag|>I try", [{}], 1),
        ("llama_json", '{"name": "f, {}}; {"name": "f", "parameters": {}}', '{"name": "f, {}};', [{}], 1),
        (
            "plain",
            '```json\n{"x": 1}\n```\n```\n{"name": "f", "arguments": {}}\n```',
            '```json\n{"x": 1}\n```',
            [{}],
            0,
        ),
        ("plain", '```python\nx\n```\n{"name": "f", "arguments": {}}\n```', None, [], 0),
        ("plain", '[So]\n```json\n{"name": "f", "arguments": {}}\n```', "[So]", [{}], 0),
        (
            "plain",
            '```json\n{"name": "f", "arguments": {}}\n```\n```json\n{"name": "f", "arguments": {"a": 1}}\n```',
            *("", [{}, {"a": 1}], 0),
        ),
    ],
)
def test_json_notations_as_students_write_them(
    dialect: ToolDialect, text: str, content: str | None, arguments: list[dict[str, Any]], malformed: int
) -> None:
    """`content` None: the whole text."""
    parsed = parse_tool_calls(text, dialect)
    assert parsed.content == (text.strip() if content is None else content)
    assert [call.arguments for call in parsed.calls] == arguments
    assert parsed.malformed == malformed


V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_END = "<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    ("text", "content", "n_calls", "malformed"),
    [
        (f"So.{BEGIN}{V3}{END}", "So.", 1, 0),
        (f"So.{BEGIN}{V3.replace('function<', 'tool<')}{END}", "So.", 1, 0),
        (f"{BEGIN}{V3}\n{V3}{END}", "", 2, 0),
        (f"So.{BEGIN}{V31}{V31}{END} b", "So. b", 2, 0),
        (V31, "", 1, 0),
        (f"{BEGIN}{V31.removesuffix(CALL_END)}", "", 1, 0),
        (f"{BEGIN}{V3.removesuffix(CALL_END)}{END}", "", 1, 0),
        (f"{BEGIN}{V31.replace('{}', '[]')}{END}", None, 0, 1),
        (f"{BEGIN}{V31.replace('{}', '{')}{END}", None, 0, 1),
        (f"{BEGIN}{V3.replace('```<', '<')}{END}", None, 0, 1),
        (f"{BEGIN}{END}", None, 0, 1),
        (f"{V31}{V31.replace('{}', 'x')}", V31.replace("{}", "x"), 1, 1),
    ],
)
def test_deepseek(text: str, content: str | None, n_calls: int, malformed: int) -> None:
    parsed = parse_tool_calls(text, "deepseek")
    assert parsed == Parsed(text if content is None else content, (ToolCall("f", {}),) * n_calls, malformed)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_in_the_reasoning_is_a_thought(dialect: ToolDialect) -> None:
    call = render_tool_call(ADD, dialect)
    thought = f"<think>\nI could write <tool_call>, or {call}, or [TOOL_CALLS].\n</think>"
    assert parse_tool_calls(f"{thought}\n\n{call}", dialect) == Parsed(thought, (ADD,), 0)
    opened = thought.removeprefix("<think>\n")
    assert parse_tool_calls(f"{opened}{call}", dialect, thinking=True) == Parsed(opened, (ADD,), 0)
    assert parse_tool_calls(f"{thought}\n\nIt is 5.", dialect) == Parsed(f"{thought}\n\nIt is 5.", (), 0)


XML_NAMES = st.text(
    st.characters(exclude_categories=["Cs", "Z", "Cc"], exclude_characters="<>[]{}"), min_size=1, max_size=9
)
TAGS = (
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "[TOOL_CALLS]"),
    *("<|python_tag|>", "[ARGS]", "```json\n", "\n```", "<｜tool▁call▁end｜>", BEGIN, "{", "}", '"', "\\", ", ", "\n"),
)
TEXTS = st.lists(
    st.one_of(st.sampled_from(TAGS), st.text(st.characters(exclude_categories=["Cs"]), max_size=5)), max_size=6
).map("".join)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.integers(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def _calls(draw: st.DrawFn) -> tuple[ToolDialect, list[ToolCall]]:
    """Of names and arguments that the dialect can write. JSON can write any text."""
    dialect = draw(st.sampled_from(DIALECTS))
    names = XML_NAMES if dialect in ("qwen_xml", "deepseek", "mistral") else TEXTS.filter(bool)
    keys = XML_NAMES if dialect == "qwen_xml" else TEXTS
    one = st.builds(ToolCall, names, st.dictionaries(keys, VALUES, max_size=4))
    return dialect, draw(st.lists(one, min_size=1, max_size=1 if dialect == "plain" else 3))


@settings(max_examples=25, deadline=None)
@given(_calls())
def test_rendered_calls_are_read_back(made: tuple[ToolDialect, list[ToolCall]]) -> None:
    dialect, calls = made
    between = {"llama_json": "; ", "plain": ""}.get(dialect, "\n")
    text = between.join(render_tool_call(call, dialect) for call in calls)
    assert parse_tool_calls(text, dialect) == Parsed("", tuple(calls), 0)


SCHEMAS: dict[str, st.SearchStrategy[Any]] = {
    "string": st.lists(st.sampled_from([*(tag for tag in TAGS if "parameter" not in tag), "x", "1", "null"])).map(
        "".join
    ),
    "integer": st.integers(),
    "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "array": st.lists(VALUES, max_size=3),
    "object": st.dictionaries(TEXTS, VALUES, max_size=3),
}
"""Tags of parameters in a text are the one thing that this notation cannot write without doubt."""


@settings(max_examples=25, deadline=None)
@given(data=st.data(), types=st.dictionaries(XML_NAMES, st.sampled_from(sorted(SCHEMAS)), max_size=4))
def test_calls_of_qwen_xml_are_read_back_by_their_schema(data: st.DataObject, types: dict[str, str]) -> None:
    call = ToolCall("f", {name: data.draw(SCHEMAS[kind]) for name, kind in types.items()})
    properties = {name: {"type": kind} for name, kind in types.items()}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    text = render_tool_call(call, "qwen_xml", tools)
    parsed = parse_tool_calls(f"So. {text} {text}", "qwen_xml", tools)
    assert parsed == Parsed("So.", (call, call), 0)
    for name, value in parsed.calls[0].arguments.items():
        assert isinstance(value, bool) == (types[name] == "boolean")


PIECES = st.sampled_from(
    [*TAGS, "x", "x", "x", "<think>", "</think>",
     "<parameter=x>", "<function=f><parameter=a>", "</parameter></function>",
     '"name"', '"arguments"', ":", "[", "]", "1", "f", " ", json.dumps(ADD._asdict()), V3, V31,
     "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "function", ";"]
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(pieces=st.lists(PIECES, max_size=25), dialect=st.sampled_from(DIALECTS))
def test_nothing_raises_and_nothing_is_lost(pieces: list[str], dialect: ToolDialect) -> None:
    """Each word, told apart by a number, is in the content, which keeps the text's order, or in a call."""
    words = {f"x{at}x" for at, piece in enumerate(pieces) if piece == "x"}
    text = "".join(f"x{at}x" if piece == "x" else piece for at, piece in enumerate(pieces))
    parsed = parse_tool_calls(text, dialect)
    assert all(call.name for call in parsed.calls)
    if not parsed.calls:
        assert parsed.content == text.strip()
    left = iter(text)
    assert all(character in left for character in parsed.content)
    called = repr(parsed.calls)
    assert not [word for word in words if (word in parsed.content) == (word in called)]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>",
        "<parameter=a>",
        "```json\n",
        "```json\n{",
        "\n",
        '{"name":',
        "[",
        '{"name": "f", "arguments": {}} ',
    ],
)
def test_long_garbage_takes_no_long_time(piece: str, dialect: ToolDialect) -> None:
    """A time that grows with the square of the length would run into the limit of every test."""
    parse_tool_calls(f"<tool_call><function=f>{piece * 10_000}</function></tool_call>", dialect)
    for mark in ("[TOOL_CALLS]", "<|python_tag|>"):
        assert len(parse_tool_calls(f"{mark}{piece * 10_000}", dialect).calls) <= MAX_CALLS
    parse_tool_calls(piece * 10_000, dialect)
    parsed = parse_tool_calls(f"```{piece * 10_000}", dialect)
    assert len(parsed.calls) <= MAX_CALLS
