"""The reward `code`: the program in a response is run on the test cases of its row, in a sandbox.

ROLL's rows are read as they are (roll/pipeline/rlvr/rewards/code_sandbox_reward_worker.py): `test_cases`, a list or its
JSON, of {"assert_code": ...} or of {"stdin": ..., "expected_stdout": ...}; `case_type` says which kind they are."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import signal
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from stillhouse.actors.rewards.base import Answered, Reward, Verdict, unscored
from stillhouse.actors.rewards.code_link import UNJUDGEABLE
from stillhouse.actors.sandbox.sandbox import MAX_TEXT, Ran, Sandbox, make_sandbox

_OPENS: Final = re.compile(r"^[ \t]*```(?:python3?|py)?[ \t]*$", re.MULTILINE | re.IGNORECASE)
_CLOSES: Final = re.compile(r"^[ \t]*```[ \t]*$", re.MULTILINE)
_LINK: Final = (Path(__file__).parent / "code_link.py").read_text(encoding="utf-8")
_UNSCORED: Final = ("lost", "busy")
ROLL_COLUMN: Final = "test_cases"
ROLL_KINDS: Final = ("", "assert", "pytest", "input")
"""The values of `case_type` that can be judged. `text` runs code that has the response in it, and `check_based` calls a
function of another column."""
_TEST: Final = re.compile(r"^def (test_\w+)\(\s*\)", re.MULTILINE)


class _Cases(NamedTuple):
    """The test cases of one row."""

    pairs: tuple[tuple[str, str], ...]
    """Input and expected output of a program."""
    statements: tuple[str, ...]
    """Python that runs behind the program and raises where it is wrong."""


def code_reward(
    column: str = "tests",
    time_limit_s: float = 10.0,
    memory_mb: int = 512,
    isolation: str = "bubblewrap",
    python: str = "",
) -> Reward:
    """1.0 if the last block of Python in the response passes all test cases of its row. They are in `column`:
    {"inputs": [...], "outputs": [...]}, texts for standard input and output, or a list of statements such as
    "assert add(1, 2) == 3"; where a row has none there, in ROLL's `test_cases`. `time_limit_s`: most seconds of
    computing, all cases together. The others are those of the environment `sandbox`."""
    if not (isinstance(column, str) and column):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"column: got {column!r}, expected the name of a column")
    make = make_sandbox(isolation, python, time_limit_s=time_limit_s, memory_mb=memory_mb)

    async def judged(answered: Answered) -> Verdict:
        cases = cases_of(answered.row, column)
        if not isinstance(cases, _Cases):
            return unscored("tests_unreadable" if cases else "no_tests")
        program = last_program(answered.response)
        if program is None:
            return Verdict(0.0, {"code_missing": 1.0})
        if len(program) > MAX_TEXT // 4:
            return Verdict(0.0, {"code_long": 1.0})
        return await _verdict(make, program, cases, time_limit_s)

    return judged


def why_unreadable(answered: Answered, *, column: str = "tests", python: str = "", **_: Any) -> str:
    """Why the test cases of a row could never be judged; empty: they can, or it has none."""
    cases = cases_of(answered.row, column)
    if not isinstance(cases, _Cases):
        return cases
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse("" if python else "\n".join(cases.statements))  # another Python may know more
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"its test statements are no Python: {error}"
    return ""


code_reward.why_unreadable = why_unreadable  # pyright: ignore[reportFunctionMemberAccess]


def cases_of(row: Mapping[str, Any], column: str) -> _Cases | str:
    """The test cases of a row, or why they cannot be read; empty: it has none."""
    if row.get(column) is not None:
        cases, name = read_cases(row[column]), column
    elif row.get(ROLL_COLUMN) is not None:
        if (kind := row.get("case_type") or "") not in ROLL_KINDS:
            return f"case_type: got {kind!r:.60}, expected one of {', '.join(filter(None, ROLL_KINDS))}"
        cases, name = read_roll_cases(row[ROLL_COLUMN]), ROLL_COLUMN
    else:
        return ""
    if cases is not None:
        return cases
    return (
        f"{name}: got {row[name]!r:.80}, expected inputs and outputs of one length or statements, as texts of at most "
        f"{MAX_TEXT // 4} characters each (docs/rewards.md)"
    )


def read_roll_cases(column: object) -> _Cases | None:
    """ROLL's `test_cases`. Functions test_... of an `assert_code` are called, as by its own worker."""
    try:
        cases: object = json.loads(column) if isinstance(column, str) else column
    except (ValueError, RecursionError):
        return None
    if not isinstance(cases, list) or not all(isinstance(one, Mapping) for one in cast("list[Any]", cases)):
        return None
    rows = cast("list[Mapping[str, Any]]", cases)
    if all("assert_code" in one for one in rows):
        return read_cases([_with_calls(one["assert_code"]) for one in rows])
    if all(one.keys() >= {"stdin", "expected_stdout"} for one in rows):
        return read_cases(
            {"inputs": [one["stdin"] for one in rows], "outputs": [one["expected_stdout"] for one in rows]}
        )
    return None


