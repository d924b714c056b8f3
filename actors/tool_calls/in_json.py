"""Calls that are written in JSON: hermes, llama_json, mistral, deepseek and plain."""

from __future__ import annotations

import re
from typing import Any, Final

from stillhouse.actors.tool_calls.call import SPACE, Parsed, Taken, ToolCall, calls_of, value_at, whole_value

_TOOL_CALL: Final = re.compile(r"</?tool_call>")


def hermes(text: str) -> Parsed:
    """Calls between <tool_call> tags. A last one that was not closed may still be whole: its stop token may have been
    the closing tag."""
    taken = Taken(text)
    tag = _TOOL_CALL.search(text)
    while tag is not None and not taken.hopeless:
        if tag[0] == "<tool_call>":
            found, end = _value(text, tag.end())
            closing = _TOOL_CALL.match(text, _skip(text, end))
            closed = closing is not None and closing[0] == "</tool_call>"
            at = closing.end() if closing is not None and closed else end
            calls = calls_of(found, marked=True)
            if calls is None or not (closed or not text[end:].strip()):
                taken.malformed += 1
            elif taken.add(calls):
                taken.take(tag.start(), at)
                tag = _TOOL_CALL.search(text, at)
                continue
        tag = _TOOL_CALL.search(text, tag.end())
    return taken.parsed()


_MISTRAL_NAME: Final = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\][^\s\[\]{}]*)?\s*\[ARGS\]")


def mistral(text: str) -> Parsed:
    """Behind each mark a list of calls, or a name, [ARGS] and the arguments."""
    taken = Taken(text)
    mark = text.find("[TOOL_CALLS]")
    while mark >= 0 and not taken.hopeless:
        behind = mark + len("[TOOL_CALLS]")
        head = _MISTRAL_NAME.match(text, behind)
        if head is None:
            calls, end = _sequence(text, behind)
        else:
            found, end = _value(text, head.end())
            calls = [ToolCall(head[1], found)] if isinstance(found, dict) else []
        if not calls:
            taken.malformed += 1
        elif taken.add(calls):
            taken.take(mark, end)
            taken.malformed += int(_goes_on(text, end))
            behind = end
        mark = text.find("[TOOL_CALLS]", behind)
    return taken.parsed()


_LLAMA: Final = re.compile(r'<\|python_tag\|>|\{\s*"name"\s*:')


def llama_json(text: str) -> Parsed:
    """Calls behind <|python_tag|>, or alone; several are separated by semicolons. Behind words, or one that cannot be
    read, it goes on with the next object that begins with a name."""
    taken = Taken(text)
    bare = text.lstrip().startswith("{")
    if not bare and "<|python_tag|>" not in text:
        return plain(text)
    at = _llama_calls(text, 0, 0, taken, marked=False) if bare else 0
    on = bare
    mark = _LLAMA.search(text, at)
    while mark is not None and not taken.hopeless:
        at = mark.end()
        if mark[0].startswith("<"):
            on = True
            at = _llama_calls(text, mark.start(), at, taken, marked=True)
        elif on:
            at = _llama_calls(text, mark.start(), mark.start(), taken, marked=False)
        mark = _LLAMA.search(text, at)
    return taken.parsed()


def _llama_calls(text: str, start: int, at: int, taken: Taken, *, marked: bool) -> int:
    """Read what begins at `at`, and take it from `start` on. Where to look on."""
    calls, end = _sequence(text, at, marked=marked)
    if calls:
        if taken.add(calls):
            taken.take(start, end)
        behind = _skip(text, end, SPACE + ";,")
        taken.malformed += int(text.startswith("{", behind) and _LLAMA.match(text, behind) is None)  # a cut one
        return end
    value, end = _value(text, at)
    taken.malformed += int(marked or (value is None and _LLAMA.match(text, _skip(text, at)) is not None))
    return end if value is not None else min(_skip(text, at) + 1, len(text))


