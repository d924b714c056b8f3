"""A teacher's log-probs of a set of tokens per position, in few bytes: its likeliest tokens, as many as cover a given
mass, or those that it was asked for. With packed ids, log-probs in 8 to 16 bits, and the mass of the tokens left out.
`protocol.topk_layout` says where what is. NumPy only.

A log-prob's code is sqrt(-logprob) in equal steps up to sqrt(40): fine where the probability is large, coarse where it
is small. A tail's code is its logarithm in equal steps from log 1 down to log 1e-7; code 0 means that nothing is left
out. Decoded probabilities of a position sum to exactly 1: the sent ones are scaled to one minus the tail, or, if the
tail is more than half, the tail becomes one minus their sum. This removes the rounding error that they have in common.

The learner decodes as many payloads together as it has, because each operation has a cost of its own beside the one per
token. Ids ascend within a position, so that one comparison of neighbours shows that none is there twice.

Legend: T positions, K columns of the given likeliest tokens, S sent tokens at all positions together, V vocabulary,
B positions of a block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.bit_words import Words
from stillhouse.protocol.errors import EncodeError, MalformedMessage
from stillhouse.protocol.topk_layout import MAX_TOKENS_KEPT, Block, Shape, read_blocks, write_parts

LOG_TAIL_FLOOR: Final = math.log(1e-7)
"""Smallest tail sent: 1 - sum of float32 probabilities is too imprecise for smaller ones."""
MASS_ROUNDING: Final = 1e-3
_SQRT_RANGE: Final = math.sqrt(40.0)
_TAIL_STEP: Final = -LOG_TAIL_FLOOR / 65_534


@dataclass(frozen=True)
class TopK:
    """A teacher's likeliest tokens at T positions."""

    counts_T: npt.NDArray[np.int64]
    """Tokens per position, at least 1 each; S in total."""
    ids_S: npt.NDArray[np.int32]
    """Position by position; ascending within a position."""
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


# -------------------------------------------------------------------------------------------------------- decode


def decode_top_k(payload: bytes | memoryview) -> TopK:
    """Raises only MalformedMessage, whatever the bytes are. Takes memory in proportion to the payload."""
    return decode_joined([payload])


def decode_joined(payloads: Sequence[bytes | memoryview]) -> TopK:
    """The positions of several payloads of one teacher, one after the other. Raises only MalformedMessage, as
    `decode_top_k` does, and for payloads that differ in their vocabulary or in their bits."""
    blocks = read_blocks(payloads)
    counts_T = np.concatenate([block.counts_T for block in blocks])
    n_sent = sum(sum(block.sizes) for block in blocks)
    ids_S, logprobs_S = np.empty(n_sent, "<u4"), np.empty(n_sent, np.float32)
    tail_T = np.empty(len(counts_T), np.float32)
    first = sent = 0
    for block in blocks:
        sets = _Sets.of(block, first)
        some, own = slice(first, first + len(sets.counts_T)), slice(sent, sent + sum(block.sizes))
        _refuse_ids(block.ids(ids_S[own]), sets)
        tail_T[some] = _logprobs(sets, block.codes(), logprobs_S[own])
        first, sent = some.stop, own.stop
    return TopK(counts_T, ids_S.view("<i4"), logprobs_S, tail_T)


class _Sets(NamedTuple):
    """What is known of the positions of a block before their tokens are read."""

    shape: Shape
    first: int
    """Positions before them."""
    counts_T: npt.NDArray[np.int64]
    ends_T: npt.NDArray[np.int64]
    """Where each position's tokens end."""
    tail_codes_T: npt.NDArray[np.uint16]

    @classmethod
    def of(cls, block: Block, first: int) -> _Sets:
        return cls(block.shape, first, block.counts_T, block.counts_T.cumsum(), block.tail_codes_T)


