"""Files beside the code that nothing here runs fit what they name: the image, and the hooks of pre-commit."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_image_copies_what_is_there_and_installs_extras_that_there_are() -> None:
    lines = re.sub(r"\\\n", " ", (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")).splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied and [name for name in copied if not (ROOT / name).exists()] == []
    linked = {link.name for link in (ROOT / "src" / "stillhouse").iterdir() if link.is_symlink()}
    assert linked - set(copied) == set(), "parts of the package that the image lacks"
    (install,) = [line for line in lines if line.startswith("RUN ") and "pip install" in line]
    extras = re.findall(r"\.\[([\w,-]+)\]", install)[0].split(",")
    assert set(extras) <= PROJECT["optional-dependencies"].keys()
    assert PROJECT["readme"] in copied and set(PROJECT["license-files"]) <= set(copied), "hatchling reads them"


def test_the_hooks_have_the_version_of_ruff_that_make_installs() -> None:
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert f"ruff=={hooks['rev'].removeprefix('v')}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert {hook["id"] for hook in hooks["hooks"]} == {"ruff-check", "ruff-format"}
