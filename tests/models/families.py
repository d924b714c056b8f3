"""Tiny random models of many families, by name."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

ENDS: Final[dict[str, Any]] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SMALL: Final[dict[str, Any]] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, **ENDS},
}
OWN_NAMES: Final[dict[str, dict[str, Any]]] = {
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **ENDS},
    "mamba": {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2},
    "bloom": {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4},
}
"""In place of SMALL."""
HEAD: Final[dict[str, Any]] = {"head_dim": 8}
WINDOW: Final[dict[str, Any]] = {**HEAD, "sliding_window": 4}
EXPERTS: Final[dict[str, Any]] = {**HEAD, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_EXPERTS: Final[dict[str, Any]] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR: Final[dict[str, Any]] = {
    **{**HEAD, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
CONVOLUTION: Final[dict[str, Any]] = {**HEAD, "layer_types": ["conv", "full_attention"]}
MAMBA: Final[dict[str, Any]] = {**HEAD, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8}
CHUNKS: Final[dict[str, Any]] = {
    **{**HEAD, "attention_chunk_size": 16, "layer_types": ["chunked_attention", "full_attention"]},
    **{"num_local_experts": 2, "intermediate_size_mlp": 48, "floor_scale": 4},
}
SPARSE: Final[dict[str, Any]] = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "num_key_value_heads": 4},
    **{"v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "moe_intermediate_size": 24},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
}


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **options}}


LONGROPE: Final[dict[str, Any]] = {
    **{"short_factor": [1.0] * 4, "long_factor": [8.0, 9.0, 10.0, 11.0]},
    **{"factor": 8.0, "original_max_position_embeddings": 8},
}
ROPES: Final = {
    "sliding_attention": rope("default")["rope_parameters"],
    "full_attention": rope("longrope", **LONGROPE)["rope_parameters"],
}
ARCHITECTURES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "qwen3 (GQA, rotary)": ("qwen3", {**HEAD, "tie_word_embeddings": True}),
    "qwen3_moe (experts in every layer)": ("qwen3_moe", EXPERTS),
    "gpt2 (learned positions, Conv1D)": ("gpt2", {}),
    "mistral (sliding window)": ("mistral", WINDOW),
    "gemma2 (soft caps, alternating windows)": (
        "gemma2",
        {**WINDOW, "final_logit_softcapping": 0.3, "attn_logit_softcapping": 0.5},
    ),
    "gpt_oss (sinks, experts)": (
        "gpt_oss",
        {**WINDOW, **LOCAL_EXPERTS, "rope_parameters": {"rope_type": "default"}},
    ),
    "cohere (logit scale)": ("cohere", {"logit_scale": 0.25}),
    "granite (logits divided)": ("granite", {"logits_scaling": 4.0}),
    "hyperclovax (logits multiplied, under the name by which granite divides)": (
        "hyperclovax",
        {"logits_scaling": 0.25},
    ),
}
MOVING: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "phi3 (longrope)": ("phi3", {"original_max_position_embeddings": 8, **rope("longrope", **LONGROPE)}),
    "phimoe (longrope with scales, experts)": (
        "phimoe",
        {**HEAD, **LOCAL_EXPERTS, **rope("longrope", **LONGROPE, short_mscale=1.0, long_mscale=1.7)},
    ),
    "gemma3 (longrope in layers of one type)": (
        "gemma3_text",
        {**WINDOW, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": ROPES},
    ),
    "yarn": ("qwen3", {**HEAD, **rope("yarn", factor=8.0, original_max_position_embeddings=8)}),
    "dynamic": ("qwen3", {**HEAD, **rope("dynamic", factor=8.0)}),
}
"""What else may depend on the longest sequence of a row. The original context is 8 tokens."""
LEAKING: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "qwen3.5 (gated delta rule)": ("qwen3_5_text", LINEAR),
    "qwen3.5 mixture": ("qwen3_5_moe_text", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3-next": ("qwen3_next", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 24}),
    "lfm2 (convolutions)": ("lfm2", CONVOLUTION),
    "falcon-h1 (mamba beside attention)": ("falcon_h1", {**MAMBA, "mamba_chunk_size": 8}),
    "mamba (no attention)": ("mamba", {}),
    "bloom (distances of its own)": ("bloom", {}),
    "llama4 (chunks)": ("llama4_text", CHUNKS),
    "deepseek v3.2 (sparse indexer)": ("deepseek_v32", SPARSE),
    "dynamic frequencies, convolutions": ("lfm2", {**CONVOLUTION, **rope("dynamic", factor=8.0)}),
}
"""In a row without padding, and the last one in a batch too."""


def build(name: str, implementation: str | None = None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    kind, changes = (ARCHITECTURES | MOVING | LEAKING)[name]
    config = AutoConfig.for_model(kind, **{**OWN_NAMES.get(kind, SMALL), **changes})
    torch.manual_seed(0)
    given: dict[str, Any] = {} if implementation is None else {"attn_implementation": implementation}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **given).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the stock initialisation is so small that attention hardly matters
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    return cast(PreTrainedModel, model)


def each_alone(model: PreTrainedModel, ids_T: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Logits by transformers' own forward pass."""
    return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in ids_T.split(list(lengths))])