def _logprobs(sets: _Sets, codes_S: Words, logprobs_S: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Write the log-probs of the sent tokens, and return the tails. Raises MalformedMessage for a position whose
    probabilities are not one minus its tail."""
    if not len(sets.counts_T):
        return np.empty(0, np.float32)
    largest_code = (1 << sets.shape.logprob_bits) - 1
    np.copyto(logprobs_S, codes_S)
    logprobs_S *= logprobs_S
    logprobs_S *= np.float32(-40.0 / largest_code**2)
    covered_T = np.add.reduceat(np.exp(logprobs_S), sets.ends_T - sets.counts_T)
    tail_T, sent_T = (meaning.take(sets.tail_codes_T) for meaning in _of_tail_code())
    wrong_T = np.abs(covered_T - sent_T) > 4.0 * _SQRT_RANGE / largest_code + MASS_ROUNDING
    if wrong_T.any():
        wrong = int(wrong_T.argmax())
        raise MalformedMessage(
            "top-k payload",
            got=f"probabilities that sum to {covered_T[wrong]:.4f} at position {sets.first + wrong}",
            expected=f"{sent_T[wrong]:.4f}, one minus its tail",
        )
    mostly_sent_T = sent_T >= 0.5
    scale_T = np.log(sent_T / covered_T)
    if not mostly_sent_T.all():
        scale_T = np.where(mostly_sent_T, scale_T, np.float32(0.0))
        tail_T = np.where(mostly_sent_T, tail_T, np.log1p(-np.minimum(covered_T, np.float32(0.9))))
    logprobs_S += np.repeat(scale_T, sets.counts_T)
    _at_most_0(logprobs_S)
    return tail_T


def _at_most_0(logprobs: npt.NDArray[np.float32]) -> None:
    """Takes away what rounding has left above 0."""
    if logprobs.size and logprobs.max() > 0.0:  # the search is several times faster than the change
        np.minimum(logprobs, np.float32(0.0), out=logprobs)


@functools.cache
def _of_tail_code() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """What each code of a tail says: the tail, and the mass of the sent tokens, at least 1e-12."""
    tail = -(np.arange(1 << 16) - 1.0) * _TAIL_STEP
    tail[0] = -np.inf
    return tail.astype(np.float32), -np.expm1(np.minimum(tail, -1e-12)).astype(np.float32)


def _refuse_ids(ids_S: Words, sets: _Sets) -> None:
    """Raises MalformedMessage for an id outside the vocabulary, and for one that a position has twice."""
    if len(ids_S) == 0:
        return
    if (largest := int(ids_S.max())) >= sets.shape.vocab_size:
        raise MalformedMessage("top-k payload", got=f"token id {largest}", expected=f"below {sets.shape.vocab_size}")
    ascends_S = np.empty(len(ids_S), np.bool_)
    np.greater(ids_S[1:], ids_S[:-1], out=ascends_S[:-1])
    ascends_S[sets.ends_T - 1] = True  # the next id is another position's
    if not ascends_S.all():
        position = sets.first + int(np.searchsorted(sets.ends_T, int(ascends_S.argmin()), side="right"))
        raise MalformedMessage(
            "top-k payload",
            got=f"ids at position {position} that do not ascend, or one twice",
            expected="different ids, in order",
        )


# -------------------------------------------------------------------------------------------------------- encode


def encode_top_k(
    ids_TK: npt.NDArray[np.integer[Any]],
    logprobs_TK: npt.NDArray[np.floating[Any]],
    *,
    vocab_size: int,
    mass: float = 0.999,
    max_k: int = 256,
    logprob_bits: int = 12,
) -> bytes:
    """Encode the smallest sets of at most `max_k` tokens that cover `mass`. The input has the K likeliest tokens,
    likeliest first.

    Raises EncodeError for log-probs that are not finite or not sorted, probabilities that sum to more than 1, ids
    outside the vocabulary or listed twice, and invalid options, so that no payload is sent which would be refused."""
    _check_options(ids_TK, logprobs_TK, vocab_size, mass, max_k, logprob_bits)
    ids_TK, logprobs_TK = ids_TK[:, :max_k], logprobs_TK[:, :max_k]
    _check_rows(ids_TK, logprobs_TK, vocab_size)
    covered_TK = np.exp(logprobs_TK.astype(np.float64)).cumsum(axis=1)
    counts_T = np.minimum((covered_TK < mass).sum(axis=1) + 1, ids_TK.shape[1])
    shape = Shape(vocab_size, logprob_bits)
    return write_parts(shape, counts_T, *_encode_sets(ids_TK, logprobs_TK, counts_T, shape))


def encode_given(
    ids_TK: npt.NDArray[np.integer[Any]],
    logprobs_TK: npt.NDArray[np.floating[Any]],
    counts_T: npt.NDArray[np.integer[Any]],
    *,
    vocab_size: int,
    logprob_bits: int = 12,
) -> bytes:
    """Encode given sets, of another model's choice or of the whole vocabulary: the first `counts_T` tokens of each row,
    in any order, whatever their probability. Log-probs below -40 are sent as -40.

    Raises EncodeError as `encode_top_k` does, and for counts outside [1, K]."""
    k = ids_TK.shape[1] if ids_TK.ndim == 2 else 0
    _check_options(ids_TK, logprobs_TK, vocab_size, 1.0, max(1, k), logprob_bits)
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
    shape = Shape(vocab_size, logprob_bits)
    return write_parts(shape, counts_T, *_encode_sets(ids_TK, logprobs_TK, counts_T, shape))


def _encode_sets(
    ids_TK: Any, logprobs_TK: Any, counts_T: Any, shape: Shape
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """(tails' codes, ids [S], log-probs' codes [S]) of the first `counts_T` tokens of each row, by id. Raises
    EncodeError for an id that is there twice."""
    n_positions, k = ids_TK.shape
    kept_TK = np.arange(k) < counts_T[:, None]
    left_out_T = 1.0 - np.exp(logprobs_TK.astype(np.float64)).cumsum(axis=1)[np.arange(n_positions), counts_T - 1]
    tails_T = np.clip(np.log(np.maximum(left_out_T, 1e-300)), LOG_TAIL_FLOOR, 0.0)
    tail_codes_T = np.where(counts_T == shape.vocab_size, 0, 1 + np.rint(-tails_T / _TAIL_STEP)).astype(np.uint16)
    largest_code = (1 << shape.logprob_bits) - 1
    roots_S = np.sqrt(np.maximum(-logprobs_TK[kept_TK].astype(np.float64), 0.0))
    codes_S = np.rint(np.minimum(roots_S / _SQRT_RANGE, 1.0) * largest_code).astype(np.uint64)
    return tail_codes_T, *_by_id(ids_TK[kept_TK].astype(np.uint64), codes_S, counts_T, shape)


def _by_id(
    ids_S: npt.NDArray[np.uint64], codes_S: npt.NDArray[np.uint64], counts_T: npt.NDArray[np.int64], shape: Shape
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """The ids of each position in ascending order, with their codes. One number holds position, id and code, so that
    sorting these sorts all."""
    most_positions = 1 << 64 - shape.id_bits - shape.logprob_bits
    if len(counts_T) > most_positions:
        raise EncodeError(f"top-k sets of {len(counts_T)} positions; expected at most {most_positions} in one payload")
    code_bits, id_bits = np.uint64(shape.logprob_bits), np.uint64(shape.id_bits)
    keys_S = np.repeat(np.arange(len(counts_T), dtype=np.uint64), counts_T)
    for bits, values_S in ((id_bits, ids_S), (code_bits, codes_S)):
        keys_S <<= bits
        keys_S |= values_S
    keys_S.sort()
    codes_S = keys_S & np.uint64((1 << shape.logprob_bits) - 1)
    keys_S >>= code_bits
    if (keys_S[1:] == keys_S[:-1]).any():
        raise EncodeError("a token is listed twice at one position")
    return keys_S & np.uint64((1 << shape.id_bits) - 1), codes_S


def _check_options(ids_TK: Any, logprobs_TK: Any, vocab_size: int, mass: float, max_k: int, logprob_bits: int) -> None:
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
