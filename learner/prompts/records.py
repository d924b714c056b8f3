"""One row of a prompt file as a typed record, and the errors for bad rows and files.

    {"prompt": "8293+4758=", "tag": "addition", "ground_truth": "13051"}
    {"messages": [{"role": "user", "content": "8293+4758="}], "ground_truth": "13051"}
    {"prompt": "Guess!", "env": "guess", "env_options": {"highest": 63}}

Where rows are read with their answers, one with neither `prompt` nor `messages` may have `text`: a document.

A row has either `prompt` (text; a list of chat turns is read as `messages`) or `messages`. Optional are `tag`,
`ground_truth`, `hint` (text for teachers only, see `learner.prompts.rendering`), `env` (an environment of the run) and
`env_options` (its options for this row), `tools` and `chat_template_kwargs` (both for the chat template). A row with an
`env` and no `tag` has the environment's name as its tag. A `ground_truth` that is not text becomes its JSON
(42 -> "42"). `tools` and `chat_template_kwargs` may also be JSON in a text. All columns, these and others, are handed
to the row's environment, those that were JSON in a text as what they say. A null is the same as no key, at any depth,
because tables fill what a row does not have with nulls.

Rows of other projects are read too. ROLL: `messages` may be JSON in a text, `prompt` beside it is not rendered, and
`domain` is the tag. verl: `prompt` is a list of turns, `data_source` is the tag, and `reward_model` has the
`ground_truth`. A row's own `tag`, `env` and `ground_truth` come first."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import msgspec

from stillhouse.models.messages import message_fault, with_parsed_arguments
from stillhouse.protocol.messages import MAX_ROW_BYTES

FIELDS = (
    *("prompt", "messages", "tag", "ground_truth", "hint", "env", "env_options"),
    *("tools", "chat_template_kwargs"),
)

NO_COLUMNS: Final[Mapping[str, str]] = MappingProxyType({})

_log = logging.getLogger(__name__)


class DataError(ValueError):
    """Prompts cannot be read from this path; the message names the file and says what was expected."""


class RowError(DataError):
    """One row is invalid; the message names file and line (or row)."""


class PromptRecord(msgspec.Struct, frozen=True):
    """One row. Exactly one of `prompt` and `messages` is not None."""

    row: int
    """Index among the rows of the source, from 0 (blank lines are not rows)."""
    prompt: str | None
    messages: tuple[dict[str, Any], ...] | None
    tag: str = ""
    ground_truth: str | None = None
    hint: str | None = None
    env: str = ""
    """Name of its environment; empty: `learner.tasks.env`."""
    columns: bytes = b""
    """All columns, as one JSON object. Not checked beyond the fields of this record (`columns_fault`)."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of functions, for the chat template."""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    response: str | None = None
    """The answer to `prompt`, if rows are read with their answers. Those to `messages` are among them."""
    document: bool = False
    """`response` is a whole document, and `prompt` is empty."""


class ColumnsFault(NamedTuple):
    """Reason why the columns of a row cannot be handed to an environment, and the details."""

    reason: str
    detail: str


