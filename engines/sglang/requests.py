"""What goes to an SGLang server and what must not: one generation request, checked; and the counts of them. No I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.base import GenerationRequest, Int32s
from engines.sglang.features import Features
from protocol.messages import Sampling


def check_request(request: GenerationRequest, features: Features, vocab_size: int) -> None:
    """Raises ValueError for what the server would refuse, die of, or answer with log-probs that are not those of the
    distribution sampled from."""
    ids, name = request.prompt_ids, request.request_id
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"request {name!r}: prompt of shape {ids.shape}; expected at least one token, [n]")
    check_ids(f"request {name!r}", ids, vocab_size)
    if len(ids) > features.max_prompt:
        raise ValueError(
            f"request {name!r}: a prompt of {len(ids)} tokens; the server takes up to {features.max_prompt}"
        )
    if request.max_new_tokens < 1:
        raise ValueError(f"request {name!r}: max_new_tokens {request.max_new_tokens}; expected at least 1")
    outside = [token for token in request.stop_token_ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"request {name!r}: stop token {outside[0]} is outside the vocabulary [0, {vocab_size})")
    _check_sampling(f"request {name!r}", request.sampling, features)


def check_ids(what: str, ids_N: Int32s, vocab_size: int) -> None:
    """An id outside the vocabulary kills a server. Raises ValueError."""
    if int(ids_N.min()) < 0 or int(ids_N.max()) >= vocab_size:
        outside = ids_N[(ids_N < 0) | (ids_N >= vocab_size)]
        raise ValueError(f"{what}: token id {outside[0]} is outside the vocabulary [0, {vocab_size})")


def _check_sampling(what: str, sampling: Sampling, features: Features) -> None:
    temperature = sampling.temperature
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"{what}: temperature = {temperature}; expected 0 (greedy) or a positive number")
    if sampling.top_p != 1 or sampling.top_k != 0:
        raise ValueError(
            f"{what}: top_p = {sampling.top_p}, top_k = {sampling.top_k}; SGLang's log-probs leave both out, "
            "so only top_p = 1 and top_k = 0 (off) can be trained on"
        )
    if features.logprob_temperature == "one" and temperature not in (0, 1):
        raise ValueError(
            f"{what}: temperature = {temperature}; this server gives log-probs at temperature 1 "
            "(SGLANG_RETURN_ORIGINAL_LOGPROB?), so only temperature 1 can be trained on"
        )
    if not features.greedy_logprobs_at_one and temperature == 0:
        raise ValueError(f"{what}: temperature = 0; this server's greedy log-probs are not those of temperature 1")


def tokens_left(request: GenerationRequest, n_answered: int, features: Features) -> int:
    """How many tokens may still be sampled after `n_answered` of the answer, which then are part of the prompt."""
    n_prompt = len(request.prompt_ids) + n_answered
    if n_prompt > features.max_prompt:
        return 0
    return max(0, min(request.max_new_tokens - n_answered, features.max_context - n_prompt))


def generate_body(
    request: GenerationRequest, answered: list[int], rid: str, features: Features, stream_tokens: int
) -> dict[str, Any]:
    """Body of POST /generate that goes on after the tokens `answered`."""
    sampling: dict[str, Any] = {
        "temperature": request.sampling.temperature,
        "max_new_tokens": tokens_left(request, len(answered), features),
        "stop_token_ids": request.stop_token_ids,
        "skip_special_tokens": False,
    }
    if features.stream_interval:
        sampling["stream_interval"] = stream_tokens
    return {
        "rid": rid,
        "input_ids": [*np.asarray(request.prompt_ids).tolist(), *answered],
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": True,
    }


@dataclass(slots=True)
class EngineTotals:
    """Running totals of one engine."""

    sampled_tokens: int = 0
    chunks: int = 0
    swaps: int = 0
    restarts: int = 0
    cached_tokens: int = 0
    busy_s: float = 0.0
    busy_since_s: float = 0.0
