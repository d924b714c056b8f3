"""An item that a teacher holds, and the scores that it becomes. NumPy only.

Legend: N tokens that the engine scores, T positions of the top-k sets among them, K tokens of the largest set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stillhouse.engines.base import Float32s, Int32s, ScoreRequest
from stillhouse.protocol.codec import Array
from stillhouse.protocol.messages import ScoreItem
from stillhouse.protocol.payloads.kind import ScoreResult, TopIds
from stillhouse.teachers.alignment import Aligned, Aligner


@dataclass(slots=True)
class HeldItem:
    """A leased item and its frames."""

    item: ScoreItem
    token_ids: Int32s
    arrived_s: float
    """Monotonic."""
    top_ids: bytes = b""
    """Payload of the student's likeliest tokens, if one came."""
    given: TopIds | None = None
    """The tokens of that payload, where they are to be scored."""
    aligned: Aligned | None = None
    """The answer in the tokens of a teacher with another tokenizer."""

    def align(self, aligner: Aligner) -> None:
        """Have the answer in the teacher's tokens, behind the prompt in its own chat template. Raises ValueError
        without such a prompt."""
        item, n_prompt = self.item, self.item.teacher_prompt_tokens
        if not n_prompt:
            raise ValueError("the prompt is in the student's tokens only")
        aligned = aligner.align(self.token_ids[n_prompt:], item.first + item.shift - n_prompt)
        self.aligned, self.token_ids = aligned, np.concatenate([self.token_ids[:n_prompt], aligned.ids])

    @property
    def is_asked(self) -> bool:
        """Whether the engine has something to score."""
        return self.aligned is None or bool(self.aligned.spans)

    def result(self, scored: ScoreResult, aligner: Aligner | None) -> ScoreResult:
        """The engine's result, for the student's tokens."""
        if self.aligned is None or aligner is None:
            return scored
        if scored.top_ids is not None:
            return self.aligned.sets(scored, aligner.first_tokens)
        return ScoreResult(self.aligned.logprobs(scored.logprobs), codes=self.aligned.code_N)

    @property
    def wants_sets(self) -> bool:
        """Whether it has trainable tokens."""
        return self.item.top_start < self.item.top_end

    @property
    def sets_at(self) -> slice:
        """The T positions among the N."""
        return slice(self.item.top_start - self.item.first, self.item.top_end - self.item.first)

    @property
    def request(self) -> ScoreRequest:
        """Position 0 is not asked for, because it has no context; nor is a prompt that this teacher does not read."""
        item, top_ids_NK = self.item, None
        if self.aligned is not None:
            start = item.teacher_prompt_tokens + self.aligned.scored_from
            return ScoreRequest(self.token_ids, start, item.rollout_id, item.last)
        if self.given is not None:
            ids_TK = self.given.ids_TK
            top_ids_NK = np.zeros((item.end - item.first, ids_TK.shape[1]), np.int32)
            top_ids_NK[self.sets_at] = ids_TK
        return ScoreRequest(self.token_ids, item.first + item.shift, item.rollout_id, item.last, top_ids_NK)


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of one item, as they are sent."""

    logprobs: Float32s
    payload: bytes | None
    """None: the run asks for none."""

    @property
    def frames(self) -> list[Array]:
        """Its frames in `protocol.messages.Scores`."""
        return [self.logprobs, *([] if self.payload is None else [np.frombuffer(self.payload, np.uint8)])]
