"""Requests to an SGLang server: their bodies, and a generation request's checks and state while it runs. No I/O."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stillhouse.engines.base import EngineStats, GenerationRequest, check_prompt, check_top_ids_wanted
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.features import Features
from stillhouse.engines.sglang.http import SGLangLink
from stillhouse.engines.sglang.stream import ExpertsAsked, FinishReason
from stillhouse.protocol.messages import Sampling, WeightVersion
from stillhouse.weights.manifest import WeightBucket


def check_request(request: GenerationRequest, features: Features, vocab_size: int) -> None:
    """Raises ValueError for requests that the server would refuse or crash on, or for which its log-probs are not those
    of the distribution sampled from."""
    check_prompt(request, vocab_size)
    name, length = request.request_id, len(request.prompt_ids)
    if length > features.max_prompt:
        raise ValueError(f"request {name!r}: a prompt of {length} tokens; the server takes up to {features.max_prompt}")
    outside = [token for token in request.stop_token_ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"request {name!r}: stop token {outside[0]} is outside the vocabulary [0, {vocab_size})")
    _check_sampling(f"request {name!r}", request.sampling, features)
    check_top_ids_wanted(request.sampling)
    if request.sampling.top_ids is not None and request.sampling.top_ids.k > vocab_size:
        raise ValueError(
            f"request {name!r}: the likeliest {request.sampling.top_ids.k} of {vocab_size} ids are asked for"
        )


def _check_sampling(what: str, sampling: Sampling, features: Features) -> None:
    temperature = sampling.temperature
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"{what}: temperature = {temperature}; expected 0 (greedy) or a positive number")
    if sampling.truncated and not (sampling.kept and features.sampling_mask):
        raise ValueError(
            f"{what}: top_p = {sampling.top_p}, top_k = {sampling.top_k}, min_p = {sampling.min_p}; SGLang's log-probs "
            "leave these out, and "
            + (
                "the request does not ask for the kept ids (Sampling.kept)"
                if features.sampling_mask
                else f"SGLang {features.version} does not return what it sampled from (return_sampling_mask; 0.5.23 "
                "did); use a newer server or the embedded engine (actor.engine = torch), or top_p = 1, top_k = 0 and "
                "min_p = 0"
            )
        )
    if features.logprob_temperature == "one" and temperature not in (0, 1):
        raise ValueError(
            f"{what}: temperature = {temperature}; this server gives log-probs at temperature 1 "
            "(SGLANG_RETURN_ORIGINAL_LOGPROB?), so only temperature 1 can be trained on"
        )
    if not features.greedy_logprobs_at_one and temperature == 0:
        raise ValueError(f"{what}: temperature = 0; this server's greedy log-probs are not those of temperature 1")


def tokens_left(request: GenerationRequest, n_answered: int, features: Features) -> int:
    """Tokens that may still be sampled after `n_answered` tokens of the answer, which then belong to the prompt."""
    n_prompt = len(request.prompt_ids) + n_answered
    if n_prompt > features.max_prompt:
        return 0
    return max(0, min(request.max_new_tokens - n_answered, features.max_context - n_prompt))


def experts_asked(request: GenerationRequest, n_answered: int, features: Features) -> ExpertsAsked | None:
    """What a request that continues after `n_answered` tokens asks for; None: nothing, or the server cannot."""
    shape, n_prompt = request.sampling.experts, len(request.prompt_ids) + n_answered
    if shape is None or not features.routed_experts:
        return None
    return ExpertsAsked(shape, n_prompt if n_answered else request.experts_from, n_prompt)


def generate_body(
    request: GenerationRequest, answered: list[int], rid: str, features: Features, stream_tokens: int
) -> dict[str, Any]:
    """Body of POST /generate that continues after the tokens `answered`."""
    sampling: dict[str, Any] = {
        "temperature": request.sampling.temperature,
        "max_new_tokens": tokens_left(request, len(answered), features),
        "stop_token_ids": request.stop_token_ids,
        "skip_special_tokens": False,
    }
    if features.stream_interval:
        sampling["stream_interval"] = stream_tokens
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": [*np.asarray(request.prompt_ids).tolist(), *answered],
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": True,
    }
    if request.sampling.top_ids is not None:
        body["top_logprobs_num"] = request.sampling.top_ids.k
    if request.sampling.kept:
        sampling |= {"top_k": request.sampling.top_k, "top_p": request.sampling.top_p, "min_p": request.sampling.min_p}
        body["return_sampling_mask"] = True
    if (experts := experts_asked(request, len(answered), features)) is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": experts.start - 1}
    return body


def bucket_update(bucket: WeightBucket, group_name: str, *, flush: bool) -> dict[str, Any]:
    """Body of a request to receive one bucket of weights in a broadcast."""
    return {
        "names": [spec.name for spec in bucket.tensors],
        "dtypes": [spec.dtype for spec in bucket.tensors],
        "shapes": [list(spec.shape) for spec in bucket.tensors],
        "group_name": group_name,
        "load_format": "flattened_bucket",
        "abort_all_requests": False,
        "flush_cache": flush,
    }


def disk_update(folder: str, *, flush: bool) -> dict[str, Any]:
    """Body of a request to load weights from a folder."""
    return {"model_path": folder, "load_format": "auto", "flush_cache": flush, "abort_all_requests": False}


def tensor_update(payloads: list[str], *, flush: bool) -> dict[str, Any]:
    """Body of a request to load weights out of memory, by one payload (engines.sglang.tensor_payload) for each rank."""
    return {
        "serialized_named_tensors": payloads,
        "load_format": "flattened_bucket",
        "abort_all_requests": False,
        "flush_cache": flush,
    }


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request, from submit to its last delta. Belongs to the event loop."""

    request: GenerationRequest
    ids: list[int] = field(default_factory=list[int])
    """Reported tokens of the answer; a restart continues after them."""
    cache_key: str = ""
    """In mode in_place: the label of the weights it began under, under which the prefix cache has its past."""
    task: asyncio.Task[None] | None = None
    adapter: str = ""
    """Name of the adapter that it was sent with; empty: none."""
    rid: str = ""
    """Request id at the server while a stream is open, else empty."""
    heard_s: float = 0.0
    aborting_since_s: float | None = None
    restarting: bool = False
    """Ended for new weights; continues as a new request after them."""
    given_up: str = ""
    """The reason why this engine cancelled it."""


