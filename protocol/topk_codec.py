"""A teacher's likeliest tokens in few bytes: as many per position as cover a stated mass, packed ids, log-probs in 8 to
16 bits, and always the mass of the tokens left out. Packed 1-D, numpy only.

    payload   header | counts uint16 [T] | tails uint16 [T] | words, w bits each, without gaps [S]      little-endian
    header    "TK", version uint8, log-prob bits b uint8, T uint32, V uint32
    word      id in bits(V - 1) bits, above it the log-prob's code in b bits;   w = both together

A log-prob's code is sqrt(-logprob) in equal steps up to sqrt(40): fine where the probability is large, coarse where it
is small. A tail's is its logarithm in equal steps from log 1 down to log 1e-7; code 0 says that nothing is left out.
Decoded, a position's probabilities sum to exactly 1: those sent are scaled to what the tail leaves, or where the tail
holds more than half, it becomes what they leave. That takes the common part of the rounding out.

Legend: T positions, K columns of the given likeliest tokens, S tokens kept at all positions together, V vocabulary.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from protocol.errors import EncodeError, MalformedMessage

LOG_TAIL_FLOOR: Final = math.log(1e-7)
"""A tail is never sent as less: 1 - sum of float32 probabilities says nothing about smaller ones."""
MAX_TOKENS_KEPT: Final = 4096
"""At one position."""
MASS_ROUNDING: Final = 1e-3
_HEADER: Final = struct.Struct("<2sBBII")
_MAGIC: Final = b"TK"
_VERSION: Final = 1
_SQRT_RANGE: Final = math.sqrt(40.0)
_TAIL_STEP: Final = -LOG_TAIL_FLOOR / 65_534
_LANES: Final = 8
"""Words of w bits that fill w bytes."""

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TopK:
    """What a teacher said of T positions."""

    counts_T: npt.NDArray[np.int64]
    """At least 1 each; S in all."""
    ids_S: npt.NDArray[np.int32]
    """Position by position, likeliest first; all different within one."""
    logprobs_S: npt.NDArray[np.float32]
    tail_T: npt.NDArray[np.float32]
    """log of the mass of all other tokens; -inf where there is no other."""

    def padded(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """(ids [T, K], log-probs [T, K]) with K the largest count; behind a position's count 0 and -inf."""
        columns_TK = np.arange(int(self.counts_T.max(initial=1))) < self.counts_T[:, None]
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
) -> bytes:
    """The smallest sets covering `mass`, of at most `max_k` tokens, from the K likeliest tokens, likeliest first.

    Raises EncodeError for log-probs that are not finite or not sorted, probabilities that sum to more than 1, ids
    outside the vocabulary or named twice, and options that cannot be: nothing is sent that would be refused."""
    _check_options(ids_TK, logprobs_TK, vocab_size, mass, max_k, logprob_bits)
    ids_TK, logprobs_TK = ids_TK[:, :max_k], logprobs_TK[:, :max_k]
    _check_rows(ids_TK, logprobs_TK, vocab_size)
    covered_TK = np.exp(logprobs_TK.astype(np.float64)).cumsum(axis=1)
    n_tokens, k = ids_TK.shape
    counts_T = np.minimum((covered_TK < mass).sum(axis=1) + 1, k)
    kept_TK = np.arange(k) < counts_T[:, None]
    left_out_T = 1.0 - covered_TK[np.arange(n_tokens), counts_T - 1]
    tails_T = np.clip(np.log(np.maximum(left_out_T, 1e-300)), LOG_TAIL_FLOOR, 0.0)
    tail_codes_T = np.where(counts_T == vocab_size, 0, 1 + np.rint(-tails_T / _TAIL_STEP)).astype("<u2")
    id_bits, largest_code = _id_bits(vocab_size), (1 << logprob_bits) - 1
    roots_S = np.sqrt(np.maximum(-logprobs_TK[kept_TK].astype(np.float64), 0.0))
    codes_S = np.rint(np.minimum(roots_S / _SQRT_RANGE, 1.0) * largest_code).astype(np.uint64)
    words_S = ids_TK[kept_TK].astype(np.uint64) | (codes_S << np.uint64(id_bits))
    header = _HEADER.pack(_MAGIC, _VERSION, logprob_bits, n_tokens, vocab_size)
    body = _pack_words(words_S, id_bits + logprob_bits)
    return b"".join((header, counts_T.astype("<u2").tobytes(), tail_codes_T.tobytes(), body.tobytes()))


