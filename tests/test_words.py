"""Docstrings of the product read like sentences: they say what a thing is or does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = (
    *("actors", "buffer", "builtin", "engines", "launch", "learner", "models", "protocol", "recording", "replay"),
    *("sglang_server", "teachers", "tools", "tracing", "weights"),
)
NO_BEGINNING = re.compile(r"(Of|Who|Whom|Whose|By how much|So many|Told)\b")
"""A docstring that begins like this leaves out its subject."""
NO_NAMES = {"told"}


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those of attributes included."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    yield statement.lineno, text.strip()
                case _:
                    pass


PERHAPS = re.compile(rf"""^ *r?(\"\"\"|'|")\s*{NO_BEGINNING.pattern}|\b({"|".join(NO_NAMES)})\b""", re.M)
"""Only sources that match are taken apart."""


def faults(source: str) -> list[str]:
    if not PERHAPS.search(source):
        return []
    tree = ast.parse(source)
    found = [f"{line}: {text[:60]!r}" for line, text in docstrings(tree) if NO_BEGINNING.match(text)]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return found + [f"a variable is named {name}" for name in sorted(names & NO_NAMES)]


def test_docstrings_say_what_a_thing_is_or_does() -> None:
    assert faults('"""Of the run."""\ntold = 1') == ["1: 'Of the run.'", "a variable is named told"]
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    assert len(files) > 200
    assert {str(file.relative_to(ROOT)): found for file in files if (found := faults(file.read_text()))} == {}