_DEEPSEEK_NAME: Final = re.compile(
    r"\s*[^\n<]*<｜tool▁sep｜>(?P<fenced>[^\n<]+)\n```(?:json)?[ \t]*\n"
    r"|\s*(?P<bare>[^\n<]+)<｜tool▁sep｜>"
)
_DEEPSEEK_END: Final = re.compile(r"\s*(?P<fence>```)?\s*(?P<closes><｜tool▁call▁end｜>|(?=<｜tool▁calls▁end｜>))?")
_DEEPSEEK_OUTER: Final = re.compile(r"<｜tool▁calls▁begin｜>\s*|<｜tool▁calls▁end｜>|<｜tool▁call▁begin｜>")


def deepseek(text: str) -> Parsed:
    """Calls of V3 (a name, and arguments in a ``` block) and of V3.1 (a name and arguments), between marks."""
    taken = Taken(text)
    opened: re.Match[str] | None = None
    """The mark before the first call. It stays text where no call follows that can be read."""
    mark = _DEEPSEEK_OUTER.search(text)
    while mark is not None and not taken.hopeless:
        at = mark.end()
        if "begin" not in mark[0]:
            if taken.calls and opened is None:
                taken.take(mark.start(), mark.end())
        elif "calls" in mark[0]:
            opened = mark
            if not text.startswith("<｜tool▁call▁begin｜>", at):
                taken.malformed += 1
        else:
            call, end = _deepseek_call(text, at)
            if call is None:
                taken.malformed += 1
            elif taken.add([call]):
                start = mark.start()
                if opened is not None and opened.end() == start:
                    start, opened = opened.start(), None
                taken.take(start, end)
                at = end
        mark = _DEEPSEEK_OUTER.search(text, at)
    return taken.parsed()


def _deepseek_call(text: str, at: int) -> tuple[ToolCall | None, int]:
    head = _DEEPSEEK_NAME.match(text, at)
    if head is None:
        return None, at
    found, end = _value(text, head.end())
    behind = _DEEPSEEK_END.match(text, end)
    assert behind is not None
    whole = behind["closes"] is not None or behind.end() == len(text)  # the mark may have been the stop token
    if not isinstance(found, dict) or not whole or bool(head["fenced"]) != bool(behind["fence"]):
        return None, at
    return ToolCall((head["fenced"] or head["bare"]).strip(), found), behind.end()


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        return value_at(text, at)
    except ValueError:
        return None, at


def _sequence(text: str, at: int, *, marked: bool = True) -> tuple[list[ToolCall], int]:
    """The calls that follow one another, separated by space, commas or semicolons, and where the last ends."""
    calls: list[ToolCall] = []
    end = at
    while True:
        found, behind = _value(text, end if not calls else _skip(text, end, SPACE + ";,"))
        more = calls_of(found, marked=marked)
        if more is None:
            return calls, end
        calls += more
        end = behind


def _goes_on(text: str, end: int) -> bool:
    """Whether one more call was begun, which cannot be read."""
    return text.startswith(("{", "[{"), _skip(text, end, SPACE + ";,"))


def _skip(text: str, at: int, what: str = SPACE) -> int:
    while at < len(text) and text[at] in what:
        at += 1
    return at


# Two searches, one behind the other: one expression for both would take the square of a long text's length.
_FENCE_OPENS: Final = re.compile(r"```([\w+-]*)[ \t\r]*\n")
_FENCE_CLOSES: Final = re.compile(r"\n[ \t\r]*```")


def plain(text: str) -> Parsed:
    """A response that is a call, or has some in fenced blocks. Other JSON is an answer and no call."""
    taken = Taken(text)
    opens = _FENCE_OPENS.search(text)
    while opens is not None and not taken.hopeless:
        closes = _FENCE_CLOSES.search(text, opens.end() - 1)
        if closes is None:
            break
        if opens[1] in ("", "json", "tool_call") and _block(text[opens.end() : closes.start()].strip(), taken):
            taken.take(opens.start(), closes.end())
        opens = _FENCE_OPENS.search(text, closes.end())
    if not (taken.calls or taken.malformed) and _block(text.strip(), taken):
        taken.take(0, len(text))
    return taken.parsed()


def _block(body: str, taken: Taken) -> bool:
    """Whether it is a call, which then is added."""
    if not body.startswith(("{", "[")):
        return False
    try:
        calls = calls_of(whole_value(body), marked=False)
    except ValueError:
        taken.malformed += int('"name"' in body and ('"arguments"' in body or '"parameters"' in body))
        return False
    return calls is not None and taken.add(calls)
