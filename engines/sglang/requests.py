"""Requests to an SGLang server: their bodies, and a generation request's checks. No I/O."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stillhouse.engines.base import GenerationRequest
from stillhouse.engines.http.live import tokens_left
from stillhouse.engines.http.stream import ExpertsAsked
from stillhouse.engines.sglang.features import NEUTRAL, Features
from stillhouse.protocol.messages import Sampling
from stillhouse.weights.manifest import WeightBucket


def check_sampling(what: str, sampling: Sampling, features: Features) -> None:
    """Raises ValueError for sampling for which the server's log-probs are not those of the distribution sampled
    from."""
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
    sampling: dict[str, Any] = NEUTRAL | {
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
