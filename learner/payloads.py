"""Reads the payloads that teachers send beside their log-probs: rows for the tokens to train, of one teacher each.

Legend: T tokens of a payload, R rows of one teacher, K columns, S draws per row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.errors import MalformedMessage
from stillhouse.protocol.hidden_codec import Bits, check_hidden, decode_hidden, head_of_states, is_hidden
from stillhouse.protocol.messages import BatchItem
from stillhouse.protocol.topk_codec import TopK, decode_joined
from stillhouse.protocol.topk_layout import n_positions


class PayloadError(ValueError):
    """A teacher's payload is missing or unusable; the message names the teacher."""


@dataclass(frozen=True)
class TopRows:
    """One teacher's top-k sets. Columns past a row's `counts_R` are padding."""

    ids_RK: npt.NDArray[np.int64]
    logprobs_RK: npt.NDArray[np.float32]
    tail_R: npt.NDArray[np.float32]
    counts_R: npt.NDArray[np.int64]
    uniform_RS: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    """Random numbers per row, for a divergence that draws tokens (learner.objectives.distributions); else empty."""

    @classmethod
    def of(cls, top: TopK, rows: npt.NDArray[np.int64]) -> TopRows:
        """The sets of some positions."""
        ids_TK, logprobs_TK = top.padded()
        if len(rows) == len(top.counts_T):  # all of them: nothing to copy
            return cls(ids_TK, logprobs_TK, top.tail_T, top.counts_T)
        return cls(ids_TK[rows], logprobs_TK[rows], top.tail_T[rows], top.counts_T[rows])

    def at(self, rows: npt.NDArray[np.int64]) -> TopRows:
        """Some rows."""
        drawn = self.uniform_RS[rows] if len(self.uniform_RS) else self.uniform_RS
        return TopRows(self.ids_RK[rows], self.logprobs_RK[rows], self.tail_R[rows], self.counts_R[rows], drawn)

    @property
    def n_rows(self) -> int:
        return len(self.counts_R)

    @classmethod
    def joined(cls, parts: Sequence[TopRows]) -> TopRows:
        """Concatenated rows, padded to the largest K."""
        if len(parts) == 1:
            return parts[0]
        k = max((part.ids_RK.shape[1] for part in parts), default=1)
        n_rows = sum(len(part.counts_R) for part in parts)
        ids_RK = np.zeros((n_rows, k), np.int64)
        logprobs_RK = np.full((n_rows, k), -np.inf, np.float32)
        start = 0
        for part in parts:
            n, width = part.ids_RK.shape
            ids_RK[start : start + n, :width] = part.ids_RK
            logprobs_RK[start : start + n, :width] = part.logprobs_RK
            start += n
        tails = [part.tail_R for part in parts] or [np.zeros(0, np.float32)]
        counts = [part.counts_R for part in parts] or [np.zeros(0, np.int64)]
        uniforms = [part.uniform_RS for part in parts] or [np.zeros((0, 0))]
        return cls(ids_RK, logprobs_RK, np.concatenate(tails), np.concatenate(counts), np.concatenate(uniforms))


@dataclass(frozen=True)
class HiddenRows:
    """One teacher's last hidden states, to which the learner applies the teacher's output head."""

    teacher: str
    """Its pool."""
    states_RH: Bits
    """Bits of bfloat16."""
    head: int = 0
    """Identity of the head that they belong to; 0: not known."""
    uniform_RS: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    """As in TopRows."""

    def at(self, rows: npt.NDArray[np.int64]) -> HiddenRows:
        """Some rows."""
        drawn = self.uniform_RS[rows] if len(self.uniform_RS) else self.uniform_RS
        return HiddenRows(self.teacher, self.states_RH[rows], self.head, drawn)

    @property
    def n_rows(self) -> int:
        return len(self.states_RH)

    @classmethod
    def joined(cls, parts: Sequence[HiddenRows]) -> HiddenRows:
        """Concatenated rows of one teacher. Raises PayloadError for states of different sizes."""
        sizes = sorted({part.states_RH.shape[1] for part in parts})
        if len(sizes) > 1:
            raise PayloadError(f"teacher {parts[0].teacher!r} sent hidden states of {sizes} numbers; expected one size")
        heads = {part.head for part in parts if part.head}
        if len(heads) > 1:
            raise PayloadError(
                f"teacher {parts[0].teacher!r} sent hidden states of {len(heads)} output heads; expected one"
            )
        states = np.concatenate([part.states_RH for part in parts])
        return cls(parts[0].teacher, states, max(heads, default=0), np.concatenate([part.uniform_RS for part in parts]))


