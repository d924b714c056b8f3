"""The generated pages of the site (`make docs`). Its links are checked when it is built, which CI does."""

from __future__ import annotations

import pkgutil
import re
import runpy
from pathlib import Path

from stillhouse.launch.config.keys import keys_of
from stillhouse.launch.config.run import RunConfig

ROOT = Path(__file__).parent.parent


def test_the_reference_of_keys_has_every_key_once_with_its_help() -> None:
    page: str = runpy.run_path(str(ROOT / "scripts" / "site" / "keys.py"))["page"]()
    listed = re.findall(r"^  --([\w.]+)", page, re.MULTILINE)
    expected = {key.name for key in keys_of(RunConfig)}
    assert expected <= set(listed)
    assert {name for name in listed if listed.count(name) > 1} == set()
    assert "Optimizer steps; the run ends after them." in page


def test_every_name_of_the_references_is_there() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    names = [name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE)]
    assert len(names) > 30
    assert [name for name in names if pkgutil.resolve_name(name) is None] == []  # raises for one that is not there
