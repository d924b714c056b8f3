"""Files under examples/ are configurations of today's keys that fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

import builtin
from launch.command_line import parse_arguments, resolve_config
from launch.consistency import check_consistency

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.toml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_accepted(file: Path) -> None:
    config = resolve_config(parse_arguments(["--config", str(file)]))
    assert check_consistency(config, builtin.STUDENT_DIR).mistakes == []


def test_there_are_examples() -> None:
    assert {"demo", "lora"} <= {file.stem for file in EXAMPLES}
