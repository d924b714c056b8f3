"""How many token ids a model knows, read from its config.json. No torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast


def vocabulary_size(model_path: str | Path) -> int:
    """Rows of a checkpoint's embedding: every token id is below it. Raises ValueError where config.json does not say.

    A model of several parts (vision and text) has it in `text_config`, which counts more than a number at the top: the
    text model's is the embedding that token ids look up."""
    path = Path(model_path) / "config.json"
    try:
        told: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}; expected the config.json of a checkpoint folder") from error
    if isinstance(told, Mapping):
        config = cast(Mapping[str, object], told)
        nested = config.get("text_config")
        for section in (nested, config):
            size = cast(Mapping[str, object], section).get("vocab_size") if isinstance(section, Mapping) else None
            if isinstance(size, int) and not isinstance(size, bool):
                return size
    raise ValueError(f"{path} has no vocab_size; expected one at its top or in text_config")


def known_vocabulary_size(model_path: str | Path | None) -> int | None:
    """The same; None where there is no model, or its config.json does not say."""
    try:
        return None if model_path is None else vocabulary_size(model_path)
    except ValueError:
        return None
