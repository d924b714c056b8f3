"""Top-k payloads against a slow encoder of bit strings, and bytes that are no payload. What they cost in bytes and in
accuracy is measured in tests/builtin/test_topk_payloads.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import EncodeError, MalformedMessage
from protocol.topk_codec import LOG_TAIL_FLOOR, decode_top_k, encode_top_k


def _rows(n: int, k: int, vocab: int, seed: int = 0) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The k likeliest of n random distributions, from nearly certain to nearly uniform."""
    random = np.random.default_rng(seed)
    logits_TV = random.normal(size=(n, vocab)) * random.uniform(0.1, 8.0, (n, 1))
    logprobs_TV = logits_TV - np.logaddexp.reduce(logits_TV, axis=1, keepdims=True)
    ids_TK = np.argsort(-logprobs_TV, axis=1)[:, :k]
    return ids_TK, np.take_along_axis(logprobs_TV, ids_TK, 1).astype(np.float32)


def _slow_encode(ids_TK: Any, logprobs_TK: Any, vocab: int, mass: float, max_k: int, bits: int) -> bytes:
    """Position by position, one long number of bits."""
    id_bits = max(1, (vocab - 1).bit_length())
    counts, tails, words = b"", b"", []
    for ids, logprobs in zip(ids_TK.tolist(), logprobs_TK.tolist(), strict=True):
        covered, k = 0.0, 0
        while k < min(max_k, len(ids)) and (k == 0 or covered < mass):
            covered += math.exp(logprobs[k])
            k += 1
        for token, logprob in zip(ids[:k], logprobs[:k], strict=True):
            code = round(min(math.sqrt(-min(logprob, 0.0)) / math.sqrt(40), 1.0) * (2**bits - 1))
            words.append(token + (code << id_bits))
        tail = min(0.0, max(LOG_TAIL_FLOOR, math.log(max(1 - covered, 1e-300))))
        counts += k.to_bytes(2, "little")
        tails += (0 if k == vocab else 1 + round(-tail / (-LOG_TAIL_FLOOR / 65534))).to_bytes(2, "little")
    number, width = sum(word << (i * (id_bits + bits)) for i, word in enumerate(words)), id_bits + bits
    body = number.to_bytes(-(-len(words) * width // 8), "little")
    head = b"TK\x01" + bytes([bits]) + len(ids_TK).to_bytes(4, "little") + vocab.to_bytes(4, "little")
    return head + counts + tails + body


@pytest.mark.parametrize("bits", [8, 11, 16])
@pytest.mark.parametrize(("vocab", "k"), [(2, 2), (9, 9), (300, 40), (5000, 64)])
@pytest.mark.parametrize(("mass", "max_k"), [(0.9, 256), (0.9999, 5), (1.0, 4096)])
def test_bytes_equal_those_of_the_slow_encoder(bits: int, vocab: int, k: int, mass: float, max_k: int) -> None:
    ids_TK, logprobs_TK = _rows(13, k, vocab)
    got = encode_top_k(ids_TK, logprobs_TK, vocab_size=vocab, mass=mass, max_k=max_k, logprob_bits=bits)
    assert got == _slow_encode(ids_TK, logprobs_TK, vocab, mass, max_k, bits)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.11), (12, 0.007), (16, 4.5e-4)])
def test_what_is_decoded_is_near_what_was_encoded_and_sums_to_one(bits: int, error: float) -> None:
    ids_TK, logprobs_TK = _rows(200, 64, 5000)
    top = decode_top_k(encode_top_k(ids_TK, logprobs_TK, vocab_size=5000, mass=0.99, logprob_bits=bits))
    decoded_ids_TK, decoded_TK = top.padded()
    for t in range(200):
        k = int(top.counts_T[t])
        covered = np.exp(logprobs_TK[t].astype(float)).cumsum()
        assert k == 64 or (covered[k - 1] >= 0.99 and (k == 1 or covered[k - 2] < 0.99))
        assert decoded_ids_TK[t, :k].tolist() == ids_TK[t, :k].tolist()
        likely = logprobs_TK[t, :k] > -9
        assert float(np.abs(decoded_TK[t, :k] - logprobs_TK[t, :k])[likely].max(initial=0.0)) < error
        if 1 - covered[k - 1] > 1e-3:
            assert float(top.tail_T[t]) == pytest.approx(math.log(1 - covered[k - 1]), abs=0.05 if bits == 8 else 0.01)
    mass_T = np.exp(decoded_TK.astype(float)).sum(axis=1) + np.exp(top.tail_T.astype(float))
    np.testing.assert_allclose(mass_T, 1.0, atol=1e-6)


