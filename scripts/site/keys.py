"""Writes the reference of all keys, from the docstrings of the configuration:  scripts/site/keys.py FOLDER"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from stillhouse.launch.config.help import EVERYTHING, help_text
from stillhouse.launch.config.keys import sections_of
from stillhouse.launch.config.run import RunConfig

TITLE = """# Keys

What `stillhouse --help all` prints, by section. Each key is a flag, and a line of a TOML or YAML file:
`--learner.lr 1e-5`, or `lr = 1e-5` in the section `[learner]`.
"""


def page() -> str:
    """Markdown: a heading per section, its purpose, and its keys as the help prints them."""
    documents = {name: inspect.getdoc(section) or "" for name, section in sections_of(RunConfig)}
    keys: dict[str, list[str]] = {}
    section = None
    for line in help_text([EVERYTHING]).splitlines():
        name = line.removesuffix(":")
        if line.endswith(":") and (name == "run" or name in documents):
            section = name
        elif section is not None and line.startswith(("  --", "      ")):
            keys.setdefault(section, []).append(line)
    parts = [TITLE]
    for name in sorted(keys, key=lambda name: (name != "run", name)):
        listed = "\n".join(keys[name])
        parts.append(f"## {name}\n\n{documents.get(name, '')}\n\n```text\n{listed}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "keys.md").write_text(page(), encoding="utf-8")