def decode_top_k(payload: bytes | memoryview) -> TopK:
    """Raises MalformedMessage, and nothing else whatever the bytes are. Takes memory in proportion to the payload."""
    counts_T, tail_codes_T, vocab_size, logprob_bits, body = _read_parts(payload)
    id_bits = _id_bits(vocab_size)
    words_S = _unpack_words(body, int(counts_T.sum()), id_bits + logprob_bits)
    ids_S = (words_S & np.uint64((1 << id_bits) - 1)).astype(np.int64)
    codes_S = (words_S >> np.uint64(id_bits)).astype(np.float64)
    firsts_T = np.cumsum(counts_T) - counts_T
    _refuse_ids(ids_S, counts_T, vocab_size)
    step = _SQRT_RANGE / ((1 << logprob_bits) - 1)
    logprobs_S = -np.square(codes_S * step)
    tail_T = np.where(tail_codes_T == 0, -np.inf, -(tail_codes_T.astype(np.float64) - 1.0) * _TAIL_STEP)
    if len(counts_T) == 0:
        return TopK(counts_T, ids_S.astype(np.int32), logprobs_S.astype(np.float32), tail_T.astype(np.float32))
    covered_T = np.add.reduceat(np.exp(logprobs_S), firsts_T)
    rest_T = -np.expm1(np.minimum(tail_T, -1e-12))
    wrong_T = np.abs(covered_T - rest_T) > 4.0 * step + MASS_ROUNDING
    if wrong_T.any():
        raise MalformedMessage(
            "top-k payload",
            got=f"probabilities of {covered_T[wrong_T][0]:.4f} in all at position {int(np.flatnonzero(wrong_T)[0])}",
            expected=f"{rest_T[wrong_T][0]:.4f}, which its tail leaves",
        )
    mostly_sent_T = rest_T >= 0.5
    logprobs_S += np.repeat(np.where(mostly_sent_T, np.log(rest_T / covered_T), 0.0), counts_T)
    tail_T = np.where(mostly_sent_T, tail_T, np.log1p(-np.minimum(covered_T, 0.9)))
    logprobs_S = np.minimum(logprobs_S, 0.0).astype(np.float32)
    return TopK(counts_T, ids_S.astype(np.int32), logprobs_S, tail_T.astype(np.float32))


# ---------------------------------------------------------------------------------------------------------- bits


