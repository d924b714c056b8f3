"""Which figures of a run docs/metrics.md does not explain. Shares nothing with the code that writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[1] / "docs" / "metrics.md"
PLACE: Final = {"kind", "step", "epoch", "unix_s", "staleness", "parent_epoch", "torn_bytes"}
"""What every line has to say where it belongs."""


def unexplained(tags: Iterable[str]) -> list[str]:
    """`<name>` of the page stands for anything."""
    known = [
        re.compile(re.sub(r"<\w+>", ".+", re.escape(tag).replace(r"\<", "<").replace(r"\>", ">")))
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `")
        for tag in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    ]
    return sorted({tag for tag in tags if not any(pattern.fullmatch(tag) for pattern in known)})


def tags_of(run_dir: Path) -> set[str]:
    """A line that a killed learner did not finish is left out."""
    lines = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]
    rows = [json.loads(line) for line in lines]
    return {key for row in rows for key in row} - PLACE
