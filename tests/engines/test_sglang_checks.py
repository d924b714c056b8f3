"""What servers say about their weights, compared."""

from __future__ import annotations

from engines.sglang_checks import compare, differences, parse_checksums


def test_a_reply_gives_the_checksums_of_each_rank() -> None:
    reply = b'{"success":true,"ranks":[{"checksums":{"a":"1"},"per_gpu_checksum":"x"},{"checksums":{"a":"2"}}]}'
    assert parse_checksums(reply) == [{"a": "1"}, {"a": "2"}]


def test_a_reply_without_checksums_is_none() -> None:
    assert parse_checksums(b'{"success":true,"message":"Success."}') is None
    assert parse_checksums(b"not json") is None


def test_wrong_ones_and_those_that_nobody_foretold_are_told_apart() -> None:
    found = compare([{"a": "1", "b": "2", "c": "3"}], {"a": ("1",), "b": ("8", "9"), "d": ("4",)})
    assert (found.wrong, found.unchecked) == (["b"], ["c"])


def test_any_of_the_foretold_is_right() -> None:
    assert compare([{"a": "2"}], {"a": ("1", "2")}).wrong == []


def test_differences_are_found_rank_by_rank() -> None:
    assert differences([{"a": "1"}, {"b": "1"}], [{"a": "1"}, {"b": "2", "c": "3"}]) == ["b", "c"]
    assert differences([{"a": "1"}], [{"a": "1"}]) == []
    assert differences([{"a": "1"}], []) == ["1 ranks, then 0"]
