"""The declared figures of the metrics (figures.toml, and those of a step), and what boards show of them. No torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

from stillhouse.learner.reports.figure import NAMED, Figure
from stillhouse.learner.reports.step_metrics import STEP_FIGURES

GROUPS: Final = ("Learning", "Staleness", "Throughput", "Waits", "Teachers", "Environments")
"""Groups of charts, in order."""
_ENDINGS: Final = {"_tokens_per_s": "tokens per second", "_s": "seconds", "_bytes": "bytes", "_total": "total"}
"""Units of figures without a declared one, by the ends of their names."""


def _read() -> dict[str, tuple[Figure, ...]]:
    text = Path(__file__).with_name("figures.toml").read_text(encoding="utf-8")
    tables: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(text)
    sections = {name: tuple(Figure(tag, **said) for tag, said in own.items()) for name, own in tables.items()}
    return {"The step": (*STEP_FIGURES, *sections.pop("The step")), **sections}


SECTIONS: Final = _read()
"""By the heading of the reference."""
DECLARED: Final = {one.tag: one for section in SECTIONS.values() for one in section}
_PATTERNS: Final = [
    (re.compile(one.pattern), one)
    for one in sorted(DECLARED.values(), key=lambda one: -len(NAMED.sub("", one.tag)))
    if NAMED.search(one.tag)
]
"""The most specific first."""


def declaration_of(tag: str) -> Figure | None:
    """None for a tag that is not declared."""
    return DECLARED.get(tag) or next((one for pattern, one in _PATTERNS if pattern.fullmatch(tag)), None)


def meaning_of(tag: str) -> str:
    """Empty for a tag that is not declared."""
    declared = declaration_of(tag)
    return "" if declared is None else declared.meaning


def title_of(tag: str) -> str:
    """Title of a chart, without the first part of the tag, which is its section: `step, seconds` for time/step_s."""
    name, declared = tag.partition("/")[2] or tag, declaration_of(tag)
    ending = next((ending for ending in _ENDINGS if name.endswith(ending)), "")
    unit = declared.unit if declared is not None and declared.unit else _ENDINGS.get(ending, "")
    words = name.removesuffix(ending).replace("_", " ").replace("/", ": ")
    return f"{words}, {unit}" if unit else words


def charts() -> dict[str, dict[str, list[str]]]:
    """Group -> title -> regular expressions of its tags."""
    found: dict[str, dict[str, list[str]]] = {group: {} for group in GROUPS}
    for one in DECLARED.values():
        if one.chart is not None:
            group, title = one.chart
            found[group].setdefault(title, []).append(one.shown or one.pattern)
    return found
