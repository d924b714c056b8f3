"""A teacher's log-probs of a set of tokens per position, in few bytes: its likeliest tokens, as many as cover a given
mass, or those that it was asked for. With packed ids, log-probs in 8 to 16 bits, and the mass of the tokens left out.
NumPy only.

    payload   header | counts uint16 [T] | tails uint16 [T] | words, w bits each, without gaps [S]      little-endian
              with rest bits also: | ranges uint16 [T, 2] | codes of all other tokens, without ids, in order of ids [R]
    header    "TK", version uint8, log-prob bits b uint8, rest bits uint8, T uint32, V uint32
    word      id in bits(V - 1) bits, above it the log-prob's code in b bits;   w = both together

A log-prob's code is sqrt(-logprob) in equal steps up to sqrt(40): fine where the probability is large, coarse where it
is small. A tail's code is its logarithm in equal steps from log 1 down to log 1e-7; code 0 means that nothing is left
out. Decoded probabilities of a position sum to exactly 1: the sent ones are scaled to one minus the tail, or, if the
tail is more than half, the tail becomes one minus their sum. This removes the rounding error that they have in common.

The *rest* is for small vocabularies: a few bits for every other token, in equal steps between the position's lowest and
highest log-prob (in 1/1024 nat). A tail alone does not show where in it the student errs; docs/results has the cost.

Legend: T positions, K columns of the given likeliest tokens, S words at all positions together, R tokens of the rest at
all positions together, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.bit_words import Bytes, n_bytes, pack_words, unpack_words
from protocol.errors import EncodeError, MalformedMessage

LOG_TAIL_FLOOR: Final = math.log(1e-7)
"""Smallest tail sent: 1 - sum of float32 probabilities is too imprecise for smaller ones."""
MAX_TOKENS_KEPT: Final = 4096
"""Most tokens at one position."""
MASS_ROUNDING: Final = 1e-3
REST_BITS: Final = 5
"""For the built-in teacher (V = 312) this gives 234 bytes per position and an error of the KL below 1e-3. With 4 bits
the error is larger; 6 bits take more than 256 bytes."""
SMALL_VOCABULARY: Final = 384
"""Largest vocabulary, in tokens, whose rest costs at most 240 bytes per position."""
_HEADER: Final = struct.Struct("<2sBBBII")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"TK"
_VERSION: Final = 2
_SQRT_RANGE: Final = math.sqrt(40.0)
_TAIL_STEP: Final = -LOG_TAIL_FLOOR / 65_534
_RANGE_STEP: Final = 1.0 / 1024
_BLOCK_IDS = 1 << 15
"""Ids that are decoded together."""


@dataclass(frozen=True)
class TopK:
    """A teacher's likeliest tokens at T positions."""

    counts_T: npt.NDArray[np.int64]
    """Tokens per position, at least 1 each; S in total."""
    ids_S: npt.NDArray[np.int32]
    """Position by position; within a position all ids differ, and the likeliest is first."""
    logprobs_S: npt.NDArray[np.float32]
    tail_T: npt.NDArray[np.float32]
    """Log of the mass of all other tokens; -inf if there are none."""

    def padded(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """(ids [T, K], log-probs [T, K]) with K the largest count; padded with 0 and -inf."""
        k = int(self.counts_T.max(initial=1))
        if len(self.ids_S) == k * len(self.counts_T):  # no padding
            return self.ids_S.reshape(-1, k).astype(np.int64), self.logprobs_S.reshape(-1, k)
        columns_TK = np.arange(k) < self.counts_T[:, None]
        ids_TK = np.zeros(columns_TK.shape, np.int64)
        logprobs_TK = np.full(columns_TK.shape, -np.inf, np.float32)
        ids_TK[columns_TK], logprobs_TK[columns_TK] = self.ids_S, self.logprobs_S
        return ids_TK, logprobs_TK


def encode_top_k(
    ids_TK: npt.NDArray[np.integer[Any]],
    logprobs_TK: npt.NDArray[np.floating[Any]],
    *,
    vocab_size: int,
    mass: float = 0.999,
    max_k: int = 256,
    logprob_bits: int = 12,
    rest_bits: int = 0,
) -> bytes:
    """Encode the smallest sets of at most `max_k` tokens that cover `mass`. The input has the K likeliest tokens,
    likeliest first. `rest_bits` above 0: also all other tokens, with this many bits each; K must then be V <=
    MAX_TOKENS_KEPT.

    Raises EncodeError for log-probs that are not finite or not sorted, probabilities that sum to more than 1, ids
    outside the vocabulary or listed twice, and invalid options, so that no payload is sent which would be refused."""
    _check_options(ids_TK, logprobs_TK, vocab_size, mass, max_k, logprob_bits, rest_bits)
    all_ids_TK, all_logprobs_TK = ids_TK, logprobs_TK
    ids_TK, logprobs_TK = ids_TK[:, :max_k], logprobs_TK[:, :max_k]
    _check_rows(*((all_ids_TK, all_logprobs_TK) if rest_bits else (ids_TK, logprobs_TK)), vocab_size)
    covered_TK = np.exp(logprobs_TK.astype(np.float64)).cumsum(axis=1)
    counts_T = np.minimum((covered_TK < mass).sum(axis=1) + 1, ids_TK.shape[1])
    parts = _encode_sets(ids_TK, logprobs_TK, counts_T, vocab_size, logprob_bits, rest_bits)
    if rest_bits:
        parts += _encode_rest(all_ids_TK, all_logprobs_TK, counts_T, rest_bits)
    return b"".join(parts)


def encode_given(
    ids_TK: npt.NDArray[np.integer[Any]],
    logprobs_TK: npt.NDArray[np.floating[Any]],
    counts_T: npt.NDArray[np.integer[Any]],
    *,
    vocab_size: int,
    logprob_bits: int = 12,
) -> bytes:
    """Encode sets that another model chose: the first `counts_T` tokens of each row, in any order, whatever their
    probability. Log-probs below -40 are sent as -40.

    Raises EncodeError as `encode_top_k` does, and for counts outside [1, K]."""
    k = ids_TK.shape[1] if ids_TK.ndim == 2 else 0
    _check_options(ids_TK, logprobs_TK, vocab_size, 1.0, max(1, k), logprob_bits, 0)
    if counts_T.shape != ids_TK.shape[:1] or (len(counts_T) and not 1 <= counts_T.min() <= counts_T.max() <= k):
        raise EncodeError(f"counts of shape {counts_T.shape}; expected [{len(ids_TK)}], each from 1 to {k}")
    outside_TK = np.arange(k) >= counts_T[:, None]
    distance_TK = np.where(outside_TK, np.inf, -logprobs_TK.astype(np.float64))
    order_TK = np.argsort(distance_TK, axis=1, kind="stable")
    ids_TK = np.take_along_axis(ids_TK, order_TK, axis=1)
    logprobs_TK = -np.take_along_axis(distance_TK, order_TK, axis=1)
    for count in np.unique(counts_T):
        rows_T = counts_T == count
        _check_rows(ids_TK[rows_T, :count], logprobs_TK[rows_T, :count], vocab_size)
    return b"".join(_encode_sets(ids_TK, logprobs_TK, counts_T, vocab_size, logprob_bits, 0))


def _encode_sets(
    ids_TK: Any, logprobs_TK: Any, counts_T: Any, vocab_size: int, logprob_bits: int, rest_bits: int
) -> list[bytes]:
    """Header, counts, tails and words of the first `counts_T` tokens of each row."""
    n_tokens, k = ids_TK.shape
    kept_TK = np.arange(k) < counts_T[:, None]
    left_out_T = 1.0 - np.exp(logprobs_TK.astype(np.float64)).cumsum(axis=1)[np.arange(n_tokens), counts_T - 1]
    tails_T = np.clip(np.log(np.maximum(left_out_T, 1e-300)), LOG_TAIL_FLOOR, 0.0)
    tail_codes_T = np.where(counts_T == vocab_size, 0, 1 + np.rint(-tails_T / _TAIL_STEP)).astype("<u2")
    id_bits, largest_code = _id_bits(vocab_size), (1 << logprob_bits) - 1
    roots_S = np.sqrt(np.maximum(-logprobs_TK[kept_TK].astype(np.float64), 0.0))
    codes_S = np.rint(np.minimum(roots_S / _SQRT_RANGE, 1.0) * largest_code).astype(np.uint64)
    words_S = ids_TK[kept_TK].astype(np.uint64) | (codes_S << np.uint64(id_bits))
    header = _HEADER.pack(_MAGIC, _VERSION, logprob_bits, rest_bits, n_tokens, vocab_size)
    body = pack_words(words_S, id_bits + logprob_bits)
    return [header, counts_T.astype("<u2").tobytes(), tail_codes_T.tobytes(), body.tobytes()]


def decode_top_k(payload: bytes | memoryview) -> TopK:
    """Raises only MalformedMessage, whatever the bytes are. Takes memory in proportion to the payload."""
    parts = _read_parts(payload)
    counts_T, tail_codes_T, logprob_bits = parts.counts_T, parts.tail_codes_T, parts.logprob_bits
    id_bits = _id_bits(parts.vocab_size)
    words_S = unpack_words(parts.body, int(counts_T.sum()), id_bits + logprob_bits)
    ids_S = (words_S & words_S.dtype.type((1 << id_bits) - 1)).astype(np.int32)
    blocks = _blocks(counts_T)
    _refuse_ids(ids_S, counts_T, blocks, parts.vocab_size)
    tolerance = 4.0 * _SQRT_RANGE / ((1 << logprob_bits) - 1) + MASS_ROUNDING
    tail_T = np.where(tail_codes_T == 0, -np.inf, -(tail_codes_T.astype(np.float64) - 1.0) * _TAIL_STEP)
    rest_T = -np.expm1(np.minimum(tail_T, -1e-12))
    mostly_sent_T = rest_T >= 0.5
    covered_T, logprobs_S = np.empty(len(counts_T)), np.empty(len(ids_S), np.float32)
    for some, sent, firsts_B in blocks:
        meaning_S = _of_code(logprob_bits).take((words_S[sent] >> words_S.dtype.type(id_bits)).astype(np.intp))
        covered_B, rest_B = np.add.reduceat(meaning_S.imag, firsts_B), rest_T[some]
        wrong_B = np.abs(covered_B - rest_B) > tolerance
        if wrong_B.any():
            wrong = int(np.flatnonzero(wrong_B)[0])
            raise MalformedMessage(
                "top-k payload",
                got=f"probabilities that sum to {covered_B[wrong]:.4f} at position {some.start + wrong}",
                expected=f"{rest_B[wrong]:.4f}, one minus its tail",
            )
        covered_T[some] = covered_B
        scale_B = np.where(mostly_sent_T[some], np.log(rest_B / covered_B), 0.0)
        # In float64, then rounded.
        np.add(meaning_S.real, np.repeat(scale_B, counts_T[some]), out=logprobs_S[sent], casting="same_kind")
    np.minimum(logprobs_S, np.float32(0.0), out=logprobs_S)
    tail_T = np.where(mostly_sent_T, tail_T, np.log1p(-np.minimum(covered_T, 0.9)))
    top = TopK(counts_T, ids_S, logprobs_S, tail_T.astype(np.float32))
    return _with_rest(top, parts) if parts.rest_bits else top


class _Block(NamedTuple):
    """Neighbouring positions that are decoded together."""

    positions: slice
    ids: slice
    firsts_B: npt.NDArray[np.int64]
    """Where each position's ids begin, counted from the block's first."""


def _blocks(counts_T: npt.NDArray[np.int64]) -> list[_Block]:
    """Blocks of about `_BLOCK_IDS` ids, so that what is computed of them stays in the processor's cache, in memory that
    the next block uses again: fresh memory costs more than the arithmetic."""
    ends_T = np.cumsum(counts_T)
    n_ids = int(ends_T[-1]) if len(ends_T) else 0
    cuts = np.searchsorted(ends_T, np.arange(_BLOCK_IDS, n_ids, _BLOCK_IDS)).tolist()
    cuts = sorted({0, *cuts, len(counts_T)})
    blocks = list[_Block]()
    for first, last in itertools.pairwise(cuts):
        begins, ends = int(ends_T[first] - counts_T[first]), int(ends_T[last - 1])
        some = slice(first, last)
        blocks.append(_Block(some, slice(begins, ends), ends_T[some] - counts_T[some] - begins))
    return blocks


def most_bytes(vocab_size: int, max_k: int, *, logprob_bits: int = 12, rest_bits: int = 0) -> int:
    """The most bytes that one position takes, without the header."""
    k = min(max_k, vocab_size)
    bits = k * (_id_bits(vocab_size) + logprob_bits) + rest_bits * (vocab_size - k)
    return -(-bits // 8) + (8 if rest_bits else 4)


def check_payload(payload: bytes | memoryview) -> int:
    """T of a payload. Checks that its lengths fit its header, but not its words. Raises MalformedMessage."""
    return len(_read_parts(payload).counts_T)


@functools.lru_cache
def _of_code(logprob_bits: int) -> npt.NDArray[np.complex128]:
    """Each code's log-prob, and its probability as the imaginary part, so that one look-up reads both."""
    n_codes = 1 << logprob_bits
    meaning = np.empty(n_codes, np.complex128)
    meaning.real = -np.square(np.arange(n_codes, dtype=np.float64) * (_SQRT_RANGE / (n_codes - 1)))
    meaning.imag = np.exp(meaning.real)
    return meaning


# ---------------------------------------------------------------------------------------------------------- rest


def _encode_rest(ids_TV: Any, logprobs_TV: Any, counts_T: npt.NDArray[np.int64], rest_bits: int) -> list[bytes]:
    """Ranges and codes of the tokens after the first `counts_T` of each position."""
    n_tokens, vocab_size = ids_TV.shape
    rest_TV = np.arange(vocab_size) >= counts_T[:, None]
    by_id_TV = np.full((n_tokens, vocab_size), np.nan)
    np.put_along_axis(by_id_TV, ids_TV.astype(np.int64), np.where(rest_TV, logprobs_TV, np.nan), axis=1)
    rest_by_id_TV = ~np.isnan(by_id_TV)
    distance_TV = np.where(rest_TV, -logprobs_TV.astype(np.float64), np.nan)
    some_T = counts_T < vocab_size
    ranges_T2 = np.zeros((n_tokens, 2), np.int64)
    if some_T.any():
        # The input is sorted: the likeliest of the rest comes right after the set, the least likely is last.
        nearest_T = distance_TV[some_T, counts_T[some_T]]
        steps_T2 = np.stack([np.floor(nearest_T / _RANGE_STEP), np.ceil(distance_TV[some_T, -1] / _RANGE_STEP)], axis=1)
        ranges_T2[some_T] = np.clip(steps_T2, 0, 65_535)
    near_T, width_T = ranges_T2[:, 0] * _RANGE_STEP, (ranges_T2[:, 1] - ranges_T2[:, 0]) * _RANGE_STEP
    counts_R = vocab_size - counts_T
    share_R = (-by_id_TV[rest_by_id_TV] - np.repeat(near_T, counts_R)) / np.repeat(np.maximum(width_T, 1e-9), counts_R)
    codes_R = np.rint(np.clip(share_R, 0.0, 1.0) * ((1 << rest_bits) - 1)).astype(np.uint64)
    return [ranges_T2.astype("<u2").tobytes(), pack_words(codes_R, rest_bits).tobytes()]


def _with_rest(top: TopK, parts: _Parts) -> TopK:
    """Add the rest, scaled to the tail, so that every position has the whole vocabulary."""
    vocab_size, n_codes, counts_T = parts.vocab_size, 1 << parts.rest_bits, top.counts_T
    n_tokens, left_out_T = len(counts_T), vocab_size - counts_T
    sent_T, rest_T = (np.concatenate([[0], np.cumsum(n_T)]) for n_T in (counts_T, left_out_T))
    codes_R = unpack_words(parts.rest_body, int(rest_T[-1]), parts.rest_bits)
    near_T, far_T = (parts.ranges_T2 * _RANGE_STEP).T
    step_T = np.maximum(far_T - near_T, 0.0) / (n_codes - 1)
    ids_TV, logprobs_TV = np.empty((n_tokens, vocab_size), np.int32), np.empty((n_tokens, vocab_size), np.float32)
    block = max(1, _BLOCK_IDS // vocab_size)
    column_V = np.arange(vocab_size, dtype=np.int32)
    for first in range(0, n_tokens, block):  # of few positions, so that all of it stays in the processor's cache
        last = min(first + block, n_tokens)
        some, sent, rest = slice(first, last), slice(sent_T[first], sent_T[last]), slice(rest_T[first], rest_T[last])
        row_B, left_out_B = np.arange(last - first), left_out_T[some]
        in_rest_BV = np.ones((last - first, vocab_size), np.bool_)
        in_rest_BV.reshape(-1)[np.repeat(row_B * vocab_size, counts_T[some]) + top.ids_S[sent]] = False
        # A position has few codes and many tokens: what a code stands for is computed once per position.
        weights_BC = -np.arange(n_codes, dtype=np.float64) * step_T[some, None]
        place_R = np.flatnonzero(in_rest_BV)
        code_R = np.repeat(row_B * n_codes, left_out_B)
        code_R += codes_R[rest]
        mass_B = _sums_in_order(np.exp(weights_BC).take(code_R), place_R, in_rest_BV.shape)
        scale_B = np.where(left_out_B > 0, top.tail_T[some] - np.log(np.maximum(mass_B, 1e-300)), 0.0)
        logprobs_BC = (weights_BC + scale_B[:, None]).astype(np.float32)
        # Behind the set that was sent come all other tokens, by id.
        is_sent_BV = column_V < counts_T[some, None].astype(np.int32)
        ids_TV[some][is_sent_BV], logprobs_TV[some][is_sent_BV] = top.ids_S[sent], top.logprobs_S[sent]
        np.logical_not(is_sent_BV, out=is_sent_BV)
        ids_TV[some][is_sent_BV] = place_R - np.repeat(row_B * vocab_size, left_out_B)
        logprobs_TV[some][is_sent_BV] = logprobs_BC.take(code_R)
    return TopK(
        np.full(n_tokens, vocab_size, np.int64),
        ids_TV.reshape(-1),
        logprobs_TV.reshape(-1),
        np.full(n_tokens, -np.inf, np.float32),
    )


def _sums_in_order(
    values_R: npt.NDArray[np.float64], place_R: npt.NDArray[np.intp], shape: tuple[int, int]
) -> npt.NDArray[np.float64]:
    """Sum of each row's values, added one after the other. All rows take their next value at the same time: adding
    along one row would wait for each sum before the next."""
    values_BV = np.zeros(shape)
    values_BV.reshape(-1)[place_R] = values_R
    return np.add.reduce(np.ascontiguousarray(values_BV.T), axis=0)


# -------------------------------------------------------------------------------------------------------- checks


def _id_bits(vocab_size: int) -> int:
    return max(1, (vocab_size - 1).bit_length())


def _check_options(
    ids_TK: Any, logprobs_TK: Any, vocab_size: int, mass: float, max_k: int, logprob_bits: int, rest_bits: int
) -> None:
    if ids_TK.ndim != 2 or ids_TK.shape != logprobs_TK.shape or ids_TK.shape[1] < 1:
        raise EncodeError(f"top-k ids {ids_TK.shape}, log-probs {logprobs_TK.shape}; expected [T, K] twice, K >= 1")
    if not 1 <= vocab_size < 1 << 31:
        raise EncodeError(f"vocab_size {vocab_size}; expected 1 to 2^31 - 1")
    if not 0.0 < mass <= 1.0:
        raise EncodeError(f"mass {mass}; expected a share in (0, 1]")
    if not 1 <= max_k <= MAX_TOKENS_KEPT:
        raise EncodeError(f"max_k {max_k}; expected 1 to {MAX_TOKENS_KEPT}")
    if not 8 <= logprob_bits <= 16:
        raise EncodeError(f"logprob_bits {logprob_bits}; expected 8 to 16")
    if not 0 <= rest_bits <= 8:
        raise EncodeError(f"rest_bits {rest_bits}; expected 0 (a tail) to 8")
    if rest_bits and not ids_TK.shape[1] == vocab_size <= MAX_TOKENS_KEPT:
        raise EncodeError(
            f"rest_bits {rest_bits} with {ids_TK.shape[1]} tokens of {vocab_size} per position; expected all of them, "
            f"and at most {MAX_TOKENS_KEPT}"
        )


def _check_rows(ids_TK: Any, logprobs_TK: Any, vocab_size: int) -> None:
    if ids_TK.size == 0:
        return
    if not np.isfinite(logprobs_TK).all():
        raise EncodeError("a log-prob of the likeliest tokens is not finite; the engine's numbers cannot be sent")
    if (np.diff(logprobs_TK, axis=1) > 0).any():
        raise EncodeError("the likeliest tokens are not in order; expected the likeliest first")
    largest_sum = float(np.exp(logprobs_TK.astype(np.float64)).sum(axis=1).max())
    if largest_sum > 1.0 + MASS_ROUNDING:
        raise EncodeError(f"probabilities sum to {largest_sum:.4f} at a position; expected at most 1")
    if ids_TK.min() < 0 or ids_TK.max() >= vocab_size:
        raise EncodeError(f"ids from {ids_TK.min()} to {ids_TK.max()}; expected 0 to {vocab_size - 1}")
    if (np.diff(np.sort(ids_TK, axis=1), axis=1) == 0).any():
        raise EncodeError("a token is listed twice at one position")


class _Parts(NamedTuple):
    """The parts of a payload whose lengths have been checked."""

    counts_T: npt.NDArray[np.int64]
    tail_codes_T: npt.NDArray[np.uint16]
    vocab_size: int
    logprob_bits: int
    rest_bits: int
    body: Bytes
    ranges_T2: npt.NDArray[np.uint16]
    rest_body: Bytes


def _read_parts(payload: bytes | memoryview) -> _Parts:
    if len(payload) < _HEADER.size:
        raise MalformedMessage("top-k payload", got=f"{len(payload)} bytes", expected=f"at least {_HEADER.size}")
    magic, version, logprob_bits, rest_bits, n_tokens, vocab_size = _HEADER.unpack_from(payload)
    if (magic, version) != (_MAGIC, _VERSION):
        raise MalformedMessage("top-k payload", got=f"{magic!r} {version}", expected=f"{_MAGIC!r} {_VERSION}")
    most = min(vocab_size, MAX_TOKENS_KEPT)
    if not (
        8 <= logprob_bits <= 16
        and rest_bits <= 8
        and 1 <= vocab_size < 1 << 31
        and (not rest_bits or most == vocab_size)
    ):
        raise MalformedMessage(
            "top-k payload",
            got=f"{logprob_bits} log-prob bits, {rest_bits} rest bits, a vocabulary of {vocab_size}",
            expected=f"8 to 16, 0 to 8, and 1 to 2^31 - 1 tokens (with rest bits {MAX_TOKENS_KEPT})",
        )
    body_at = _HEADER.size + 4 * n_tokens
    if len(payload) < body_at:
        raise MalformedMessage("top-k payload", got=f"{len(payload)} bytes", expected=f"at least {body_at}")
    counts_T = np.frombuffer(payload, "<u2", n_tokens, _HEADER.size).astype(np.int64)
    tail_codes_T = np.frombuffer(payload, "<u2", n_tokens, _HEADER.size + 2 * n_tokens)
    if n_tokens and not 1 <= counts_T.min() <= counts_T.max() <= most:
        got = f"{counts_T.min()} to {counts_T.max()} tokens at a position"
        raise MalformedMessage("top-k payload", got=got, expected=f"1 to {most}")
    if ((tail_codes_T == 0) != (counts_T == vocab_size)).any():
        raise MalformedMessage(
            "top-k payload",
            got="no tail where tokens are left out, or one where none are",
            expected="one where some are",
        )
    n_words = int(counts_T.sum())
    ranges_at = body_at + n_bytes(n_words, _id_bits(vocab_size) + logprob_bits)
    rest_at = ranges_at + (4 * n_tokens if rest_bits else 0)
    expected = rest_at + (n_bytes(n_tokens * vocab_size - n_words, rest_bits) if rest_bits else 0)
    if len(payload) != expected:
        raise MalformedMessage("top-k payload", got=f"{len(payload)} bytes", expected=f"{expected}")
    whole = np.frombuffer(payload, np.uint8)
    ranges_T2 = np.frombuffer(payload, "<u2", (rest_at - ranges_at) // 2, ranges_at)
    return _Parts(
        counts_T,
        tail_codes_T,
        vocab_size,
        logprob_bits,
        rest_bits,
        whole[body_at:ranges_at],
        ranges_T2.reshape(-1, 2),
        whole[rest_at:],
    )


def _refuse_ids(
    ids_S: npt.NDArray[np.int32], counts_T: npt.NDArray[np.int64], blocks: list[_Block], vocab_size: int
) -> None:
    """Raises MalformedMessage for an id outside the vocabulary, and for one that a position has twice."""
    if len(ids_S) == 0:
        return
    if ids_S.max() >= vocab_size:
        raise MalformedMessage("top-k payload", got=f"token id {ids_S.max()}", expected=f"ids below {vocab_size}")
    for some, sent, firsts_B in blocks:
        if _has_one_twice(ids_S[sent], counts_T[some], firsts_B, _id_bits(vocab_size)):
            got = "a token listed twice at one position"
            raise MalformedMessage("top-k payload", got=got, expected="different tokens")


def _has_one_twice(
    ids_S: npt.NDArray[np.int32], counts_B: npt.NDArray[np.int64], firsts_B: npt.NDArray[np.int64], id_bits: int
) -> bool:
    """Whether some position has an id twice. Short rows are sorted, which is many times faster than sorting all ids at
    once: a row per position if at most half of that is padding, else rows of twice the widest position, each beginning
    in the middle of the one before."""
    widest = int(counts_B.max())
    by_position = widest * len(counts_B) <= 2 * len(ids_S)
    width = widest if by_position else 2 * widest
    starts_R = firsts_B if by_position else np.arange(0, len(ids_S), widest)
    # Ids carry their position in their upper bits, so that those of other positions in a row are no repeats. A row
    # meets at most `width` positions, so these bits may begin again after as many.
    dtype, position_bits = (np.int32, 31 - id_bits) if 1 << (31 - id_bits) >= width else (np.int64, 32)
    positions_B = (np.arange(len(counts_B)) & ((1 << position_bits) - 1)) << id_bits
    keys_S = np.arange(-len(ids_S) - width, 0, dtype=dtype)  # its end is padding: negative, and all different
    np.bitwise_or(np.repeat(positions_B.astype(dtype), counts_B), ids_S, out=keys_S[: len(ids_S)])
    step = keys_S.itemsize
    rows_RC = np.ndarray((len(ids_S), width), dtype, keys_S.data, 0, (step, step))[starts_R]
    rows_RC.sort(axis=1)
    return bool((rows_RC[:, 1:] == rows_RC[:, :-1]).any())