def _pack_words(words_S: npt.NDArray[np.uint64], width: int) -> Bytes:
    """Words of `width` <= 48 bits one behind the other, lowest bit first."""
    n_words = len(words_S)
    padded = np.zeros(-(-n_words // _LANES) * _LANES, np.uint64)
    padded[:n_words] = words_S
    lanes = padded.reshape(-1, _LANES)
    packed = np.zeros((len(lanes), width), np.uint8)
    for lane in range(_LANES):
        first_byte, shift = divmod(lane * width, 8)
        value = lanes[:, lane] << np.uint64(shift)
        for byte in range(-(-(shift + width) // 8)):
            packed[:, first_byte + byte] |= (value >> np.uint64(8 * byte)).astype(np.uint8)
    return packed.reshape(-1)[: _n_bytes(n_words, width)]


def _unpack_words(packed: Bytes, n_words: int, width: int) -> npt.NDArray[np.uint64]:
    blocks = np.zeros((-(-n_words // _LANES), width), np.uint8)
    blocks.reshape(-1)[: len(packed)] = packed
    words = np.zeros((len(blocks), _LANES), np.uint64)
    for lane in range(_LANES):
        first_byte, shift = divmod(lane * width, 8)
        value = np.zeros(len(blocks), np.uint64)
        for byte in range(-(-(shift + width) // 8)):
            value |= blocks[:, first_byte + byte].astype(np.uint64) << np.uint64(8 * byte)
        words[:, lane] = (value >> np.uint64(shift)) & np.uint64((1 << width) - 1)
    return words.reshape(-1)[:n_words]


def _n_bytes(n_words: int, width: int) -> int:
    return -(-n_words * width // 8)


def _id_bits(vocab_size: int) -> int:
    return max(1, (vocab_size - 1).bit_length())


# -------------------------------------------------------------------------------------------------------- checks


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
    if (np.diff(np.sort(ids_TK, axis=1), axis=1) == 0).any():
        raise EncodeError("a token is named twice at one position")


def _read_parts(payload: bytes | memoryview) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint16], int, int, Bytes]:
    """(counts, tail codes, vocabulary size, log-prob bits, packed words), lengths checked."""
    if len(payload) < _HEADER.size:
        raise MalformedMessage("top-k payload", got=f"{len(payload)} bytes", expected=f"at least {_HEADER.size}")
    magic, version, logprob_bits, n_tokens, vocab_size = _HEADER.unpack_from(payload)
    if (magic, version) != (_MAGIC, _VERSION):
        raise MalformedMessage("top-k payload", got=f"{magic!r} {version}", expected=f"{_MAGIC!r} {_VERSION}")
    if not (8 <= logprob_bits <= 16 and 1 <= vocab_size < 1 << 31):
        got = f"{logprob_bits} log-prob bits, a vocabulary of {vocab_size}"
        raise MalformedMessage("top-k payload", got=got, expected="8 to 16 bits, 1 to 2^31 - 1 tokens")
    body_at = _HEADER.size + 4 * n_tokens
    if len(payload) < body_at:
        raise MalformedMessage("top-k payload", got=f"{len(payload)} bytes", expected=f"at least {body_at}")
    counts_T = np.frombuffer(payload, "<u2", n_tokens, _HEADER.size).astype(np.int64)
    tail_codes_T = np.frombuffer(payload, "<u2", n_tokens, _HEADER.size + 2 * n_tokens)
    most = min(vocab_size, MAX_TOKENS_KEPT)
    if n_tokens and not 1 <= counts_T.min() <= counts_T.max() <= most:
        got = f"{counts_T.min()} to {counts_T.max()} tokens at a position"
        raise MalformedMessage("top-k payload", got=got, expected=f"1 to {most}")
    if ((tail_codes_T == 0) != (counts_T == vocab_size)).any():
        raise MalformedMessage(
            "top-k payload",
            got="no tail where tokens are left out, or one where none are",
            expected="one where some are",
        )
    width = _id_bits(vocab_size) + logprob_bits
    expected = body_at + _n_bytes(int(counts_T.sum()), width)
    if len(payload) != expected:
        raise MalformedMessage("top-k payload", got=f"{len(payload)} bytes", expected=f"{expected}")
    return counts_T, tail_codes_T, vocab_size, logprob_bits, np.frombuffer(payload, np.uint8, offset=body_at)


def _refuse_ids(ids_S: npt.NDArray[np.int64], counts_T: npt.NDArray[np.int64], vocab_size: int) -> None:
    if len(ids_S) == 0:
        return
    if ids_S.max() >= vocab_size:
        raise MalformedMessage("top-k payload", got=f"token id {ids_S.max()}", expected=f"ids below {vocab_size}")
    keys_S = np.repeat(np.arange(len(counts_T)), counts_T) * vocab_size + ids_S
    keys_S.sort()
    if (np.diff(keys_S) == 0).any():
        raise MalformedMessage("top-k payload", got="a token named twice at one position", expected="different tokens")
