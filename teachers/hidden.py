"""Encodes a teacher's last hidden states from an engine's results (protocol.hidden_codec). numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stillhouse.engines.base import EngineMismatch, GivesHiddenStates, ScoreRequest, ScoreResult, ScoringEngine
from stillhouse.protocol.hidden_codec import encode_hidden


@dataclass(frozen=True)
class HiddenStates:
    """The hidden states that a run wants from one engine."""

    engine: GivesHiddenStates

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """Results with states."""
        return self.engine.score(requests, hidden=True)

    def sent(self, result: ScoreResult, place: slice) -> bytes:
        """The payload for some tokens of a result; for none, if the engine was not asked. Raises EncodeError for states
        that are not finite."""
        if result.hidden is None:
            return encode_hidden(np.zeros((0, self.engine.hidden_size), np.uint16))
        return encode_hidden(result.hidden[place], self.engine.head_identity)


def giving_hidden_states(engine: ScoringEngine) -> GivesHiddenStates:
    """The engine, if it can. Raises EngineMismatch."""
    if not isinstance(engine, GivesHiddenStates):
        raise EngineMismatch(
            f"teacher.payload = hidden: {type(engine).__name__} has log-probs only; expected teacher.engine = torch"
        )
    return engine
