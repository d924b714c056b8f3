"""Tool calls of each model family, as their templates write them."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.tool_calls import MAX_CALLS, Parsed, ToolCall, ToolDialect, parse_tool_calls, render_tool_call, tool_dialect

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
        ("qwen_xml", "<tool_call><function=add></tool_call>", Parsed("<tool_call><function=add></tool_call>", (), 1)),
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


NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,9}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>[]\r"), max_size=9).map(str.strip)
VALUES: st.SearchStrategy[Any] = st.one_of(st.integers(), st.booleans(), TEXTS, st.lists(st.integers(), max_size=3))


@settings(max_examples=200, deadline=None)
@given(name=NAMES, arguments=st.dictionaries(NAMES, VALUES, max_size=4), dialect=st.sampled_from(DIALECTS))
def test_a_rendered_call_is_read_back(name: str, arguments: dict[str, Any], dialect: ToolDialect) -> None:
    call = ToolCall(name, arguments)
    assert parse_tool_calls(render_tool_call(call, dialect), dialect) == Parsed("", (call,), 0)


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "[TOOL_CALLS]", "<|python_tag|>",
     "{", "}", '"name"', '"arguments"', ":", "[", "]", ",", "```json\n", "\n```", "1", "x", json.dumps(ADD._asdict())]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(text=st.lists(PIECES, max_size=20).map("".join), dialect=st.sampled_from(DIALECTS))
def test_nothing_raises_and_nothing_is_invented(text: str, dialect: ToolDialect) -> None:
    parsed = parse_tool_calls(text, dialect)
    if not parsed.calls and not parsed.malformed:
        assert parsed.content.replace(" ", "") in text.replace(" ", "") or dialect in ("hermes", "qwen_xml")
    assert all(call.name for call in parsed.calls)


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