def ended_anyway(live: LiveRequest, features: Features) -> FinishReason | None:
    """The finish reason of a request that was cut for new weights after its final token; None: it continues."""
    if live.ids and live.ids[-1] in live.request.stop_token_ids:
        return "stop"
    return None if tokens_left(live.request, len(live.ids), features) else "length"


def why_give_up(live: LiveRequest, limits: SGLangConfig, now_s: float, paused_s: float | None) -> str:
    """The reason to cancel a silent or long-paused request, else empty. `paused_s`: start of the pause, if any."""
    if paused_s is None:
        silent = live.rid and now_s - live.heard_s > limits.stall_timeout_s
        return f"no token for {limits.stall_timeout_s:g} s (stall_timeout_s)" if silent else ""
    if now_s - paused_s > limits.pause_timeout_s:
        return f"paused for new weights for more than {limits.pause_timeout_s:g} s (pause_timeout_s)"
    return ""


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
    pauses: int = 0
    pause_s: float = 0.0

    def stats(
        self, server: SGLangLink, *, n_open: int, running: int, slots: int, version: WeightVersion
    ) -> EngineStats:
        return EngineStats(
            running=running,
            queued=max(0, n_open - running),
            free_slots=max(0, slots - n_open),
            sampled_tokens_total=self.sampled_tokens,
            decode_steps_total=self.chunks,
            busy_s_total=self.busy_until_now_s(),
            weight_swaps_total=self.swaps,
            version=version,
            weight_pauses_total=self.pauses,
            weight_pause_s_total=self.pause_s,
            extra={
                "http_requests_total": float(server.requests_total),
                "http_received_bytes_total": float(server.received_bytes_total),
                "restarted_requests_total": float(self.restarts),
                "breaker_opened_total": float(server.breaker.opened_total),
                "breaker_open": float(server.breaker.is_open),
                "prompt_tokens_cached_total": float(self.cached_tokens),
            },
        )

    def busy_until_now_s(self) -> float:
        return self.busy_s + (time.monotonic() - self.busy_since_s if self.busy_since_s else 0.0)

    def idle(self) -> None:
        """The last request has ended."""
        self.busy_s, self.busy_since_s = self.busy_until_now_s(), 0.0
