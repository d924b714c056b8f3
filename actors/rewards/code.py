"""The reward `code`: the program in a response is run on the test cases of its row, in a sandbox."""

from __future__ import annotations

import asyncio
import os
import re
import signal
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
    "assert add(1, 2) == 3". `time_limit_s`: most seconds of computing, all cases together. The others are those of the
    environment `sandbox`."""
    if not (isinstance(column, str) and column):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"column: got {column!r}, expected the name of a column")
    make = make_sandbox(isolation, python, time_limit_s=time_limit_s, memory_mb=memory_mb)

    async def judged(answered: Answered) -> Verdict:
        if answered.row.get(column) is None:
            return unscored("no_tests")
        cases = read_cases(answered.row[column])
        if cases is None:
            return unscored("tests_unreadable")
        program = last_program(answered.response)
        if program is None:
            return Verdict(0.0, {"code_missing": 1.0})
        if len(program) > MAX_TEXT // 4:
            return Verdict(0.0, {"code_long": 1.0})
        return await _verdict(make, program, cases, time_limit_s)

    return judged


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
