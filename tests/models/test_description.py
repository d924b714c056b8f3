"""How many ids a model knows, by its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stillhouse.models.description import known_vocabulary_size, vocabulary_size


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({"vocab_size": 512}, 512),
        ({"text_config": {"vocab_size": 640}}, 640),
        ({"vocab_size": 32_000, "text_config": {"vocab_size": 32_064}}, 32_064),  # the text model's embedding
        ({"vocab_size": 512, "text_config": {}}, 512),
        ({"vocab_size": 512, "text_config": None}, 512),
    ],
)
def test_the_text_models_rows_count(tmp_path: Path, config: dict[str, Any], rows: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocabulary_size(tmp_path) == known_vocabulary_size(tmp_path) == rows


@pytest.mark.parametrize("text", ["{}", "[]", '{"vocab_size": "many"}', "{", None])
def test_one_that_does_not_say(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert known_vocabulary_size(tmp_path) is None
    with pytest.raises(ValueError, match=r"config\.json"):
        vocabulary_size(tmp_path)
