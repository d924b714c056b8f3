"""A teacher's log-probs of its likeliest tokens, and the mass of all others (bytes: protocol.topk_codec). NumPy only.

Ids past the tokenizer's last one are padding rows of the embedding, not tokens, and are never sent.

Legend: T tokens of a payload, K columns from the engine, V tokens of the vocabulary, R rows of one teacher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.errors import EncodeError
from stillhouse.protocol.payloads.kind import (
    Encoder,
    ModelSizes,
    Packed,
    PayloadError,
    PayloadKind,
    PayloadOptions,
    PayloadPart,
    PayloadRows,
    ScoreOptions,
    ScoreResult,
    TopIds,
    Vocabulary,
)
from stillhouse.protocol.topk_codec import TopK, decode_joined, encode_given, encode_top_k
from stillhouse.protocol.topk_layout import (
    HEADER_BYTES,
    MAX_TOKENS_KEPT,
    check_payload,
    most_bytes,
    n_positions,
)

SMALL_VOCABULARY: Final = 384
"""Largest vocabulary, in tokens, of which every token is sent by default: at most 1,012 bytes per position, within
buffer.max_top_k_bytes."""
PADDING_ROWS: Final = 8
"""Tokens that are asked for beyond k: padding rows may be among the engine's likeliest."""


class SetsKind(PayloadKind):
    """Sets of tokens, whoever chose them."""

    payload: ClassVar[str] = "top_k"
    what: ClassVar[str] = "the sets"
    magic: ClassVar[bytes] = b"TK"
    header_bytes: ClassVar[int] = HEADER_BYTES
    exact: ClassVar[bool] = False

    def most_bytes(self, sizes: ModelSizes) -> int | None:
        rows = sizes.vocabulary
        return None if rows is None else most_bytes(rows, self.options.top_k)

    @classmethod
    def n_tokens(cls, payload: Packed) -> int:
        return check_payload(payload)

    @classmethod
    def read(cls, teacher: str, pieces: Sequence[PayloadPart], vocab_tokens: int) -> TopRows:
        rows, before = list[npt.NDArray[np.int64]](), 0
        for one in pieces:
            if (n_tokens := n_positions(one.body)) != one.n_tokens:
                raise PayloadError(f"teacher {teacher!r}: top-k sets of {n_tokens} tokens, expected {one.n_tokens}")
            rows.append(one.rows + before)
            before += n_tokens
        top = decode_joined([one.body for one in pieces])
        if len(top.ids_S) and int(top.ids_S.max()) >= vocab_tokens:
            raise PayloadError(
                f"teacher {teacher!r}: token id {int(top.ids_S.max())}, the student's vocabulary has {vocab_tokens} "
                "tokens; both need the same token-to-id map"
            )
        return TopRows.of(top, np.concatenate(rows))


class TopKSets(SetsKind):
    @classmethod
    def chosen_by(cls, options: PayloadOptions) -> bool:
        return options.payload == cls.payload and options.top_k > 0 and options.top_k_of == "teacher"

    def setting(self, key: str) -> tuple[str, object]:
        return f"{key}.top_k", self.options.top_k

    def mistakes(self, key: str, sizes: ModelSizes) -> Iterator[str]:
        rows = sizes.vocabulary
        if rows is not None and self.options.tail == "each" and rows > MAX_TOKENS_KEPT:
            yield (
                f"{key}.tail: got 'each' with {rows} rows in the embedding, expected at most {MAX_TOKENS_KEPT}; "
                "use 'pooled'"
            )

    def sends_each(self, vocab_tokens: int) -> bool:
        """Whether the sets are the whole vocabulary."""
        tail = self.options.tail
        return tail == "each" or (tail == "auto" and vocab_tokens <= SMALL_VOCABULARY)

    def most_bytes(self, sizes: ModelSizes) -> int | None:
        rows = sizes.vocabulary
        return most_bytes(rows, rows) if rows is not None and self.sends_each(rows) else super().most_bytes(sizes)

    def encoder(self, engine: Vocabulary, vocab_tokens: int) -> TopKEncoder:
        each, n_rows = self.sends_each(vocab_tokens), engine.vocab_size
        padding = min(PADDING_ROWS, n_rows - vocab_tokens)
        asked = n_rows if each else min(self.options.top_k + padding, n_rows)
        options = ScoreOptions(top_k=asked)
        return TopKEncoder(vocab_tokens, options, self.options.top_k, self.options.top_mass, each)


