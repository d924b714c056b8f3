"""Top-k payloads against a slow encoder and a slow decoder, and bytes that are no payload.
What they cost in bytes and in accuracy is measured in tests/builtin/test_topk_payloads.py."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.protocol import topk_layout
from stillhouse.protocol.bit_words import n_bytes
from stillhouse.protocol.errors import EncodeError, MalformedMessage
from stillhouse.protocol.topk_codec import LOG_TAIL_FLOOR, TopK, decode_joined, decode_top_k, encode_given, encode_top_k
from stillhouse.protocol.topk_layout import HEADER_BYTES, check_payload, most_bytes, n_positions
from tests.protocol.slow_planes import slow_pack
from tests.protocol.topk_oracle import HEADER, Borderline, slow_decode, slow_encode


def _rows(n: int, k: int, vocab: int, seed: int = 0) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The k likeliest of n random distributions, from nearly certain to nearly uniform."""
    random = np.random.default_rng(seed)
    logits_TV = random.normal(size=(n, vocab)) * random.uniform(0.1, 8.0, (n, 1))
    logprobs_TV = logits_TV - np.logaddexp.reduce(logits_TV, axis=1, keepdims=True)
    ids_TK = np.argsort(-logprobs_TV, axis=1)[:, :k]
    return ids_TK, np.take_along_axis(logprobs_TV, ids_TK, 1).astype(np.float32)


@pytest.mark.parametrize("bits", [8, 11, 16])
@pytest.mark.parametrize(("vocab", "k"), [(2, 2), (9, 9), (300, 40), (5000, 64)])
@pytest.mark.parametrize(("mass", "max_k"), [(0.9, 256), (0.9999, 5), (1.0, 4096)])
def test_bytes_equal_those_of_the_slow_encoder(bits: int, vocab: int, k: int, mass: float, max_k: int) -> None:
    ids_TK, logprobs_TK = _rows(13, k, vocab)
    got = encode_top_k(ids_TK, logprobs_TK, vocab_size=vocab, mass=mass, max_k=max_k, logprob_bits=bits)
    assert got == slow_encode(ids_TK.tolist(), logprobs_TK.tolist(), vocab, mass, max_k, bits)


def test_the_check_of_lengths_gives_the_number_of_positions() -> None:
    assert check_payload(GOOD) == n_positions(GOOD) == 6
    with pytest.raises(MalformedMessage, match="bytes, expected"):
        check_payload(GOOD[:-1])


def _assert_same(top: TopK, expected: TopK) -> None:
    """The same sets; log-probs but for the rounding of float32."""
    for field in ("counts_T", "ids_S", "logprobs_S", "tail_T"):
        got, wanted = getattr(top, field), getattr(expected, field)
        assert got.dtype == wanted.dtype, field
        if field in ("counts_T", "ids_S"):
            np.testing.assert_array_equal(got, wanted)
        else:
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=4e-6)


@given(
    n=st.integers(0, 70),
    vocab=st.sampled_from([1, 2, 3, 40, 312, 3000]),
    k=st.integers(1, 300),
    mass=st.sampled_from([0.5, 0.9, 0.999, 1.0]),
    bits=st.integers(8, 16),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25)
def test_what_is_decoded_equals_the_slow_decoder(n: int, vocab: int, k: int, mass: float, bits: int, seed: int) -> None:
    rows = _rows(n, min(k, vocab), vocab, seed)
    payload = encode_top_k(*rows, vocab_size=vocab, mass=mass, max_k=k, logprob_bits=bits)
    _assert_same(decode_top_k(payload), slow_decode(payload))


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    mass=st.sampled_from([0.5, 0.999]),
    bits=st.integers(8, 16),
    block=st.sampled_from([37, 1 << 15]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25)
def test_payloads_decoded_together_and_in_many_blocks_are_those_decoded_alone(
    sizes: list[int], mass: float, bits: int, block: int, seed: int
) -> None:
    payloads = [
        encode_top_k(*_rows(n, 300, 300, seed + i), vocab_size=300, mass=mass, max_k=60, logprob_bits=bits)
        for i, n in enumerate(sizes)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_layout, "BLOCK_BYTES", block)
        together = decode_joined([memoryview(payload) for payload in payloads])
    alone = [slow_decode(payload) for payload in payloads]
    _assert_same(together, TopK(*(np.concatenate(parts) for parts in zip(*map(_fields, alone), strict=True))))


def _fields(top: TopK) -> tuple[npt.NDArray[Any], ...]:
    return top.counts_T, top.ids_S, top.logprobs_S, top.tail_T


