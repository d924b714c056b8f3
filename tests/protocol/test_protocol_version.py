"""Peers of different releases are told apart by PROTOCOL_VERSION, so it has to change whenever the messages do."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, get_args

import msgspec

from stillhouse.protocol import messages

SCHEMA_OF_VERSION = {
    3: "d354f50f43b2ed1e",
    4: "d04a45ab42c0ce25",
    5: "6e060de32058cbdf",
    6: "15307d86316864d6",
    7: "2a3a6a3da88a82b7",
    8: "701c5c6c41c13ba7",
    9: "ea6a4f6b17bb1a28",
    10: "1d0de4153b379bc9",
    11: "f7a3d464a07babb5",
    12: "b5c5f81d57c15962",
    13: "30f008428f0f52ac",
    15: "e05d739403f228b7",
    16: "d02d6899c5b0cf08",
    17: "465c02c8c112d01b",
    18: "58bf99548056ce50",  # top-k payloads and sets in planes of bits; SegmentsWanted
    19: "528120db4921ffff",  # Snapshot without intake_trouble: a full disk no longer stops intake alone
    20: "f65e7312c1ebb0c4",  # Sampling has min_p and kept; WeightPlan with backend ipc
    21: "6b03ab30ea022e10",  # Sampling and Segment have experts
    22: "8422ea3ce72171d4",  # Sampling has teacher_share
    23: "475d98abc86ec62b",  # rounds on the weight control channel without a version that differences start from
    24: "bbb0eaf12d8ce5dd",  # WeightPlan without backend folder; rounds without a file to load
}


def without_words(schema: Any) -> Any:
    """Docstrings say nothing of the bytes."""
    if isinstance(schema, dict):
        return {key: without_words(value) for key, value in schema.items() if key != "description"}
    return [without_words(value) for value in schema] if isinstance(schema, list) else schema


def test_the_changelog_names_the_version_that_is_spoken() -> None:
    text = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert set(re.findall(r"[Pp]rotocol version (\d+)", text)) == {str(messages.PROTOCOL_VERSION)}


def test_other_messages_have_another_version() -> None:
    _, schemas = msgspec.json.schema_components(get_args(messages.Message))
    digest = hashlib.sha256(json.dumps(without_words(schemas), sort_keys=True).encode()).hexdigest()[:16]
    assert SCHEMA_OF_VERSION.get(messages.PROTOCOL_VERSION) == digest, (
        f"the messages changed (now {digest}): raise messages.PROTOCOL_VERSION, and note the new pair here"
    )