@dataclass(frozen=True)
class TopKEncoder(Encoder):
    vocab_tokens: int
    """V."""
    options: ScoreOptions
    """All rows of the engine where every token is sent."""
    max_k: int
    mass: float
    each: bool
    """Every token is sent."""

    def encode(self, result: ScoreResult, place: slice, given: TopIds | None) -> bytes:
        if result.top_ids is None or result.top_logprobs is None:
            return no_sets(self.vocab_tokens)
        ids_TK, logprobs_TK = self._without_padding(result.top_ids[place], result.top_logprobs[place])
        if not self.each:
            return encode_top_k(ids_TK, logprobs_TK, vocab_size=self.vocab_tokens, mass=self.mass, max_k=self.max_k)
        if ids_TK.shape[1] != self.vocab_tokens:
            raise EncodeError(f"got {ids_TK.shape[1]} tokens per position, expected all {self.vocab_tokens}")
        # The engine's probabilities are over its padding rows, too, which are no tokens.
        logprobs_TK = logprobs_TK - np.logaddexp.reduce(logprobs_TK, axis=1, keepdims=True)
        counts_T = np.full(len(ids_TK), self.vocab_tokens)
        return encode_given(ids_TK, logprobs_TK, counts_T, vocab_size=self.vocab_tokens)

    def _without_padding(self, ids_TK: Any, logprobs_TK: Any) -> tuple[Any, Any]:
        """Each row keeps its tokens in order, cut to the shortest row's number of columns."""
        padding_TK = ids_TK >= self.vocab_tokens
        if not padding_TK.any():
            return ids_TK, logprobs_TK
        order_TK = np.argsort(padding_TK, axis=1, kind="stable")
        k = int((~padding_TK).sum(axis=1).min())
        if k == 0:
            raise EncodeError(
                f"all {ids_TK.shape[1]} likeliest ids are past the vocabulary of {self.vocab_tokens} tokens"
            )
        order_TK = order_TK[:, :k]
        return np.take_along_axis(ids_TK, order_TK, axis=1), np.take_along_axis(logprobs_TK, order_TK, axis=1)


def no_sets(vocab_tokens: int) -> bytes:
    """The payload for no tokens."""
    return encode_top_k(np.zeros((0, 1), np.int32), np.zeros((0, 1)), vocab_size=vocab_tokens)


@dataclass(frozen=True)
class TopRows(PayloadRows):
    """One teacher's top-k sets. Columns past a row's `counts_R` are padding."""

    ids_RK: npt.NDArray[np.int64]
    logprobs_RK: npt.NDArray[np.float32]
    tail_R: npt.NDArray[np.float32]
    counts_R: npt.NDArray[np.int64]

    @classmethod
    def of(cls, top: TopK, rows: npt.NDArray[np.int64]) -> TopRows:
        """The sets of some positions."""
        ids_TK, logprobs_TK = top.padded()
        if len(rows) == len(top.counts_T):  # all of them: nothing to copy
            return cls(ids_TK, logprobs_TK, top.tail_T, top.counts_T)
        return cls(ids_TK[rows], logprobs_TK[rows], top.tail_T[rows], top.counts_T[rows])

    @property
    def n_rows(self) -> int:
        return len(self.counts_R)

    def at(self, rows: npt.NDArray[np.int64]) -> TopRows:
        arrays = (self.ids_RK[rows], self.logprobs_RK[rows], self.tail_R[rows], self.counts_R[rows])
        return TopRows(*arrays, uniform_RS=self.drawn(rows))

    @classmethod
    def joined(cls, parts: Sequence[TopRows]) -> TopRows:
        """Padded to the largest K."""
        if len(parts) == 1:
            return parts[0]
        k = max((part.ids_RK.shape[1] for part in parts), default=1)
        n_rows = sum(part.n_rows for part in parts)
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
        drawn = [part.uniform_RS for part in parts] or [np.zeros((0, 0))]
        tail_R, counts_R = np.concatenate(tails), np.concatenate(counts)
        return cls(ids_RK, logprobs_RK, tail_R, counts_R, uniform_RS=np.concatenate(drawn))