def test_payloads_of_another_vocabulary_are_not_decoded_together() -> None:
    other = encode_top_k(*_rows(6, 20, 300), vocab_size=301, mass=0.99)
    with pytest.raises(MalformedMessage, match="the same vocabulary and bits"):
        decode_joined([GOOD, other])


def test_a_wrong_position_is_counted_over_all_payloads_that_are_decoded_together() -> None:
    wrong = bytearray(GOOD)
    wrong[-20:] = bytes(20)  # upper bits of the codes of the last two positions: log-probs near 0
    with pytest.raises(MalformedMessage, match=r"sum to [0-9.]+ at position 10"):
        decode_joined([GOOD, bytes(wrong)])


def _payload(sets: list[list[int]], vocab: int) -> bytes:
    """A payload of these ids, whatever they are; each position's have equal probabilities that sum to one half."""
    id_bits, code_of = (vocab - 1).bit_length(), (2**12 - 1) / math.sqrt(40)
    codes = [round(math.sqrt(math.log(2 * len(ids))) * code_of) for ids in sets for _ in ids]
    widest, tail = max(map(len, sets)), 1 + round(math.log(2) / (-LOG_TAIL_FLOOR / 65534))
    head = struct.pack(HEADER, b"TK", 3, 12, 0, widest.bit_length(), widest, len(sets), vocab)
    counts = slow_pack([widest - len(ids) for ids in sets], widest.bit_length()) + struct.pack("<H", tail) * len(sets)
    return head + counts + slow_pack([i for ids in sets for i in ids], id_bits) + slow_pack(codes, 12)


@given(
    counts=st.one_of(
        st.lists(st.integers(1, 12), min_size=1, max_size=40),
        st.lists(st.sampled_from([1, 1, 1, 1, 1, 1, 1, 60]), min_size=1, max_size=60),
    ),
    vocab=st.sampled_from([70, 2**26, 2**31 - 1]),
    wrong=st.sampled_from([None, "twice", "exchanged"]),
    block=st.sampled_from([50, 1 << 15]),
    data=st.data(),
)
@settings(max_examples=25)
def test_ids_that_do_not_ascend_at_a_position_are_refused_and_those_of_different_positions_are_not_compared(
    counts: list[int], vocab: int, wrong: str | None, block: int, data: st.DataObject
) -> None:
    """Positions share their ids, so that any comparison across positions would refuse them."""
    sets = [list(range(vocab - count, vocab)) for count in counts]
    wide = [t for t, count in enumerate(counts) if count > 1]
    t = data.draw(st.sampled_from(wide)) if wrong and wide else 0
    if wrong and wide:
        first, second = sorted(data.draw(st.sets(st.integers(0, counts[t] - 1), min_size=2, max_size=2)))
        if wrong == "exchanged":
            sets[t][first], sets[t][second] = sets[t][second], sets[t][first]
        else:
            sets[t][second] = sets[t][first]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_layout, "BLOCK_BYTES", block)
        if wrong and wide:
            with pytest.raises(MalformedMessage, match=f"ids at position {t} that do not ascend"):
                decode_top_k(_payload(sets, vocab))
        else:
            assert decode_top_k(_payload(sets, vocab)).ids_S.tolist() == [i for ids in sets for i in ids]


@pytest.mark.parametrize("vocab", [70_000, 2**31 - 1])
def test_wide_ids_and_many_positions_of_different_counts_are_decoded_alike(vocab: int) -> None:
    """More ids than are sorted in one piece, and words that do not fit into 32 bits."""
    random = np.random.default_rng(0)
    ids_TK = random.integers(0, vocab, (120, 200))
    ids_TK[:, 0] = vocab - 1
    ids_TK = ids_TK[[len(set(ids)) == 200 for ids in ids_TK.tolist()]]
    assert len(ids_TK) > 40
    payload = encode_top_k(ids_TK, _rows(len(ids_TK), 200, 300)[1], vocab_size=vocab, mass=0.95, logprob_bits=16)
    top = decode_top_k(payload)
    _assert_same(top, slow_decode(payload))
    assert top.counts_T.min() < 8 < 128 < top.counts_T.max()


