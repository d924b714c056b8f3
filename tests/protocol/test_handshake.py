"""Fingerprints of vocabularies, which a Hello carries."""

from __future__ import annotations

import pytest

from stillhouse.protocol.handshake import vocab_fingerprint


def test_order_of_the_map_does_not_matter() -> None:
    assert vocab_fingerprint({"a": 0, "b": 1}) == vocab_fingerprint({"b": 1, "a": 0})


def test_same_size_with_swapped_ids_differs() -> None:
    assert vocab_fingerprint({"a": 0, "b": 1}) != vocab_fingerprint({"a": 1, "b": 0})


def test_an_added_token_differs() -> None:
    assert vocab_fingerprint({"a": 0, "b": 1}) != vocab_fingerprint({"a": 0, "b": 1, "<pad>": 2})


def test_tokens_that_look_like_the_separator_are_told_apart() -> None:
    assert vocab_fingerprint({"x1:1:y": 0}) != vocab_fingerprint({"x": 0, "y": 1})


def test_lone_surrogates_are_allowed() -> None:
    assert vocab_fingerprint({"\ud800": 0}) != vocab_fingerprint({"\ud801": 0})


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="empty vocabulary"):
        vocab_fingerprint({})
