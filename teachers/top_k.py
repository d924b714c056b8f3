"""Encodes a teacher's log-probs of its likeliest tokens, or of the student's, from an engine's rows
(protocol.topk_codec). numpy only.

Ids past the tokenizer's last one are padding rows of the embedding, not tokens, and are never sent.

Legend: T trainable tokens of one item, K columns from the engine, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.errors import EncodeError, MalformedMessage
from stillhouse.protocol.top_ids import TopIds, decode_top_ids
from stillhouse.protocol.topk_codec import encode_given, encode_top_k
from stillhouse.teachers.config import TeacherConfig


@dataclass(frozen=True)
class TopKSets:
    """The top-k sets that a run wants from one engine."""

    vocab_tokens: int
    """V: ids of the tokenizer."""
    asked: int
    """K to request from the engine: all its rows where every token is sent; 0 where the student's are scored."""
    max_k: int
    mass: float
    rest_bits: int
    of_student: bool = False

    @classmethod
    def of(cls, config: TeacherConfig, vocab_tokens: int, engine_rows: int) -> TopKSets:
        """`config.top_k` must be at least 1. Padding rows may be among the engine's likeliest, so up to 8 more are
        requested."""
        rest_bits = config.rest_bits(vocab_tokens)
        padding = min(8, engine_rows - vocab_tokens)
        asked = engine_rows if rest_bits else min(config.top_k + padding, engine_rows)
        of_student = config.top_k_of == "student"
        return cls(vocab_tokens, 0 if of_student else asked, config.top_k, config.top_mass, rest_bits, of_student)

    def payload(self, ids_TK: npt.NDArray[np.integer[Any]], logprobs_TK: npt.NDArray[np.floating[Any]]) -> bytes:
        """The encoded sets [T, K]. Raises EncodeError when the engine's rows cannot be sent."""
        ids_TK, logprobs_TK = self._without_padding(ids_TK, logprobs_TK)
        return encode_top_k(
            ids_TK,
            logprobs_TK,
            vocab_size=self.vocab_tokens,
            mass=self.mass,
            max_k=self.max_k,
            rest_bits=self.rest_bits,
        )

    def of_tokens(self, payload: bytes, n_expected: int) -> TopIds:
        """The student's sets, as an actor sent them, without padding. Raises MalformedMessage; EncodeError for a
        position with nothing else."""
        ids_TK, counts_T = decode_top_ids(payload)
        if len(counts_T) != n_expected:
            raise MalformedMessage(
                "sets of the student's likeliest ids", got=f"{len(counts_T)}", expected=f"{n_expected}"
            )
        sent_TK = np.arange(ids_TK.shape[1]) < counts_T[:, None]
        tokens_TK = sent_TK & (ids_TK < self.vocab_tokens)
        if not tokens_TK.any(axis=1).all():
            raise EncodeError(f"all likeliest ids of a position are past the vocabulary of {self.vocab_tokens} tokens")
        order_TK = np.argsort(~tokens_TK, axis=1, kind="stable")
        ids_TK = np.take_along_axis(np.where(tokens_TK, ids_TK, 0), order_TK, axis=1)
        return TopIds(ids_TK, tokens_TK.sum(axis=1))

    def payload_given(self, given: TopIds, logprobs_TK: npt.NDArray[np.floating[Any]]) -> bytes:
        """The encoded log-probs of the student's tokens. Raises EncodeError when they cannot be sent."""
        return encode_given(given.ids_TK, logprobs_TK, given.counts_T, vocab_size=self.vocab_tokens)

    def nothing(self) -> bytes:
        """The payload for zero tokens."""
        k = self.vocab_tokens if self.rest_bits else 1
        return self.payload(np.zeros((0, k), np.int32), np.zeros((0, k), np.float32))

    def _without_padding(self, ids_TK: Any, logprobs_TK: Any) -> tuple[Any, Any]:
        """Remove padding: each row keeps its tokens in order, cut to the shortest row's number of columns."""
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
