"""A teacher's likeliest tokens, from an engine's rows to payloads (protocol.topk_codec). numpy only.

Ids past the tokenizer's last one are rows that an embedding was padded with: no tokens, and never sent.

Legend: T tokens of one item that may be trained, K columns that the engine gave, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import EncodeError
from protocol.topk_codec import encode_top_k
from teachers.config import TeacherConfig


@dataclass(frozen=True)
class TopKSets:
    """What a run asks of its teachers, for one engine."""

    vocab_tokens: int
    """V: ids that exist."""
    asked: int
    """K, of the engine: all its rows where every token is sent."""
    max_k: int
    mass: float
    rest_bits: int

    @classmethod
    def of(cls, config: TeacherConfig, vocab_tokens: int, engine_rows: int) -> TopKSets:
        """`config.top_k` >= 1. The engine's padding may stand among its likeliest, so as many more are asked for, but
        not more than a few."""
        rest_bits = config.rest_bits(vocab_tokens)
        padding = min(8, engine_rows - vocab_tokens)
        asked = engine_rows if rest_bits else min(config.top_k + padding, engine_rows)
        return cls(vocab_tokens, asked, config.top_k, config.top_mass, rest_bits)

    def payload(self, ids_TK: npt.NDArray[np.integer[Any]], logprobs_TK: npt.NDArray[np.floating[Any]]) -> bytes:
        """Raises EncodeError when the engine's rows cannot be sent."""
        ids_TK, logprobs_TK = self._tokens_alone(ids_TK, logprobs_TK)
        return encode_top_k(
            ids_TK,
            logprobs_TK,
            vocab_size=self.vocab_tokens,
            mass=self.mass,
            max_k=self.max_k,
            rest_bits=self.rest_bits,
        )

    def nothing(self) -> bytes:
        """The payload of no token."""
        k = self.vocab_tokens if self.rest_bits else 1
        return self.payload(np.zeros((0, k), np.int32), np.zeros((0, k), np.float32))

    def _tokens_alone(self, ids_TK: Any, logprobs_TK: Any) -> tuple[Any, Any]:
        """Without padding: in each row the tokens, in their order, and as many columns as all rows have."""
        padding_TK = ids_TK >= self.vocab_tokens
        if not padding_TK.any():
            return ids_TK, logprobs_TK
        order_TK = np.argsort(padding_TK, axis=1, kind="stable")
        k = int((~padding_TK).sum(axis=1).min())
        if k == 0:
            raise EncodeError(f"all {ids_TK.shape[1]} likeliest are past the vocabulary of {self.vocab_tokens} tokens")
        order_TK = order_TK[:, :k]
        return np.take_along_axis(ids_TK, order_TK, axis=1), np.take_along_axis(logprobs_TK, order_TK, axis=1)
