"""Problems of the built-in task, their worked solutions, and the problem files. No torch.

A solution is column addition with a written scratchpad, in one of three styles:

    prompt      8293+4758=
    compact     3+8+0=11;9+5+1=15;2+7+1=10;8+4+1=13 #13051
    spoken      Add 3 and 8 carry 0 makes 11, then 9 and 5 carry 1 makes 15, ... #13051
    columns     Columns 3,8 9,5 2,7 8,4 sums 11 15 10 13 #13051

Multiplication by one digit is the second domain (`8293*4=`), in the same styles. In the calculator variant
(`calc: 12+34+56=`) the model calls a tool and the environment answers: see `calculator_solution`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, TypeVar

Operator: TypeAlias = Literal["+", "*"]
Task = TypeVar("Task", bound=Hashable)

ANSWER_PATTERN = re.compile(r"#\s*(-?\d+)")
_PROMPT = re.compile(r"(\d+)([+*])(\d+)=")
_CHAIN_PROMPT = re.compile(r"calc: (\d+(?:\+\d+)+)=")
CALC_OPEN, CALC_CLOSE = "<calc>", "</calc>"
RESULT_OPEN, RESULT_CLOSE = "<result>", "</result>"
TOOL_TAGS = (CALC_OPEN, CALC_CLOSE, RESULT_OPEN, RESULT_CLOSE)
"""Each is one token of the built-in tokenizer."""


@dataclass(frozen=True, slots=True)
class Problem:
    """`left operator right`. For "*", `right` is one digit."""

    left: int
    right: int
    operator: Operator = "+"

    @property
    def prompt(self) -> str:
        return f"{self.left}{self.operator}{self.right}="

    @property
    def tag(self) -> str:
        """Domain, as in the problem files."""
        return "addition" if self.operator == "+" else "multiplication"

    @property
    def answer(self) -> int:
        return self.left + self.right if self.operator == "+" else self.left * self.right


@dataclass(frozen=True, slots=True)
class Chain:
    """A sum of two or more numbers, computed with the calculator, one `+` per call."""

    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return f"calc: {'+'.join(map(str, self.terms))}="

    @property
    def tag(self) -> str:
        return "calculator"

    @property
    def answer(self) -> int:
        return sum(self.terms)


class Column(NamedTuple):
    """One column of the sum or product, lowest digit first. `total` includes the incoming carry."""

    left: int
    right: int
    carry: int
    total: int


class TextPiece(NamedTuple):
    """A part of an episode, written by the model or by the environment."""

    text: str
    by_model: bool


def problems(
    seed: int, *, operator: Operator = "+", digits: tuple[int, int] = (2, 5), exclude: Collection[Problem] = ()
) -> Iterator[Problem]:
    """Endless stream of problems. The number of digits is uniform in [lo, hi], and the same for both numbers of a sum.
    The same arguments give the same stream. Raises ValueError unless 1 <= lo <= hi."""
    lo, hi = digits
    if not 1 <= lo <= hi:
        raise ValueError(f"digits must be (lo, hi) with 1 <= lo <= hi, got {digits}")
    rng = random.Random(seed)
    while True:
        n = rng.randint(lo, hi)
        left = rng.randrange(10 ** (n - 1), 10**n)
        right = rng.randrange(10 ** (n - 1), 10**n) if operator == "+" else rng.randint(2, 9)
        problem = Problem(left, right, operator)
        if problem not in exclude:
            yield problem


def distinct(stream: Iterator[Task], count: int) -> list[Task]:
    """The first `count` distinct tasks, in the order of the stream. Raises ValueError if the stream has too few (e.g.
    10,000 problems of 1 digit)."""
    found: dict[Task, None] = {}
    for drawn, task in enumerate(stream):
        found[task] = None
        if len(found) == count:
            return list(found)
        if drawn > 20 * count + 1_000:
            break
    raise ValueError(
        f"found {len(found)} distinct problems where {count} are needed: allow more digits, or fewer problems"
    )


def chains(
    seed: int, *, terms: tuple[int, int] = (2, 3), digits: tuple[int, int] = (2, 3), exclude: Collection[Chain] = ()
) -> Iterator[Chain]:
    """Endless stream of calculator problems; each number has its own length, uniform in `digits`."""
    rng = random.Random(seed)
    while True:
        lengths = [rng.randint(*digits) for _ in range(rng.randint(*terms))]
        chain = Chain(tuple(rng.randrange(10 ** (n - 1), 10**n) for n in lengths))
        if chain not in exclude:
            yield chain


def parse_prompt(prompt: str) -> Problem | Chain:
    """Parse a prompt. Raises ValueError for other text."""
    if match := _PROMPT.fullmatch(prompt):
        left, operator, right = match.groups()
        return Problem(int(left), int(right), "+" if operator == "+" else "*")
    if match := _CHAIN_PROMPT.fullmatch(prompt):
        return Chain(tuple(map(int, match.group(1).split("+"))))
    raise ValueError(f"expected a prompt like 12+34=, 12*3= or calc: 1+2+3=, got {prompt!r}")


def columns_of(problem: Problem) -> list[Column]:
    """The columns, lowest digit first. The last column's total includes the final carry."""
    lefts = [int(d) for d in reversed(str(problem.left))]
    rights = [int(d) for d in reversed(str(problem.right))]
    if problem.operator == "*":
        rights = [problem.right] * len(lefts)
    width = max(len(lefts), len(rights))
    carry = 0
    columns: list[Column] = []
    for i in range(width):
        left = lefts[i] if i < len(lefts) else 0
        right = rights[i] if i < len(rights) else 0
        total = (left + right if problem.operator == "+" else left * right) + carry
        columns.append(Column(left, right, carry, total))
        carry = total // 10
    return columns


