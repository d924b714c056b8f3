"""Payloads of the student's likeliest ids against a slow encoder, and bytes that are no payload."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.protocol.codec import decode, encode
from stillhouse.protocol.errors import EncodeError, MalformedMessage
from stillhouse.protocol.messages import ScoreItem, ScoreWork, Segment
from stillhouse.protocol.payloads.student_sets import HEADER_BYTES, check_top_ids, decode_top_ids, encode_top_ids
from stillhouse.protocol.topk_layout import MAX_TOKENS_KEPT
from tests.protocol.slow_planes import slow_pack

SETS = st.lists(st.lists(st.integers(0, 200_000), min_size=1, max_size=20, unique=True), max_size=12)


def arrays(sets: list[list[int]]) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    return [np.array(one, np.int32) for one in sets]


def slow_encode(sets: list[list[int]]) -> bytes:
    """One long number of bits per plane."""
    ids = [token for one in sets for token in one]
    width = max([1, *(token.bit_length() for token in ids)])
    head = b"TI\x02" + bytes([width]) + len(sets).to_bytes(4, "little")
    counts = b"".join(len(one).to_bytes(2, "little") for one in sets)
    return head + counts + slow_pack(ids, width)


@settings(max_examples=40)
@given(SETS)
def test_the_bytes_are_those_of_the_slow_encoder_and_come_back(sets: list[list[int]]) -> None:
    payload = encode_top_ids(arrays(sets))
    assert payload == slow_encode(sets)
    assert check_top_ids(payload) == len(sets)
    ids_TK, counts_T = decode_top_ids(payload)
    assert [row[:n].tolist() for row, n in zip(ids_TK, counts_T, strict=True)] == sets
    assert not any(row[n:].any() for row, n in zip(ids_TK, counts_T, strict=True))


def test_a_set_of_64_of_a_vocabulary_of_49152_takes_130_bytes() -> None:
    """16 bits per id and 2 bytes per position, beside the header."""
    ids = np.arange(49_151, 49_151 - 64, -1, dtype=np.int32)
    assert len(encode_top_ids([ids] * 100)) == HEADER_BYTES + 100 * (64 * 2 + 2)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([[]], "sets of 0 to 0"),
        ([[1], list(range(MAX_TOKENS_KEPT + 1))], "expected 1 to 4096"),
        ([[3, -1]], "token id -1"),
    ],
)
def test_sets_that_cannot_be_read_are_not_sent(sets: list[list[int]], says: str) -> None:
    with pytest.raises(EncodeError, match=says):
        encode_top_ids(arrays(sets))


GOOD = encode_top_ids(arrays([[5, 1, 2], [7]]))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        GOOD[:-1],
        GOOD + b"\0",
        b"TK" + GOOD[2:],
        b"TI\x00" + GOOD[3:],  # another version of the format
        GOOD[:3] + b"\x00" + GOOD[4:],
        GOOD[:3] + b"\x20" + GOOD[4:],
        GOOD[:8] + b"\0\0" + GOOD[10:],
        GOOD[:4] + b"\xff\xff\xff\xff" + GOOD[8:],
    ],
)
def test_other_bytes_are_refused(payload: bytes) -> None:
    for read in (check_top_ids, decode_top_ids):
        with pytest.raises(MalformedMessage):
            read(payload)


@settings(max_examples=40)
@given(st.binary(max_size=60))
def test_any_bytes_behind_a_good_beginning_are_read_or_refused(rest: bytes) -> None:
    for payload in (rest, b"TI\x02" + rest):
        try:
            decode_top_ids(payload)
        except MalformedMessage:
            continue


def test_segments_and_leases_carry_them_in_a_frame_of_their_own() -> None:
    tokens = (np.zeros(2, np.int32), np.zeros(2, np.float32), np.ones(2, np.uint8))
    payload = np.frombuffer(GOOD, np.uint8)
    segment = Segment("train-0-0-0", 1, 2, 4, (), False, top_ids=True)
    work = ScoreWork((ScoreItem(1, "a", 0, 2), ScoreItem(2, "b", 0, 2, 0, 2, top_ids=True)))
    for message, frames in ((segment, (*tokens, payload)), (work, (tokens[0], tokens[0], payload))):
        got = decode(encode(message, frames))
        assert got.message == message and got.arrays[-1].tobytes() == GOOD
        with pytest.raises(EncodeError, match="got"):
            encode(message, frames[:-1])
