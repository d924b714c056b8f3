"""Measures how much the teacher log-probs of one text change with the other texts in its batch, and between teachers.

Kernels sum in a different order for a different batch shape, servers cache, and replicas are loaded with other
settings. The result is noise in every cost, below which a reverse KL cannot be distinguished from 0. At the start each
teacher scores the same fixed text of random ids, once alone and once in a batch.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

import numpy as np

from stillhouse.engines.base import ScoreRequest, ScoringEngine

SEED: Final = 20_26
LENGTHS: Final = (64, 17, 40, 5)
"""Tokens of the measured text, and of the other texts in its batch."""
LOUD_NATS: Final = 0.05
"""Noise above this is logged as a warning: a student close to its teacher has a reverse KL of this size per token."""

log = logging.getLogger(__name__)


class SelfCheck(NamedTuple):
    """The result of `self_check`, in nats per token."""

    noise_nats: float
    """Largest difference of a token's log-prob between scored alone and scored in a batch."""
    logprob: float
    """Mean log-prob of the text's tokens when scored alone: the same number at every teacher of the same model."""

    def gauges(self) -> dict[str, float]:
        return {"noise_nats": self.noise_nats, "check_logprob": self.logprob}


def self_check(engine: ScoringEngine, vocab_tokens: int) -> SelfCheck | None:
    """`vocab_tokens`: number of ids of the tokenizer. None, with a warning, when the text cannot be scored."""
    rng = np.random.default_rng(SEED)
    lengths = [min(length, engine.max_context) for length in LENGTHS]
    texts = [rng.integers(0, min(vocab_tokens, engine.vocab_size), length).astype(np.int32) for length in lengths]
    requests = [ScoreRequest(ids, 1) for ids in texts]
    try:
        alone = engine.score(requests[:1])[0].logprobs
        among = engine.score([*requests[1:], requests[0]])[-1].logprobs
    except (ValueError, RuntimeError) as error:
        log.warning("the noise of the scores could not be measured: %s", error)
        return None
    if not np.isfinite([alone, among]).all():
        log.warning("the noise of the scores could not be measured: some tokens have no score")
        return None
    noise_nats = float(np.abs(alone.astype(np.float64) - among).max())
    if not noise_nats <= LOUD_NATS:
        log.warning(
            "a token's log-prob differs by up to %.3g nats when it is scored in another batch; a reverse KL of that "
            "size is noise",
            noise_nats,
        )
    return SelfCheck(noise_nats, float(alone.mean(dtype=np.float64)))