def _compact(problem: Problem) -> str:
    return ";".join(f"{c.left}{problem.operator}{c.right}+{c.carry}={c.total}" for c in columns_of(problem))


def _spoken(problem: Problem) -> str:
    verb, joint = ("Add", "and") if problem.operator == "+" else ("Multiply", "by")
    steps = [f"{c.left} {joint} {c.right} carry {c.carry} makes {c.total}" for c in columns_of(problem)]
    return f"{verb} " + ", then ".join(steps)


def _columns(problem: Problem) -> str:
    columns = columns_of(problem)
    pairs = " ".join(f"{c.left},{c.right}" for c in columns)
    totals = " ".join(str(c.total) for c in columns)
    return f"Columns {pairs} {'sums' if problem.operator == '+' else 'products'} {totals}"


STYLES: dict[str, Callable[[Problem], str]] = {"compact": _compact, "spoken": _spoken, "columns": _columns}
"""Styles of the scratchpad; the answer after `#` is the same in all."""


def solution(problem: Problem, style: str = "compact") -> str:
    """The scratchpad in `style`, then ` #answer`. Raises ValueError for an unknown style."""
    if style not in STYLES:
        raise ValueError(f"unknown style {style!r}, expected one of {', '.join(STYLES)}")
    return f"{STYLES[style](problem)} #{problem.answer}"


def calculator_solution(chain: Chain) -> list[TextPiece]:
    """The episode of a `calc:` problem: one call per `+`, each answered by the environment, then the answer."""
    pieces: list[TextPiece] = []
    total = chain.terms[0]
    for term in chain.terms[1:]:
        pieces.append(TextPiece(f"{CALC_OPEN}{total}+{term}{CALC_CLOSE}", by_model=True))
        total += term
        pieces.append(TextPiece(f"{RESULT_OPEN}{total}{RESULT_CLOSE}", by_model=False))
    pieces.append(TextPiece(f" #{total}", by_model=True))
    return pieces


def written_answer(text: str) -> int | None:
    """The last `#number` in the text, or None."""
    found = ANSWER_PATTERN.findall(text)
    return int(found[-1]) if found else None


def is_correct(text: str, problem: Problem | Chain) -> bool:
    """Whether the last `#number` in the text is exactly the answer."""
    return written_answer(text) == problem.answer


def write_problems(path: Path, tasks: Iterable[Problem | Chain]) -> None:
    """Write JSON lines with prompt, ground_truth and tag."""
    rows = ({"prompt": task.prompt, "ground_truth": str(task.answer), "tag": task.tag} for task in tasks)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_problems(path: Path) -> list[Problem | Chain]:
    """Read a file of `write_problems`. Raises ValueError with the line number if a prompt is not of the built-in
    task."""
    tasks: list[Problem | Chain] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            tasks.append(parse_prompt(json.loads(line)["prompt"]))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path} line {number}: {error}") from error
    return tasks
