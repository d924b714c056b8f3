"""The tokens of a rollout at which the student was surest compared with the teacher, and what the teacher would have
written there: by its top-k sets, or by its hidden states and output head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.errors import MalformedMessage
from stillhouse.protocol.payloads.aligned import SET, AlignedSets, decode_aligned
from stillhouse.protocol.payloads.registry import kind_of_bytes
from stillhouse.protocol.topk_codec import TopK, decode_top_k
from stillhouse.tools.view.heads import Heads
from stillhouse.tools.view.rollouts import Read, payload_rows

WORST: Final = 8
"""Tokens per rollout and teacher."""
LEAST_GAP: Final = 0.1
"""Smallest difference that counts, in nats; smaller ones are often only the rounding of two engines."""
ALTERNATIVES: Final = 5


class Alternative(NamedTuple):
    """A token that the teacher might have written, and its log-prob in nats, to three digits."""

    token_id: int
    logprob: float


class _Sets(NamedTuple):
    """The sets of a payload."""

    top: TopK
    has_T: npt.NDArray[np.bool_]
    """Which of its tokens have one: of a teacher with another tokenizer, the first of a span."""


class Worst(NamedTuple):
    """A token at which student and teacher differ most."""

    teacher: int
    """Index into the rollout's teachers."""
    at: int
    """Its place in the rollout."""
    alternatives: tuple[Alternative, ...] | None
    """Likeliest first. None: the record has neither a top-k set nor a hidden state for it."""


def worst_tokens(one: Read, heads: Heads | None = None) -> Iterator[Worst]:
    """Teacher by teacher, the worst first: where student minus teacher is largest, from LEAST_GAP on."""
    gap_ML = one.gaps
    for teacher in range(len(gap_ML)):
        gap_L = np.where(np.isfinite(gap_ML[teacher]), gap_ML[teacher], -np.inf)
        decoded: dict[bytes, _Sets | None] = {}
        for at in np.argsort(-gap_L, kind="stable")[:WORST].tolist():
            if gap_L[at] >= LEAST_GAP:
                yield Worst(teacher, at, _alternatives(one, teacher, at, decoded, heads))


def _alternatives(
    one: Read, teacher: int, at: int, decoded: dict[bytes, _Sets | None], heads: Heads | None
) -> tuple[Alternative, ...] | None:
    for part in reversed(one.parts):
        if (found := payload_rows(part, teacher, at)) is None:
            continue
        payload, n_tokens, row = found
        if kind_of_bytes(payload).needs_head:
            all_V = heads.logprobs(one.item.teachers[teacher], payload, row) if heads is not None else None
            if all_V is not None:
                return _likeliest(np.arange(len(all_V)), all_V)
            continue
        if payload not in decoded:
            decoded[payload] = _decode(payload, n_tokens)
        if (sets := decoded[payload]) is not None and sets.has_T[row]:
            top, which = sets.top, int(sets.has_T[:row].sum())
            start = int(top.counts_T[:which].sum())
            some = slice(start, start + int(top.counts_T[which]))
            return _likeliest(top.ids_S[some], top.logprobs_S[some])
    return None


def _likeliest(ids: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> tuple[Alternative, ...]:
    best = np.argsort(-logprobs, kind="stable")[:ALTERNATIVES].tolist()
    return tuple(Alternative(int(ids[i]), round(float(logprobs[i]), 3)) for i in best)


def _decode(payload: bytes, n_tokens: int) -> _Sets | None:
    """None for what the learner could not read either, and for scores without sets."""
    has_T, body = np.ones(n_tokens, np.bool_), memoryview(payload)
    try:
        if kind_of_bytes(payload) is AlignedSets:
            codes_T, body = decode_aligned(payload, AlignedSets.magic)
            has_T = (codes_T & SET) > 0
        top = decode_top_k(body)
    except MalformedMessage:
        return None
    return _Sets(top, has_T) if len(has_T) == n_tokens and len(top.counts_T) == has_T.sum() else None