def _with_calls(code: Any) -> Any:
    return "\n".join([code, *(f"{name}()" for name in _TEST.findall(code))]) if isinstance(code, str) else code


def last_program(response: str) -> str | None:
    """The last block between ``` and ```, of Python or of no language that is named."""
    found: str | None = None
    at = 0
    while opens := _OPENS.search(response, at):
        closes = _CLOSES.search(response, opens.end())
        if closes is None:
            break
        found, at = response[opens.end() + 1 : closes.start()], closes.end()
    return found


def read_cases(column: object) -> _Cases | None:
    """None: nothing that can be read, or too large."""
    pairs: tuple[tuple[str, str], ...] = ()
    statements: tuple[str, ...] = ()
    match column:
        case {"inputs": list(), "outputs": list()}:
            given = cast(Mapping[str, list[Any]], column)
            if len(given["inputs"]) != len(given["outputs"]):
                return None
            pairs = tuple(zip(given["inputs"], given["outputs"], strict=True))
        case list():
            statements = tuple(cast("list[Any]", column))
        case _:
            return None
    texts = [*statements, *(text for pair in pairs for text in pair)]
    if sum(len(text) for text in statements if isinstance(text, str)) > MAX_TEXT // 2:  # pyright: ignore[reportUnnecessaryIsInstance]
        return None  # with the program they are one text
    if not texts or not all(isinstance(text, str) and len(text) < MAX_TEXT // 4 for text in texts):  # pyright: ignore[reportUnnecessaryIsInstance]
        return None
    return _Cases(pairs, statements)


async def _verdict(make: Callable[[], Sandbox], program: str, cases: _Cases, time_limit_s: float) -> Verdict:
    """By the first case that failed."""
    if cases.statements:
        return await _by_statements(make, program, "\n".join(cases.statements), time_limit_s)
    left_s = time_limit_s
    async with make() as sandbox:
        for given, expected in cases.pairs:
            most = 4 * len(expected) + 64 * 1024
            ran = await sandbox.python(program, given, cell=False, time_limit_s=left_s, most=most)
            if (fault := _fault(ran)) is not None:
                return fault
            if ran.omitted or _lines(ran.stdout) != _lines(expected):
                return _failed("wrong")
            left_s -= ran.cpu_s
            if left_s <= 0:
                return _failed("time")
    return Verdict(1.0)


async def _by_statements(make: Callable[[], Sandbox], program: str, statements: str, time_limit_s: float) -> Verdict:
    """The program in one sandbox, the statements in another; they call it over two pipes (`code_link`)."""
    calls, results = os.pipe(), os.pipe()
    async with make() as running, make() as judging:
        running.link, judging.link = (calls[0], results[1]), (results[0], calls[1])
        try:
            await asyncio.gather(running.begin(), judging.begin())
        finally:
            for fd in (*calls, *results):
                os.close(fd)
        options: Any = {"cell": False, "time_limit_s": time_limit_s}
        ran, judged = await asyncio.gather(
            running.python(f"{_LINK}\nserve()", program, **options),
            judging.python(f"{_LINK}\njudge()", statements, takes_slot=False, **options),
        )
    if judged.code == UNJUDGEABLE:
        return unscored("tests_compare_objects")
    if (fault := _fault(ran)) is not None:
        return fault
    if judged.ended in _UNSCORED or judged.code == -signal.SIGKILL:
        return unscored("sandbox_lost")
    return Verdict(1.0) if judged.ended == "exit" and judged.code == 0 else _failed("wrong")


def _fault(ran: Ran) -> Verdict | None:
    """What a call that did not end well means. One that was killed from outside, or got no processor, says nothing."""
    if ran.ended in _UNSCORED or ran.code == -signal.SIGKILL:
        return unscored("sandbox_busy" if ran.ended == "busy" else "sandbox_lost")
    if ran.ended != "exit":
        return _failed(ran.ended)
    return _failed("error") if ran.code else None


def _failed(how: str) -> Verdict:
    return Verdict(0.0, {f"code_{how}": 1.0})


def _lines(output: str) -> list[str]:
    """Without what nobody sees: spaces at the ends of lines, empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().split("\n")]
