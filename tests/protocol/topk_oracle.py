"""Slow decoder of top-k payloads: bits from one long integer, ids checked position by position. Only the arithmetic is
in NumPy, and in the order of `protocol.topk_codec`, so that its results can be compared bit by bit."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from protocol.topk_codec import LOG_TAIL_FLOOR, TopK


def slow_decode(payload: bytes) -> TopK:
    """Raises ValueError for what `decode_top_k` must refuse in a payload whose lengths fit its header."""
    _, _, bits, rest_bits, n_tokens, vocab = struct.unpack_from("<2sBBBII", payload)
    counts = list(struct.unpack_from(f"<{n_tokens}H", payload, 13))
    tail_codes = np.array(struct.unpack_from(f"<{n_tokens}H", payload, 13 + 2 * n_tokens), np.float64)
    id_bits = max(1, (vocab - 1).bit_length())
    body_at = 13 + 4 * n_tokens
    words = _words(payload[body_at:], sum(counts), id_bits + bits)
    sets, at = list[list[int]](), 0
    for count in counts:
        sets.append([word & ((1 << id_bits) - 1) for word in words[at : at + count]])
        at += count
        if max(sets[-1]) >= vocab or len(set(sets[-1])) < count:
            raise ValueError("an id outside the vocabulary, or twice")

    step = math.sqrt(40.0) / ((1 << bits) - 1)
    logprobs_S = -np.square(np.array([word >> id_bits for word in words], np.float64) * step)
    tail_T = np.where(tail_codes == 0, -np.inf, -(tail_codes - 1.0) * (-LOG_TAIL_FLOOR / 65_534))
    if n_tokens:
        covered_T = np.add.reduceat(np.exp(logprobs_S), np.cumsum(counts) - counts)
        one_minus_tail_T = -np.expm1(np.minimum(tail_T, -1e-12))
        if (np.abs(covered_T - one_minus_tail_T) > 4.0 * step + 1e-3).any():
            raise ValueError("not a distribution")
        scale_T = np.where(one_minus_tail_T >= 0.5, np.log(one_minus_tail_T / covered_T), 0.0)
        tail_T = np.where(one_minus_tail_T >= 0.5, tail_T, np.log1p(-np.minimum(covered_T, 0.9)))
        logprobs_S = np.minimum(logprobs_S + np.repeat(scale_T, counts), 0.0)
    ids, logprobs_S, tail_T = sum(sets, list[int]()), logprobs_S.astype(np.float32), tail_T.astype(np.float32)
    if not rest_bits:
        return TopK(np.array(counts, np.int64), np.array(ids, np.int32), logprobs_S, tail_T)

    ranges_at = body_at + -(-sum(counts) * (id_bits + bits) // 8)
    ranges = struct.unpack_from(f"<{2 * n_tokens}H", payload, ranges_at)
    codes = _words(payload[ranges_at + 4 * n_tokens :], n_tokens * vocab - sum(counts), rest_bits)
    all_ids, all_logprobs, at, rest_at = list[int](), list[Any](), 0, 0
    for t, one_set in enumerate(sets):
        left_out = sorted(set(range(vocab)) - set(one_set))
        width = max(ranges[2 * t + 1] / 1024 - ranges[2 * t] / 1024, 0.0) / ((1 << rest_bits) - 1)
        weights = -np.array(codes[rest_at : rest_at + len(left_out)], np.float64) * width
        mass = 0.0
        for weight in np.exp(weights).tolist():
            mass += weight
        scale = tail_T[t] - np.log(np.maximum(mass, 1e-300)) if left_out else 0.0
        all_ids += [*one_set, *left_out]
        all_logprobs += [*logprobs_S[at : at + len(one_set)], *(weights + scale).astype(np.float32)]
        at, rest_at = at + len(one_set), rest_at + len(left_out)
    return TopK(
        np.full(n_tokens, vocab, np.int64),
        np.array(all_ids, np.int32),
        np.array(all_logprobs, np.float32),
        np.full(n_tokens, -np.inf, np.float32),
    )


def _words(packed: bytes, n_words: int, width: int) -> list[int]:
    number = int.from_bytes(packed, "little")
    return [(number >> (i * width)) & ((1 << width) - 1) for i in range(n_words)]
