"""Writes the reference of all figures, from their declarations:  scripts/site/figures.py FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

from stillhouse.learner.reports.declared import SECTIONS

TITLE = """# All figures

The keys of `metrics.jsonl`, which are TensorBoard's tags. `<name>` stands for any part of one. s is the student's
log-prob of a sampled token, mu that under the policy that sampled it, q the teacher's, and r = exp(s - mu). Rollouts
count in the step that trains their last piece. What actors and teachers report covers the time since the step before. A
total runs over the whole run. In `metrics.jsonl` alone: `tasks_done`, the tasks that a step settled, and `set`, the
name of an evaluation set.
"""


def page() -> str:
    """Markdown: a table per section."""
    parts = [TITLE]
    for name, figures in SECTIONS.items():
        rows = [f"| `{one.tag}` | {one.meaning} | {one.unit} | {one.reduction} |" for one in figures]
        parts.append("\n".join((f"## {name}\n\n| tag | meaning | unit | of a step |\n|---|---|---|---|", *rows, "")))
    return "\n".join(parts)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.md").write_text(page(), encoding="utf-8")