def columns_fault(columns: bytes) -> ColumnsFault | None:
    """Check that the columns are not too large, and that an environment's side will be able to read them."""
    if len(columns) > MAX_ROW_BYTES:
        return ColumnsFault("row_too_large", f"{len(columns)} bytes of JSON, expected at most {MAX_ROW_BYTES}")
    try:
        msgspec.json.decode(columns or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return ColumnsFault("bad_row", f"a column cannot be read: {error}; got {_excerpt(columns)}")
    return None


class _Fields(msgspec.Struct):
    prompt: str | list[dict[str, Any]] | None = None
    messages: str | list[dict[str, Any]] | None = None
    tag: str | None = None
    ground_truth: Any = None
    hint: str | None = None
    env: str | None = None
    env_options: dict[str, Any] | None = None
    tools: str | list[dict[str, Any]] | None = None
    chat_template_kwargs: str | dict[str, Any] | None = None
    domain: Any = None
    data_source: Any = None
    reward_model: Any = None
    response: Any = None
    completion: Any = None
    text: Any = None


_decoder = msgspec.json.Decoder(_Fields)


def record_from_json(
    line: bytes,
    row: int,
    where: Callable[[], str],
    columns: Mapping[str, str] = NO_COLUMNS,
    *,
    answers: bool = False,
) -> PromptRecord:
    """`columns`: field -> the column that has it. `answers`: rows have the answers too. Raises RowError naming
    `where()` for anything but a JSON object with the fields above."""
    text = given = line
    try:
        if columns:
            given = line = msgspec.json.encode(_renamed(msgspec.json.decode(line, type=dict[str, Any]), columns))
        if b"null" in line:
            line = _line_without_nulls(line)
        fields = _decoder.decode(line)
        _json.decode(text.decode(errors="replace"))  # columns that nobody reads may hold anything
    except msgspec.ValidationError as error:
        raise RowError(f"{where()}: {error}; got {_excerpt(line)}") from error
    except RowError as error:
        raise RowError(f"{where()}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RowError(f"{where()}: not a JSON object on one line ({error}); got {_excerpt(line)}") from error
    return _record(fields, row, where, lambda: msgspec.json.decode(given, type=dict[str, Any]), line.strip(), answers)


def record_from_columns(
    columns: Mapping[str, Any],
    row: int,
    where: Callable[[], str],
    names: Mapping[str, str] = NO_COLUMNS,
    *,
    answers: bool = False,
) -> PromptRecord:
    """The same for a row of a table. `names`: field -> the column that has it. Raises RowError."""
    try:
        columns = _renamed(columns, names)
        said = _without_nulls(columns)
        fields = msgspec.convert(said, _Fields)
    except msgspec.ValidationError as error:
        raise RowError(f"{where()}: {error}") from error
    return _record(fields, row, where, lambda: columns, _as_json(said), answers)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for `json`. Raises RowError for a name that is there twice: readers of JSON keep the
    last value in silence."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(f"the field {twice!r} is there twice; write it once")
    return row


_json: Final = json.JSONDecoder(object_pairs_hook=unique_keys)


def json_columns(line: bytes) -> list[str]:
    """Field names of one JSON object."""
    return list(msgspec.json.decode(line, type=dict[str, Any]))


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    if not columns:
        return row
    others = {name: value for name, value in row.items() if name not in columns.values()}
    return others | {field: row.get(column) for field, column in columns.items()}


def check_columns(
    found: Sequence[str], where: str, columns: Mapping[str, str] = NO_COLUMNS, *, answers: bool = False
) -> None:
    """Raises DataError for a column of `columns` that is not there, and unless a column `prompt` or `messages` is, or
    with `answers` one with documents (`text`); warns of misspelt optional ones."""
    for field, column in columns.items():
        if column not in found:
            near = difflib.get_close_matches(column, found, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(map(repr, found)) or 'none'}"
            raise DataError(f"{where}: learner.tasks.columns.{field}: no column {column!r}; {hint}")
    found = list(_renamed(dict.fromkeys(found), columns))
    if not {"prompt", "messages", *(("text",) if answers else ())} & set(found):
        raise DataError(f"{where}: {_no_prompt(found)}")
    unread = [name for name in found if name not in FIELDS]
    if seen := sorted({"image", "images", "video", "videos", "audio", "audios"} & set(unread)):
        _log.warning("%s: column %r is not read: the student only reads text", where, seen[0])
    for field in ("tag", "ground_truth", "hint", "env_options", "chat_template_kwargs") if unread else ():
        close = [] if field in found else difflib.get_close_matches(field, unread, n=1, cutoff=0.75)
        if close:
            _log.warning("%s: column %r is not read; the field is called %r", where, close[0], field)


def _record(
    fields: _Fields,
    row: int,
    where: Callable[[], str],
    given: Callable[[], Mapping[str, Any]],
    columns: bytes,
    answers: bool,
) -> PromptRecord:
    """`given`: all columns, and `columns`: the same as JSON, without nulls."""
    plain = {
        "messages": _from_text(fields.messages, "messages", list[dict[str, Any]], where),
        "tools": _from_text(fields.tools, "tools", list[dict[str, Any]], where),
        "chat_template_kwargs": _from_text(fields.chat_template_kwargs, "chat_template_kwargs", dict[str, Any], where),
    }
    read = {name: value for name, value in plain.items() if value is not getattr(fields, name)}
    messages = plain["messages"]
    if messages is None and isinstance(fields.prompt, list):
        messages = read["messages"] = fields.prompt
    prompt = fields.prompt if messages is None and isinstance(fields.prompt, str) else None
    response = None
    if answers and prompt is None and messages is None and isinstance(fields.text, str):
        return document_record(fields.text, row, where, fields.tag or "")
    if answers:
        prompt, messages, response = _with_answer(prompt, messages, fields, where)
    turns = None if messages is None else _turns(messages, where, answers)
    if turns is not None and list(turns) != messages and not answers:
        read["messages"] = list(turns)
    if messages is None and prompt is None:
        raise RowError(f"{where()}: {_no_prompt(list(given()))}")
    if prompt is not None and not prompt.strip():
        raise RowError(f"{where()}: 'prompt' is blank; expected text for the student to continue or answer")
    names = (fields.tag, fields.env, fields.domain, fields.data_source)
    return PromptRecord(
        row=row,
        prompt=prompt,
        messages=turns,
        tag=next((name for name in names if isinstance(name, str) and name), ""),
        ground_truth=_as_text(_ground_truth(fields)),
        hint=fields.hint,
        env=fields.env or "",
        columns=_as_json(_without_nulls({**given(), **read})) if read else columns,
        tools=tuple(plain["tools"] or ()),
        chat_template_kwargs=plain["chat_template_kwargs"] or {},
        response=response,
    )


def document_record(text: str, row: int, where: Callable[[], str], tag: str = "") -> PromptRecord:
    """A text that is trained as a whole. Raises RowError."""
    if not text.strip():
        raise RowError(f"{where()}: 'text' is blank; expected a document")
    return PromptRecord(row=row, prompt="", messages=None, tag=tag, response=text, document=True)


def _with_answer(
    prompt: str | None, messages: list[dict[str, Any]] | None, fields: _Fields, where: Callable[[], str]
) -> tuple[str | None, list[dict[str, Any]] | None, str | None]:
    """`prompt`, `messages` and the response of a row that has its answers. Raises RowError."""
    answer = fields.response if fields.response is not None else fields.completion
    if isinstance(answer, str) and answer and prompt is not None:
        return prompt, None, answer
    turns = [{"role": "user", "content": prompt}] if prompt is not None else list(messages or ())
    answered_last = turns[-1] if turns and turns[-1].get("role") == "assistant" else None
    match answer:
        case str() if answer and answered_last is not None:
            if answered_last.get("content") != answer:
                raise RowError(
                    f"{where()}: 'messages' end with an answer other than the row's 'response'; leave one out"
                )
        case str() if answer:
            turns.append({"role": "assistant", "content": answer})
        case [*answered] if all(isinstance(turn, dict) for turn in answered):
            turns += answered
        case _:
            pass
    if not any(turn.get("role") == "assistant" for turn in turns):
        raise RowError(
            f"{where()}: no answer, expected 'response' or 'completion' (text or turns), 'messages' with turns of "
            "the assistant, or 'text' (a document)"
        )
    return None, turns, None


def _ground_truth(fields: _Fields) -> Any:
    match fields:
        case _Fields(ground_truth=None, reward_model={"ground_truth": of_model}):
            return of_model
        case _:
            return fields.ground_truth


def _from_text(value: Any, name: str, kind: type[Any], where: Callable[[], str]) -> Any:
    """What a text says in JSON; anything else as it is. Raises RowError."""
    if not isinstance(value, str):
        return value
    try:
        return _without_nulls(msgspec.json.decode(value, type=kind | None)) if value.strip() else None
    except (msgspec.DecodeError, UnicodeError) as error:
        expected = "a list of objects" if name != "chat_template_kwargs" else "an object"
        raise RowError(
            f"{where()}: {name!r} is a text, expected {expected} in JSON ({error}); got {_excerpt(value.encode())}"
        ) from error


def _line_without_nulls(line: bytes) -> bytes:
    """A row of JSON as a table would have it. A line that cannot be read stays, for those that say what is wrong."""
    with suppress(msgspec.DecodeError, UnicodeError, OverflowError):
        return msgspec.json.encode(_without_nulls(msgspec.json.decode(line, type=dict[str, Any])))
    return line


def _without_nulls(value: Any) -> Any:
    """Tables give every object the keys of all the others, with null: so null is the same as no key, everywhere."""
    match value:
        case dict():
            return {k: _without_nulls(v) for k, v in cast("dict[str, Any]", value).items() if v is not None}
        case list():
            return [_without_nulls(v) for v in cast("list[Any]", value)]
        case _:
            return value


def _as_json(columns: Any) -> bytes:
    """Dates and decimals become text, bytes base64, NaN null; what JSON has no form for becomes its `str`."""
    return msgspec.json.encode(columns, enc_hook=str)


def expect_known_environment(env: str, known: Collection[str], where: Callable[[], str]) -> None:
    """Raise RowError for the `env` of a row that is not an environment of the run. Empty: the row names none."""
    if not env or env in known:
        return
    near = difflib.get_close_matches(env, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise RowError(
        f"{where()}: env {env!r} is not an environment of this run, expected one of "
        f"{', '.join(sorted(known))}{hint} (others are added as actor.environments.NAME)"
    )


def _turns(messages: list[dict[str, Any]], where: Callable[[], str], answers: bool) -> tuple[dict[str, Any], ...]:
    if not messages:
        raise RowError(f"{where()}: 'messages' is empty; expected at least one turn")
    for turn in messages:
        if fault := message_fault(turn):
            raise RowError(f"{where()}: {fault}")
    if messages[-1]["role"] == "assistant" and not answers:
        raise RowError(
            f"{where()}: 'messages' end with an assistant turn, which the student would only copy; "
            "leave the answer out (its place is 'ground_truth'), or train on it (docs/prompts.md#text-that-is-there)"
        )
    return tuple(with_parsed_arguments(turn) for turn in messages)


def _as_text(ground_truth: Any) -> str | None:
    if ground_truth is None or isinstance(ground_truth, str):
        return ground_truth
    text = _as_json(ground_truth)
    return msgspec.json.decode(text, type=str | None) if text[:1] in b'"n' else text.decode()


def _no_prompt(found: Sequence[str]) -> str:
    text = f"no 'prompt' and no 'messages'; found {', '.join(map(repr, found)) or 'nothing'}"
    for name in found:
        if name in ("prompt", "messages"):
            return f"{text}, but it is null"
        if close := difflib.get_close_matches(name.lower(), ("prompt", "messages"), n=1):
            return f"{text}; rename {name!r} to {close[0]!r}?"
    return f"{text}; expected one of: 'prompt' (text), 'messages' (list of chat turns)"


def _excerpt(line: bytes, limit_bytes: int = 80) -> str:
    text = line.strip().decode("utf-8", errors="replace")
    return repr(text if len(text) <= limit_bytes else text[:limit_bytes] + "...")
