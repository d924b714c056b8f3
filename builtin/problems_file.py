"""The problem files: JSON lines with prompt, ground_truth and tag. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from builtin.addition import Chain, Problem, parse_prompt


def write_problems(path: Path, tasks: Iterable[Problem | Chain]) -> None:
    """One JSON object a line."""
    rows = ({"prompt": task.prompt, "ground_truth": str(task.answer), "tag": task.tag} for task in tasks)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_problems(path: Path) -> list[Problem | Chain]:
    """Raises ValueError naming the line when a prompt is none of the built-in task's."""
    tasks: list[Problem | Chain] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            tasks.append(parse_prompt(json.loads(line)["prompt"]))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path} line {number}: {error}") from error
    return tasks
