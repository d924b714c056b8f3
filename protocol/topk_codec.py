"""A teacher's log-probs of a set of tokens per position, in few bytes: its likeliest tokens, as many as cover a given
mass, or those that it was asked for. With packed ids, log-probs in 8 to 16 bits, and the mass of the tokens left out.
`protocol.topk_layout` says where what is. NumPy only.

A log-prob's code is sqrt(-logprob) in equal steps up to sqrt(40): fine where the probability is large, coarse where it
is small. A tail's code is its logarithm in equal steps from log 1 down to log 1e-7; code 0 means that nothing is left
out. Decoded probabilities of a position sum to exactly 1: the sent ones are scaled to one minus the tail, or, if the
tail is more than half, the tail becomes one minus their sum. This removes the rounding error that they have in common.

The *rest* is for small vocabularies: a few bits for every other token, in equal steps between the position's lowest and
highest log-prob (in 1/1024 nat). Each token of the vocabulary has a slot of as many bits, in order of ids; the slots of
the sent tokens hold the lowest bits of their codes. A tail alone does not show where in it the student errs;
docs/results has the cost.

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
REST_BITS: Final = 5
"""For the built-in teacher (V = 312) this gives 234 bytes per position and an error of the KL below 1e-3. With 4 bits
the error is larger; 6 bits take more than 256 bytes."""
SMALL_VOCABULARY: Final = 384
"""Largest vocabulary, in tokens, whose rest costs at most 240 bytes per position."""
_SQRT_RANGE: Final = math.sqrt(40.0)
_TAIL_STEP: Final = -LOG_TAIL_FLOOR / 65_534
_RANGE_STEP: Final = 1.0 / 1024


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
    if blocks[0].shape.rest_bits:
        return _decode_whole(blocks)
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


def _decode_whole(blocks: Sequence[Block]) -> TopK:
    """Payloads with the rest. It is scaled to the tail, so that every position has the whole vocabulary."""
    vocab_size, n_positions = blocks[0].shape.vocab_size, sum(len(block.counts_T) for block in blocks)
    logprobs_TV = np.empty((n_positions, vocab_size), np.float32)
    first = 0
    for block in blocks:
        sets = _Sets.of(block, first)
        own_BV = logprobs_TV[first : first + len(sets.counts_T)]
        _write_whole(block, sets, own_BV)
        first += len(own_BV)
    return TopK(
        np.full(n_positions, vocab_size, np.int64),
        np.tile(np.arange(vocab_size, dtype=np.int32), n_positions),
        logprobs_TV.reshape(-1),
        np.full(n_positions, -np.inf, np.float32),
    )


def _write_whole(block: Block, sets: _Sets, logprobs_BV: npt.NDArray[np.float32]) -> None:
    """The log-probs of one block of payloads with the rest."""
    vocab_size, rest_bits, counts_B = sets.shape.vocab_size, sets.shape.rest_bits, sets.counts_T
    ids_S = block.ids()
    _refuse_ids(ids_S, sets)
    slots = block.slots()
    place_S = np.repeat(np.arange(len(counts_B)) * vocab_size, counts_B)
    place_S += ids_S
    codes_S = block.codes().astype(np.uint16)
    codes_S <<= np.uint16(rest_bits)
    codes_S |= slots.take(place_S)
    sent_logprobs_S = np.empty(len(codes_S), np.float32)
    tail_B = _logprobs(sets, codes_S, sent_logprobs_S)
    ranges_B2 = block.ranges().astype(np.float32)
    step_B = np.maximum(ranges_B2[:, 1] - ranges_B2[:, 0], 0.0) * np.float32(-_RANGE_STEP / ((1 << rest_bits) - 1))
    np.copyto(logprobs_BV, slots.reshape(-1, vocab_size))
    logprobs_BV *= step_B[:, None]
    mass_BV = np.exp(logprobs_BV)
    mass_BV.reshape(-1)[place_S] = 0.0
    mass_B = np.einsum("bv->b", mass_BV).astype(np.float64)  # in half the time of `sum`
    scale_B = np.where(counts_B < vocab_size, tail_B - np.log(np.maximum(mass_B, 1e-300)), 0.0)
    logprobs_BV += scale_B[:, None].astype(np.float32)
    logprobs_BV.reshape(-1)[place_S] = sent_logprobs_S
    _at_most_0(logprobs_BV)


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
    shape = Shape(vocab_size, logprob_bits, rest_bits)
    tail_codes_T, ids_S, codes_S = _encode_sets(ids_TK, logprobs_TK, counts_T, shape)
    if not rest_bits:
        return write_parts(shape, counts_T, tail_codes_T, ids_S, codes_S, *_NO_REST)
    ranges_T2, slots_TV = _encode_rest(all_ids_TK, all_logprobs_TK, counts_T, rest_bits)
    position_S = np.repeat(np.arange(len(counts_T)), counts_T)
    slots_TV[position_S, ids_S] = codes_S & np.uint64((1 << rest_bits) - 1)
    codes_S >>= np.uint64(rest_bits)
    return write_parts(shape, counts_T, tail_codes_T, ids_S, codes_S, ranges_T2, slots_TV.reshape(-1))


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
    shape = Shape(vocab_size, logprob_bits, 0)
    return write_parts(shape, counts_T, *_encode_sets(ids_TK, logprobs_TK, counts_T, shape), *_NO_REST)


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


def _encode_rest(
    ids_TV: Any, logprobs_TV: Any, counts_T: npt.NDArray[np.int64], rest_bits: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Ranges of the tokens after the first `counts_T` of each position, and a code for every token by its id, which
    means nothing for those first ones."""
    vocab_size = ids_TV.shape[1]
    distance_TV = -logprobs_TV.astype(np.float64)
    ranges_T2 = np.zeros((len(counts_T), 2), np.int64)
    some_T = counts_T < vocab_size
    if some_T.any():
        # The input is sorted: the likeliest of the rest comes right after the set, the least likely is last.
        nearest_T = distance_TV[some_T, counts_T[some_T]]
        steps_T2 = np.stack([np.floor(nearest_T / _RANGE_STEP), np.ceil(distance_TV[some_T, -1] / _RANGE_STEP)], axis=1)
        ranges_T2[some_T] = np.clip(steps_T2, 0, 65_535)
    near_T1 = ranges_T2[:, :1] * _RANGE_STEP
    width_T1 = np.maximum(ranges_T2[:, 1:] * _RANGE_STEP - near_T1, 1e-9)
    share_TV = np.clip((distance_TV - near_T1) / width_T1, 0.0, 1.0)
    codes_TV = np.rint(share_TV * ((1 << rest_bits) - 1)).astype(np.uint64)
    none = np.uint64(1 << rest_bits)
    slots_TV = np.full(ids_TV.shape, none)
    np.put_along_axis(slots_TV, ids_TV.astype(np.int64), codes_TV, axis=1)
    if (slots_TV == none).any():
        raise EncodeError("a token is listed twice at one position, so that another one is missing")
    return ranges_T2, slots_TV


_NO_REST: Final = (np.zeros((0, 2), np.int64), np.zeros(0, np.uint64))
"""Ranges and slots."""


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