Rows: TypeAlias = TopRows | HiddenRows


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenated rows of one teacher. Raises PayloadError where it sent payloads of two kinds."""
    hidden = [part for part in parts if isinstance(part, HiddenRows)]
    if hidden and len(hidden) < len(parts):
        raise PayloadError(f"teacher {hidden[0].teacher!r} sent hidden states and top-k sets; expected one of them")
    if hidden:
        return HiddenRows.joined(hidden)
    return TopRows.joined([part for part in parts if isinstance(part, TopRows)])


def read_payloads(
    item: BatchItem,
    payloads: npt.NDArray[np.uint8],
    trained: npt.NDArray[np.int64],
    vocab_tokens: int,
    *,
    teachers: Collection[str] | None = None,
) -> dict[str, Rows]:
    """Teacher -> top-k sets or hidden states of the tokens at the ascending offsets `trained`. `teachers`: those whose
    payloads are read; default: all of the item. Raises PayloadError if one is missing, or does not fit its tokens or
    the vocabulary."""
    read = [name for name in item.teachers if teachers is None or name in teachers]
    pieces: dict[str, list[_Piece]] = {name: [] for name in read}
    at = 0
    for piece in item.top_k:
        body = payloads[at : at + piece.n_bytes].data
        at += piece.n_bytes
        if not 0 <= piece.teacher < len(item.teachers):
            raise PayloadError(f"a top-k set of teacher {piece.teacher}; it has {len(item.teachers)}")
        if (name := item.teachers[piece.teacher]) in pieces:
            inside = trained[(trained >= piece.start) & (trained < piece.end)]
            pieces[name].append(_Piece(body, piece.end - piece.start, inside, inside - piece.start))
    found = {name: _rows(name, own, vocab_tokens) for name, own in pieces.items()}
    for name, own in pieces.items():
        sent = np.concatenate([one.trained for one in own]) if own else np.zeros(0, np.int64)
        if not np.array_equal(sent, trained):
            missing = np.setdiff1d(trained, sent)
            raise PayloadError(
                f"teacher {name!r} sent no top-k set for {len(missing)} of the {len(trained)} tokens to be trained "
                f"(first: {missing[:1].tolist()}), nor its hidden state; the divergence needs one for each: set "
                "teacher.top_k, e.g. to 256, or teacher.payload = hidden"
                if len(missing)
                else f"the payloads of teacher {name!r} overlap or are not in order"
            )
    return found


class _Piece(NamedTuple):
    """One payload of a teacher."""

    body: memoryview
    n_tokens: int
    """Tokens that it should have rows for."""
    trained: npt.NDArray[np.int64]
    """Offsets in the rollout of those that are trained."""
    rows: npt.NDArray[np.int64]
    """Their rows in the payload."""


def _rows(name: str, pieces: Sequence[_Piece], vocab_tokens: int) -> Rows:
    """The rows of the trained tokens of all payloads of a teacher: top-k sets are decoded together."""
    if not pieces:
        return TopRows.joined([])
    hidden = [is_hidden(one.body) for one in pieces]
    if any(hidden) and not all(hidden):
        raise PayloadError(f"teacher {name!r} sent hidden states and top-k sets; expected one of them")
    what, rows = "hidden states" if any(hidden) else "top-k sets", list[npt.NDArray[np.int64]]()
    before = 0
    try:
        for one in pieces:
            n_tokens = (check_hidden if any(hidden) else n_positions)(one.body)
            if n_tokens != one.n_tokens:
                raise PayloadError(f"teacher {name!r}: {what} of {n_tokens} tokens, expected {one.n_tokens}")
            rows.append(one.rows + before)
            before += n_tokens
        if any(hidden):
            states = [(decode_hidden(one.body)[one.rows], head_of_states(one.body)) for one in pieces]
            return HiddenRows.joined([HiddenRows(name, *one) for one in states])
        top = _fitting(name, decode_joined([one.body for one in pieces]), vocab_tokens)
    except MalformedMessage as error:
        raise PayloadError(f"teacher {name!r}: {error}") from error
    return TopRows.of(top, np.concatenate(rows))


def _fitting(name: str, top: TopK, vocab_tokens: int) -> TopK:
    if len(top.ids_S) and int(top.ids_S.max()) >= vocab_tokens:
        raise PayloadError(
            f"teacher {name!r}: token id {int(top.ids_S.max())}, the student's vocabulary has {vocab_tokens} tokens; "
            "both need the same token-to-id map"
        )
    return top
