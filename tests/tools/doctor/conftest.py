"""Examining in this process, without the launcher's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stillhouse import builtin
from stillhouse.launch.checks.finding import Finding
from stillhouse.launch.config.command_line import parse_arguments
from stillhouse.tools.doctor.case import ModelCase
from stillhouse.tools.doctor.examiner import findings
from stillhouse.tools.doctor.table import CHECKS

Examine = Callable[..., list[Finding]]
ENGINES = "tests.tools.doctor.faulty_engines"


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows of the built-in prompts, not all 8,448 each time."""
    monkeypatch.setattr("stillhouse.launch.checks.check_command.ROWS_READ", 300)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Callable[..., ModelCase]]:
    """`case(*arguments)`: the run of a command line."""
    made: list[ModelCase] = []

    def make(*arguments: str) -> ModelCase:
        scratch = tmp_path / f"scratch-{len(made)}"
        scratch.mkdir()
        line = parse_arguments([f"--run-dir={tmp_path / 'run'}", "--device=cpu", *arguments])
        made.append(ModelCase.of(line, scratch))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def examine(case: Callable[..., ModelCase]) -> Examine:
    """`examine("disk", *arguments)`: what that check reports."""

    def run(name: str, *arguments: str) -> list[Finding]:
        check = next(check for check in CHECKS if check.name == name)
        return list(findings(check, case(*arguments)))

    return run


def of(found: list[Finding], subject: str) -> Finding:
    """The finding about this subject."""
    return next(finding for finding in found if finding.subject == subject)


@pytest.fixture
def student(tmp_path: Path) -> Path:
    """A copy of the built-in student, to be spoilt."""
    return Path(shutil.copytree(builtin.STUDENT_DIR, tmp_path / "student"))


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """A copy of the built-in teacher, to be spoilt."""
    return Path(shutil.copytree(builtin.TEACHER_DIR, tmp_path / "teacher"))