@pytest.mark.parametrize(("bits", "error"), [(8, 0.11), (12, 0.007), (16, 4.5e-4)])
def test_what_is_decoded_is_near_what_was_encoded_and_sums_to_one(bits: int, error: float) -> None:
    ids_TK, logprobs_TK = _rows(200, 64, 5000)
    top = decode_top_k(encode_top_k(ids_TK, logprobs_TK, vocab_size=5000, mass=0.99, logprob_bits=bits))
    decoded_ids_TK, decoded_TK = top.padded()
    for t in range(200):
        k = int(top.counts_T[t])
        covered = np.exp(logprobs_TK[t].astype(float)).cumsum()
        assert k == 64 or (covered[k - 1] >= 0.99 and (k == 1 or covered[k - 2] < 0.99))
        by_id = np.argsort(ids_TK[t, :k])
        assert decoded_ids_TK[t, :k].tolist() == ids_TK[t, by_id].tolist()
        exact, likely = logprobs_TK[t, by_id], logprobs_TK[t, by_id] > -9
        assert float(np.abs(decoded_TK[t, :k] - exact)[likely].max(initial=0.0)) < error
        if 1 - covered[k - 1] > 1e-3:
            assert float(top.tail_T[t]) == pytest.approx(math.log(1 - covered[k - 1]), abs=0.05 if bits == 8 else 0.01)
    mass_T = np.exp(decoded_TK.astype(float)).sum(axis=1) + np.exp(top.tail_T.astype(float))
    np.testing.assert_allclose(mass_T, 1.0, atol=1e-6)


def test_tail_is_always_sent_unless_nothing_is_left_out() -> None:
    sure = encode_top_k(np.array([[3, 1]]), np.array([[0.0, -30.0]], np.float32), vocab_size=4)
    assert decode_top_k(sure).tail_T.tolist() == pytest.approx([LOG_TAIL_FLOOR])
    whole = encode_top_k(np.array([[1, 0]]), np.log(np.array([[0.7, 0.3]], np.float32)), vocab_size=2, mass=1.0)
    assert decode_top_k(whole).tail_T.tolist() == [-math.inf]


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
        ([[2, 2]], {}, "listed twice"),
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
def test_bytes_from_anywhere_are_refused_with_a_typed_error(payload: bytes) -> None:
    _assert_a_payload_or_refused(payload)
    _assert_a_payload_or_refused(GOOD[:HEADER_BYTES] + payload)


@given(st.integers(0, 2000), st.integers(0, 255), st.integers(0, 2000))
def test_damaged_payload_is_refused_or_still_a_distribution(place: int, value: int, length: int) -> None:
    place %= len(GOOD)
    _assert_a_payload_or_refused(GOOD[:place] + bytes([value]) + GOOD[place + 1 :])
    _assert_a_payload_or_refused(GOOD[:length])
    _assert_a_payload_or_refused(GOOD + GOOD[:length])


@given(st.integers(0, 2000), st.integers(0, 255))
def test_damaged_words_are_refused_where_the_slow_decoder_refuses_them(place: int, value: int) -> None:
    first = HEADER_BYTES + 6  # the counts are as they were, so that all lengths fit
    place = first + place % (len(GOOD) - first)
    damaged = GOOD[:place] + bytes([value]) + GOOD[place + 1 :]
    try:
        expected = slow_decode(damaged)
    except Borderline:
        return
    except ValueError:
        with pytest.raises(MalformedMessage):
            decode_top_k(damaged)
        return
    _assert_same(decode_top_k(damaged), expected)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 0, "expected b'TK' 3"),
        (2, 1, "expected b'TK' 3"),
        (3, 7, "7 log-prob bits"),
        (4, 5, "5 bits for each token that is not in the set, expected 0"),
        (5, 14, "counts of 14 bits"),
        (6, 0, "0 tokens at the widest"),
        (7, 2, "tokens at the widest"),  # more than the vocabulary has
        (8, 255, "bytes, expected at least"),
        (12, 5, "expected"),  # a smaller vocabulary: other widths, another length
        (HEADER_BYTES + 4, 0, "no tail where tokens are left out"),
    ],
)
def test_what_is_wrong_is_said(place: int, value: int, message: str) -> None:
    damaged = bytearray(GOOD)
    damaged[place] = value
    if place == HEADER_BYTES + 4:
        damaged[place + 1] = 0
    with pytest.raises(MalformedMessage, match=message):
        decode_top_k(bytes(damaged))


def test_a_position_without_tokens_is_refused() -> None:
    payload = bytearray(encode_top_k(*_rows(40, 20, 300), vocab_size=300, mass=0.9))
    counts = n_bytes(40, payload[5])
    assert payload[5] and payload[6] < 1 << payload[5], "so many bits can say that the widest set is too short by all"
    payload[HEADER_BYTES : HEADER_BYTES + counts] = b"\xff" * counts
    with pytest.raises(MalformedMessage, match="tokens at a position, expected 1 to"):
        decode_top_k(bytes(payload))


