"""Tiny models of several architectures, a driver for generation engines, and the slow way to the same log-probs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stillhouse.engines.base import GenerationDelta, GenerationRequest
from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.protocol.messages import Sampling, WeightVersion

VOCAB = 53
CONTEXT = 160
NEVER = (VOCAB - 1,)
"""A stop token for tests that want none; some requests may still meet it, as real ones do."""

_SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "initializer_range": 0.3}
_COMMON: dict[str, Any] = {
    **_SMALL,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "attn_implementation": "sdpa",
}
_GATED: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 16}
_LINEAR: dict[str, Any] = {
    **_GATED,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EAGER: dict[str, Any] = {**_GATED, "attn_implementation": "eager"}
_ROUTED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED: dict[str, Any] = {**_ROUTED, "shared_expert_intermediate_size": 24}
_STATE: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {**_GATED, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {**_GATED, "head_dim": 8, "tie_word_embeddings": False}),
    "llama": ("llama", {**_GATED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "mistral-window": ("mistral", {**_GATED, "sliding_window": 9}),
    "gemma2": (
        "gemma2",
        {**_EAGER, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "sliding_window": 9},
    ),
    "gpt-oss": ("gpt_oss", {**_EAGER, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen3-moe": ("qwen3_moe", {**_EAGER, **_ROUTED}),
    "gpt2": ("gpt2", _COMMON),
    "gpt-neox": ("gpt_neox", {**_COMMON, "intermediate_size": 48}),
    "qwen3.5": ("qwen3_5_text", _LINEAR),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**_LINEAR, **_SHARED}),
    "qwen3-next": ("qwen3_next", {**_LINEAR, **_SHARED}),
    "lfm2": ("lfm2", {**_GATED, "head_dim": 8, "layer_types": ["conv", "full_attention"]}),
    "falcon-h1": ("falcon_h1", {**_GATED, **_STATE, "mamba_d_ssm": 64}),
    "bamba": ("bamba", {**_GATED, **_STATE, "attn_layer_indices": [1]}),
    "mamba": ("mamba", {**_SMALL, "num_hidden_layers": 2}),
    "bloom": ("bloom", {**_SMALL, "n_layer": 2, "n_head": 4}),
}
"""Tiny models: transformers' type of model, and its configuration."""


def make_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """Random weights, wide enough apart that distributions are far from uniform."""
    torch.manual_seed(seed)
    model_type, settings = KINDS[kind]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases differ from their trivial initial values
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def make_engine(
    kind: str = "qwen3",
    seed: int = 0,
    version: WeightVersion | None = None,
    teacher: PreTrainedModel | None = None,
    **settings: Any,
) -> TorchEngine:
    defaults: dict[str, Any] = {"max_concurrent": 3, "max_context": CONTEXT, "device": "cpu"}
    model, config = make_model(kind, seed), EngineConfig(**(defaults | settings))
    return TorchEngine(model, config, version=version, teacher=teacher)


def make_requests(
    n: int, *, new_tokens: int = 12, stops: tuple[int, ...] = NEVER, seed: int = 0, **sampling: Any
) -> list[GenerationRequest]:
    """Different prompts of 1 to 14 tokens, different lengths to go, a seed each."""
    random = np.random.default_rng(seed)
    requests: list[GenerationRequest] = []
    for index in range(n):
        prompt = random.integers(0, VOCAB - 1, 1 + index * 5 % 14).astype(np.int32)
        limit = new_tokens + index % 5
        settings = Sampling(seed=1000 * seed + index, max_new_tokens=limit, **sampling)
        requests.append(GenerationRequest(f"r{index}", prompt, settings, limit, stops))
    return requests


@dataclass(slots=True)
class Output:
    """All deltas of one request put together."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[WeightVersion] = field(default_factory=list[WeightVersion])
    finish_reason: str | None = None
    error: str | None = None

    def add(self, delta: GenerationDelta) -> None:
        assert self.finish_reason is None, "a delta after the last one"
        assert len(delta.token_ids) == len(delta.logprobs)
        assert len(delta.token_ids) or delta.finish_reason, "a delta that says nothing"
        covered = 0
        for span in delta.spans:
            assert span.start == covered
            covered = span.end
            self.versions += [span.version] * (span.end - span.start)
        assert covered == len(delta.token_ids)
        self.ids += delta.token_ids.tolist()
        self.logprobs += delta.logprobs.tolist()
        self.finish_reason, self.error = delta.finish_reason, delta.error


def poll_into(engine: TorchEngine, outputs: dict[str, Output]) -> None:
    for delta in engine.poll(0.0):
        outputs.setdefault(delta.request_id, Output()).add(delta)


def run(
    engine: TorchEngine, requests: Iterable[GenerationRequest] = (), outputs: dict[str, Output] | None = None
) -> dict[str, Output]:
    """Submit `requests` and poll until nothing is left in the engine."""
    found: dict[str, Output] = {} if outputs is None else outputs
    for request in requests:
        engine.submit(request)
    while engine.stats.running or engine.stats.queued:
        poll_into(engine, found)
    poll_into(engine, found)
    assert all(output.finish_reason for output in found.values())
    return found


@torch.no_grad()
def true_logprobs(model: PreTrainedModel, request: GenerationRequest, ids: Sequence[int]) -> Tensor:
    """[n] by a full forward and transformers' own logits processors."""
    n_prompt = len(request.prompt_ids)
    full = torch.tensor([request.prompt_ids.tolist() + list(ids)])
    logits = model(input_ids=full, use_cache=False).logits[0, n_prompt - 1 : -1].float()
    return logprobs_of(logits, torch.tensor(list(ids)), request.sampling)


def logprobs_of(logits_nV: Tensor, ids_n: Tensor, sampling: Sampling) -> Tensor:
    """[n] log-probs of `ids_n` under the truncated distribution, as transformers defines it."""
    return truncated(logits_nV, sampling).gather(1, ids_n[:, None])[:, 0]


def truncated(logits_nV: Tensor, sampling: Sampling) -> Tensor:
    """[n, V] log-probs by transformers' own logits processors; minus infinity for what is cut."""
    unused: Any = None
    scores: Any = logits_nV
    if sampling.temperature:
        scores = TemperatureLogitsWarper(sampling.temperature)(unused, scores)
        if sampling.top_k:
            scores = TopKLogitsWarper(min(sampling.top_k, logits_nV.shape[1]))(unused, scores)
        if sampling.top_p < 1:
            scores = TopPLogitsWarper(sampling.top_p)(unused, scores)
        if sampling.min_p:
            scores = MinPLogitsWarper(sampling.min_p)(unused, scores)
    return scores.log_softmax(dim=-1)


def assert_true(
    model: PreTrainedModel, requests: Iterable[GenerationRequest], outputs: Mapping[str, Output], atol: float = 1e-4
) -> None:
    """Every request came to its end, and every reported log-prob is that of a full recompute."""
    for request in requests:
        output = outputs[request.request_id]
        assert output.ids and output.finish_reason in ("stop", "length"), output
        expected = true_logprobs(model, request, output.ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=atol, rtol=0)
