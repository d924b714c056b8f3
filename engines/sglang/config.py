"""Settings of an actor's connection to its SGLang server. No torch here."""

from __future__ import annotations

from typing import Literal, TypeAlias

from stillhouse.engines.config import StudentLinkConfig
from stillhouse.protocol.settings import PositiveInt

SwapMode: TypeAlias = Literal["in_place", "retract", "abort", "keep"]


class SGLangConfig(StudentLinkConfig, frozen=True, kw_only=True):
    """An actor's connection to its SGLang server (`engines.sglang.engine`)."""

    stream_tokens: PositiveInt = 16
    """Tokens per piece of a stream, where the server lets a request say so (else its --stream-interval decides). A
    piece costs the server about the same whatever its size, so one token at a time is expensive."""
    update_mode: SwapMode = "abort"
    """Treatment of running requests at a weight swap. `abort`: they end, and continue as new requests that recompute
    their KV cache; `in_place`: the same, but they find their old KV cache again; `retract`: the server itself
    recomputes it, and tokens sampled after the swap are held back until the request ends, because only then does the
    server say which weights sampled which token (0.5.23 does, 0.5.17 does not). Log-probs are those that tokens were
    sampled with in any mode. `abort` costs one prefill of all running requests per version; `in_place` saves it where
    the objective weighs by importance ratios, because tokens after a swap then come from no single version. `in_place`
    is not for max_staleness = 0. `keep`, only for adapters (weights.adapters): requests keep the version that they
    began with to their end. With adapters `abort` works too; `in_place` and `retract` do not, because a server cannot
    change the adapter of a request."""