def test_tail_is_always_sent_unless_nothing_is_left_out() -> None:
    sure = encode_top_k(np.array([[3, 1]]), np.array([[0.0, -30.0]], np.float32), vocab_size=4)
    assert decode_top_k(sure).tail_T.tolist() == pytest.approx([LOG_TAIL_FLOOR])
    whole = encode_top_k(np.array([[1, 0]]), np.log(np.array([[0.7, 0.3]], np.float32)), vocab_size=2, mass=1.0)
    assert decode_top_k(whole).tail_T.tolist() == [-math.inf]


def test_no_position_at_all() -> None:
    top = decode_top_k(encode_top_k(np.zeros((0, 3), np.int64), np.zeros((0, 3), np.float32), vocab_size=9))
    assert len(top.counts_T) == len(top.ids_S) == len(top.tail_T) == 0
    assert top.padded()[0].shape == (0, 1)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        ([[-0.5, math.nan]], "not finite"),
        ([[-0.5, -math.inf]], "not finite"),
        ([[-1.0, -0.5]], "not in order"),
        ([[-0.1, -0.2]], "sum to 1.72"),
    ],
)
def test_numbers_that_cannot_be_are_not_sent(logprobs: Any, message: str) -> None:
    with pytest.raises(EncodeError, match=message):
        encode_top_k(np.array([[1, 2]]), np.array(logprobs, np.float32), vocab_size=9)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([[1, 9]], {}, "ids from 1 to 9; expected 0 to 8"),
        ([[-1, 2]], {}, "ids from -1"),
        ([[2, 2]], {}, "named twice"),
        ([1, 2], {}, "expected .T, K. twice"),
        ([[1, 2]], {"mass": 0.0}, "mass 0.0"),
        ([[1, 2]], {"max_k": 0}, "max_k 0"),
        ([[1, 2]], {"logprob_bits": 7}, "logprob_bits 7"),
        ([[1, 2]], {"vocab_size": 0}, "vocab_size 0"),
    ],
)
def test_sets_and_options_that_cannot_be_are_not_sent(ids: Any, options: dict[str, Any], message: str) -> None:
    logprobs_TK = np.log(np.array([[0.6, 0.3]], np.float32))
    with pytest.raises(EncodeError, match=message):
        encode_top_k(np.array(ids), logprobs_TK, **{"vocab_size": 9, **options})


GOOD = encode_top_k(*_rows(6, 20, 300), vocab_size=300, mass=0.99)


def _assert_a_payload_or_refused(payload: bytes) -> None:
    try:
        top = decode_top_k(payload)
    except MalformedMessage:
        return
    assert len(top.ids_S) == len(top.logprobs_S) == top.counts_T.sum()
    ids_TK, logprobs_TK = top.padded()
    assert np.isfinite(top.logprobs_S).all() and (top.logprobs_S <= 0).all() and (ids_TK >= 0).all()
    mass_T = np.exp(logprobs_TK.astype(float)).sum(axis=1) + np.exp(top.tail_T.astype(float))
    assert len(mass_T) == 0 or np.abs(mass_T - 1.0).max() < 1e-3


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_bytes_from_anywhere_are_refused_with_a_typed_error(payload: bytes) -> None:
    _assert_a_payload_or_refused(payload)
    _assert_a_payload_or_refused(GOOD[:12] + payload)


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD)))
@settings(deadline=None)
def test_damaged_payload_is_refused_or_still_a_distribution(place: int, value: int, length: int) -> None:
    _assert_a_payload_or_refused(GOOD[:place] + bytes([value]) + GOOD[place + 1 :])
    _assert_a_payload_or_refused(GOOD[:length])
    _assert_a_payload_or_refused(GOOD + GOOD[:length])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 0, "expected b'TK' 1"),
        (2, 2, "expected b'TK' 1"),
        (3, 7, "7 log-prob bits"),
        (4, 255, "bytes, expected at least"),
        (8, 5, "expected"),  # a smaller vocabulary: other widths, another length
        (12, 0, "expected"),  # the first position's count
        (24, 0, "expected"),  # its tail
    ],
)
def test_what_is_wrong_is_said(place: int, value: int, message: str) -> None:
    damaged = bytearray(GOOD)
    damaged[place] = value
    if place == 24:
        damaged[25] = 0
    with pytest.raises(MalformedMessage, match=message):
        decode_top_k(bytes(damaged))


def test_length_promised_but_not_sent_takes_no_memory() -> None:
    with pytest.raises(MalformedMessage, match="at least"):
        decode_top_k(b"TK\x01\x0c" + (2**32 - 1).to_bytes(4, "little") + (300).to_bytes(4, "little"))
