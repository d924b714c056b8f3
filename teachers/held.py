"""An item that a teacher holds, and the scores that it becomes. NumPy only.

Legend: N tokens that the engine scores, T positions of the top-k sets among them, K tokens of the largest set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stillhouse.engines.base import Float32s, Int32s, ScoreRequest
from stillhouse.protocol.codec import Array
from stillhouse.protocol.messages import ScoreItem
from stillhouse.protocol.payloads.kind import TopIds


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
