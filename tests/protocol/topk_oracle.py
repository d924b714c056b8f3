"""Slow encoder and decoder of top-k payloads: bits from long integers, everything position by position in Python's
float64. Nothing here is imported from the code that they check, but the type of its results."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence

import numpy as np

from stillhouse.protocol.topk_codec import TopK
from tests.protocol.slow_planes import slow_pack, slow_unpack

LOWEST_TAIL = math.log(1e-7)
HEADER = "<2sBBBBHII"


class Borderline(Exception):
    """A sum of probabilities so near to what is allowed that the last digits decide."""


def slow_encode(
    ids_TK: Sequence[Sequence[int]],
    logprobs_TK: Sequence[Sequence[float]],
    vocab: int,
    mass: float,
    max_k: int,
    bits: int,
) -> bytes:
    id_bits = max(1, (vocab - 1).bit_length())
    counts, tails, ids_sent, codes = list[int](), list[int](), list[int](), list[int]()
    for ids, logprobs in zip(ids_TK, logprobs_TK, strict=True):
        covered, k = 0.0, 0
        while k < min(max_k, len(ids)) and (k == 0 or covered < mass):
            covered += math.exp(logprobs[k])
            k += 1
        code_of = {
            token: round(min(math.sqrt(-min(logprob, 0.0)) / math.sqrt(40), 1.0) * (2**bits - 1))
            for token, logprob in zip(ids[:k], logprobs[:k], strict=True)
        }
        ids_sent += sorted(code_of)
        codes += [code_of[token] for token in sorted(code_of)]
        tail = min(0.0, max(LOWEST_TAIL, math.log(max(1 - covered, 1e-300))))
        counts.append(k)
        tails.append(0 if k == vocab else 1 + round(-tail / (-LOWEST_TAIL / 65534)))
    widest = max(counts, default=1)
    count_bits = max((widest - count).bit_length() for count in [*counts, widest])
    head = struct.pack(HEADER, b"TK", 3, bits, 0, count_bits, widest, len(counts), vocab)
    sets = slow_pack(ids_sent, id_bits) + slow_pack(codes, bits)
    shorts = slow_pack([widest - count for count in counts], count_bits)
    return head + shorts + struct.pack(f"<{len(tails)}H", *tails) + sets


def slow_decode(payload: bytes) -> TopK:
    """Raises ValueError for what `decode_top_k` must refuse in a payload whose lengths fit its header."""
    _, _, bits, _, count_bits, widest, n_positions, vocab = struct.unpack_from(HEADER, payload)
    shorts, left = slow_unpack(payload[struct.calcsize(HEADER) :], n_positions, count_bits)
    counts = [widest - short for short in shorts]
    tail_codes = struct.unpack_from(f"<{n_positions}H", left)
    ids, left = slow_unpack(left[2 * n_positions :], sum(counts), max(1, (vocab - 1).bit_length()))
    codes, _ = slow_unpack(left, sum(counts), bits)

    all_ids, all_logprobs, tails, at = list[int](), list[float](), list[float](), 0
    for t, count in enumerate(counts):
        own, own_codes = ids[at : at + count], codes[at : at + count]
        at += count
        if max(own) >= vocab or any(after <= before for before, after in itertools.pairwise(own)):
            raise ValueError("an id outside the vocabulary, twice, or not in order")
        sent, tail = _set(own_codes, tail_codes[t], bits)
        all_ids, all_logprobs, tails = all_ids + own, all_logprobs + sent, [*tails, tail]
    return TopK(
        np.array(counts, np.int64),
        np.array(all_ids, np.int32),
        np.array(all_logprobs, np.float32),
        np.array(tails, np.float32),
    )


def _set(codes: list[int], tail_code: int, bits: int) -> tuple[list[float], float]:
    """The log-probs of one position's sent tokens, and its tail."""
    step = math.sqrt(40.0) / (2**bits - 1)
    logprobs = [-((code * step) ** 2) for code in codes]
    tail = -math.inf if tail_code == 0 else -(tail_code - 1) * (-LOWEST_TAIL / 65_534)
    covered, expected = sum(map(math.exp, logprobs)), 1.0 if tail_code == 0 else -math.expm1(min(tail, -1e-12))
    off = abs(covered - expected) - (4.0 * step + 1e-3)
    if abs(off) < 1e-5:
        raise Borderline
    if off > 0:
        raise ValueError("not a distribution")
    if expected < 0.5:
        return logprobs, math.log1p(-min(covered, 0.9))
    scale = math.log(expected / covered)
    return [min(logprob + scale, 0.0) for logprob in logprobs], tail