def test_length_promised_but_not_sent_takes_no_memory() -> None:
    for count_bits in (0, 8):
        header = struct.pack(HEADER, b"TK", 3, 12, 0, count_bits, 4, 2**32 - 1, 300)
        with pytest.raises(MalformedMessage, match="at least"):
            decode_top_k(header)


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (9, 5), (300, 1), (300, 16), (300, 256), (49_152, 64), (151_936, 16)])
def test_no_position_takes_more_than_the_most_bytes(vocab: int, k: int) -> None:
    """Which bounds what a teacher may send. And a payload is not larger than words without gaps and counts in two bytes
    would make it, from a few positions on."""
    for n in (1, 40):
        payload = encode_top_k(*_rows(n, min(k, vocab), vocab), vocab_size=vocab, mass=0.99, max_k=k)
        n_sent = int(decode_top_k(payload).counts_T.sum())
        assert len(payload) <= HEADER_BYTES + n * most_bytes(vocab, k)
        if n == 40:
            assert len(payload) <= 13 + 4 * n + -(-n_sent * (max(1, (vocab - 1).bit_length()) + 12) // 8)


# ------------------------------------------------------------------------------------------ tokens that others chose


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    vocab=st.sampled_from([9, 40, 50_000]),
    spread=st.sampled_from([0.1, 2.0, 6.0]),
    seed=st.integers(0, 999),
)
def test_given_sets_come_back_whole_whatever_their_order_and_their_mass(
    sizes: list[int], vocab: int, spread: float, seed: int
) -> None:
    """Improbable tokens too, which a set of the likeliest would leave out; what is not in the set is in the tail."""
    random = np.random.default_rng(seed)
    logits_TV = random.normal(size=(len(sizes), vocab)) * spread
    logprobs_TV = logits_TV - np.logaddexp.reduce(logits_TV, axis=1, keepdims=True)
    ids_TK = np.stack([random.permutation(vocab)[:9] for _ in sizes])
    given_TK = np.take_along_axis(logprobs_TV, ids_TK, 1).astype(np.float32)
    given_TK[np.arange(9) >= np.array(sizes)[:, None]] = np.nan  # must not be read
    top = decode_top_k(encode_given(ids_TK, given_TK, np.array(sizes), vocab_size=vocab))
    assert top.counts_T.tolist() == sizes
    got_ids, got = top.padded()
    for t, n in enumerate(sizes):
        told = dict(zip(got_ids[t, :n].tolist(), got[t, :n].tolist(), strict=True))
        exact = {int(token): logprobs_TV[t, token] for token in ids_TK[t, :n]}
        assert told.keys() == exact.keys()
        for token, logprob in exact.items():
            sent = max(logprob, -40.0)
            assert told[token] == pytest.approx(sent, abs=0.004 + 0.002 * math.sqrt(-sent))
        outside = 1.0 - sum(math.exp(logprob) for logprob in exact.values())
        if n == vocab:
            assert np.isneginf(top.tail_T[t])
        else:
            assert math.exp(top.tail_T[t]) == pytest.approx(outside, rel=0.02, abs=0.004)


def test_given_tokens_of_hardly_any_mass_are_sent_as_minus_40_at_least() -> None:
    top = decode_top_k(encode_given(np.array([[3, 4]]), np.array([[-70.0, -1e-9]]), np.array([2]), vocab_size=9))
    assert top.ids_S.tolist() == [3, 4] and top.logprobs_S[0] == pytest.approx(-40.0, abs=1e-3)


@pytest.mark.parametrize(
    ("ids", "logprobs", "counts", "says"),
    [
        ([[1, 2]], [[-1.0, -2.0]], [3], "from 1 to 2"),
        ([[1, 2]], [[-1.0, -2.0]], [0], "from 1 to 2"),
        ([[1, 2]], [[-1.0, -2.0]], [1, 1], "of shape"),
        ([[1, 1]], [[-1.0, -2.0]], [2], "twice"),
        ([[1, 9]], [[-1.0, -2.0]], [2], "expected 0 to 8"),
        ([[1, 2]], [[-1.0, np.nan]], [2], "not finite"),
        ([[1, 2]], [[-0.1, -0.1]], [2], "sum to"),
    ],
)
def test_given_sets_that_would_be_refused_are_not_sent(ids: Any, logprobs: Any, counts: Any, says: str) -> None:
    with pytest.raises(EncodeError, match=says):
        encode_given(np.array(ids), np.array(logprobs), np.array(counts), vocab_size=9)
