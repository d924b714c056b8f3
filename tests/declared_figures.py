"""Which figures of a run are not declared. Shares nothing with the code that computes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from stillhouse.learner.reports.declared import declaration_of

PLACE: Final = {"kind", "step", "epoch", "unix_s", "staleness", "parent_epoch", "torn_bytes", "tasks_done", "set"}
"""What every line has to say where it belongs, and what is no figure."""


def undeclared(tags: Iterable[str]) -> list[str]:
    return sorted({tag for tag in tags if declaration_of(tag) is None and tag not in PLACE})


def tags_of(run_dir: Path) -> set[str]:
    """A line that a killed learner did not finish is left out."""
    lines = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]
    return {key for line in lines for key in json.loads(line)}
