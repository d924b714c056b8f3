"""scripts/models.py finds for a sample what docs/models.md says of all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # pyright: ignore[reportUnknownMemberType]
    sys.modules.pop("models", None)
    yield import_module("models")
    sys.modules.pop("models", None)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_text", "qwen3_5_moe_text", "bloom", "bert", "whisper"])
def test_the_page_says_what_the_script_finds(script: Any, model_type: str) -> None:
    rows = [line for line in (ROOT / "docs" / "models.md").read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    said = next(line for line in rows if line.startswith(f"| {model_type} |"))
    *found, _ = script.try_model(model_type, None)
    for ours, theirs in zip(found, [cell.strip() for cell in said.split("|")][1:], strict=False):
        assert ours.split(":")[0] == theirs.split(":")[0], said


def test_every_type_of_transformers_is_on_the_page(script: Any) -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    missing = [
        name
        for name in script.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if f"| {name} |" not in page and f"`{name}` (" not in page
    ]
    assert missing == []
