"""The problem files: JSON lines with prompt, ground_truth and tag. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from builtin.addition import Operator, Problem

TAGS: dict[Operator, str] = {"+": "addition", "*": "multiplication"}
_PROMPT = re.compile(r"(\d+)([+*])(\d+)=")


def write_problems(path: Path, tasks: Iterable[Problem]) -> None:
    """One JSON object a line."""
    rows = ({"prompt": p.prompt, "ground_truth": str(p.answer), "tag": TAGS[p.operator]} for p in tasks)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_problems(path: Path) -> list[Problem]:
    """Raises ValueError naming the line when a prompt is not `a+b=` or `a*b=`."""
    tasks: list[Problem] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = _PROMPT.fullmatch(json.loads(line)["prompt"])
        if match is None:
            raise ValueError(f"{path} line {number}: expected a prompt like 12+34= or 12*3=, got {line}")
        left, operator, right = match.groups()
        tasks.append(Problem(int(left), int(right), "+" if operator == "+" else "*"))
    return tasks
