"""The tokens of a rollout at which the student was surest compared with the teacher, and what the teacher would have
written there, where the record has its top-k sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from launch.view.rollouts import Read, payload_rows
from protocol.errors import MalformedMessage
from protocol.hidden_codec import is_hidden
from protocol.topk_codec import TopK, decode_top_k

WORST: Final = 8
"""Tokens per rollout and teacher."""
LEAST_GAP: Final = 0.1
"""Smallest difference that counts, in nats; smaller ones are often only the rounding of two engines."""
ALTERNATIVES: Final = 5


class Alternative(NamedTuple):
    """A token that the teacher might have written, and its log-prob in nats, to three digits."""

    token_id: int
    logprob: float


class Worst(NamedTuple):
    """A token at which student and teacher differ most."""

    teacher: int
    """Index into the rollout's teachers."""
    at: int
    """Its place in the rollout."""
    alternatives: tuple[Alternative, ...] | None
    """Likeliest first. None: the record has no top-k set for it."""


def worst_tokens(one: Read) -> Iterator[Worst]:
    """Teacher by teacher, the worst first: where student minus teacher is largest, from LEAST_GAP on."""
    gap_ML = one.gaps
    for teacher in range(len(gap_ML)):
        gap_L = np.where(np.isfinite(gap_ML[teacher]), gap_ML[teacher], -np.inf)
        decoded: dict[bytes, TopK | None] = {}
        for at in np.argsort(-gap_L, kind="stable")[:WORST].tolist():
            if gap_L[at] >= LEAST_GAP:
                yield Worst(teacher, at, _alternatives(one, teacher, at, decoded))


def _alternatives(
    one: Read, teacher: int, at: int, decoded: dict[bytes, TopK | None]
) -> tuple[Alternative, ...] | None:
    for part in reversed(one.parts):
        if (found := payload_rows(part, teacher, at)) is None:
            continue
        payload, n_tokens, row = found
        if payload not in decoded:
            decoded[payload] = _decode(payload, n_tokens)
        if (top := decoded[payload]) is not None:
            start = int(top.counts_T[:row].sum())
            some = slice(start, start + int(top.counts_T[row]))
            ids, logprobs = top.ids_S[some], top.logprobs_S[some]
            best = np.argsort(-logprobs, kind="stable")[:ALTERNATIVES].tolist()
            return tuple(Alternative(int(ids[i]), round(float(logprobs[i]), 3)) for i in best)
    return None


def _decode(payload: bytes, n_tokens: int) -> TopK | None:
    """None for hidden states, which need the teacher's output head, and for what the learner could not read either."""
    try:
        top = None if is_hidden(payload) else decode_top_k(payload)
    except MalformedMessage:
        return None
    return top if top is not None and len(top.counts_T) == n_tokens else None
