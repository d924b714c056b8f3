"""By how much the grade of one and the same text depends on what is graded beside it, and on which teacher grades.

Kernels add up in another order for another shape of batch, servers cache, replicas are loaded with other settings: what
comes of that is noise in every cost, and the reverse KL cannot be told apart from 0 below it. A fixed text of random
ids is graded at the start, once alone and once among others; the same text by all teachers.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

import numpy as np

from engines.base import ScoreRequest, ScoringEngine

SEED: Final = 20_26
LENGTHS: Final = (64, 17, 40, 5)
"""Tokens of the text that counts, and of its company."""
LOUD_NATS: Final = 0.05
"""Above it a teacher says so in its log: a student near its teacher has a reverse KL of that size per token."""

log = logging.getLogger(__name__)


class SelfCheck(NamedTuple):
    """In nats per token."""

    noise_nats: float
    """Largest difference of a token's log-prob, alone and among others."""
    logprob: float
    """Mean log-prob of the text's tokens, graded alone: the same number at every teacher of the same model."""

    def gauges(self) -> dict[str, float]:
        return {"noise_nats": self.noise_nats, "check_logprob": self.logprob}


def self_check(engine: ScoringEngine, vocab_tokens: int) -> SelfCheck | None:
    """`vocab_tokens`: ids that the tokenizer has. None, and a line in the log, where the text cannot be graded."""
    rng = np.random.default_rng(SEED)
    lengths = [min(length, engine.max_context) for length in LENGTHS]
    texts = [rng.integers(0, min(vocab_tokens, engine.vocab_size), length).astype(np.int32) for length in lengths]
    requests = [ScoreRequest(ids, 1) for ids in texts]
    try:
        alone = engine.score(requests[:1])[0].logprobs
        among = engine.score([*requests[1:], requests[0]])[-1].logprobs
    except (ValueError, RuntimeError) as error:
        log.warning("what grades depend on could not be measured: %s", error)
        return None
    noise_nats = float(np.abs(alone.astype(np.float64) - among).max())
    if not noise_nats <= LOUD_NATS:
        log.warning(
            "a token's log-prob differs by up to %.3g nats with what is graded beside it; a reverse KL of that size is "
            "noise",
            noise_nats,
        )
    return SelfCheck(noise_nats, float(alone.mean(dtype=np.float64)))
