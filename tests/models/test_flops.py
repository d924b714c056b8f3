"""The judge is torch's own counter over transformers' eager forward and backward, which sees every product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from stillhouse.models.flops import ForwardFlops, forward_flops

WIDE: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": WIDE | {"head_dim": 48, "tie_word_embeddings": True},
    "Llama": WIDE | {"tie_word_embeddings": False},
    "GPT2": {"vocab_size": 512, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "Qwen3Moe": WIDE | {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "DeepseekV2": WIDE
    | {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1, "num_key_value_heads": 4},
}
LENGTH = 40


def counted(model: torch.nn.Module, *, backward: bool = False) -> float:
    ids = torch.randint(0, 512, (1, LENGTH))
    with FlopCounterMode(display=False) as counter:
        logits = model(ids, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


def with_squares(flops: ForwardFlops) -> float:
    """As the eager forward computes it: all pairs, those that the mask hides too."""
    return flops.per_token * LENGTH + (flops.per_pair + flops.per_window_pair) * LENGTH**2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_pass_costs_what_torch_counts(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(**FAMILIES[family], attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    model.save_pretrained(tmp_path)
    flops = forward_flops(tmp_path)
    assert flops is not None
    assert with_squares(flops) == pytest.approx(counted(model), rel=0.005)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_costs_what_torch_counts(frozen: bool, tmp_path: Path) -> None:
    eager: dict[str, Any] = FAMILIES["Qwen3"] | {"attn_implementation": "eager"}
    config = transformers.Qwen3Config(**eager)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    model.save_pretrained(tmp_path)
    if frozen:
        model.requires_grad_(False)
        model.enable_input_require_grads()
    flops = forward_flops(tmp_path)
    assert flops is not None
    pairs = LENGTH * (LENGTH + 1) / 2
    squares = 3 * flops.per_pair * (LENGTH**2 - pairs)
    assert flops.training(LENGTH, frozen=frozen) + squares == pytest.approx(counted(model, backward=True), rel=0.01)


def test_layers_with_a_window_read_no_more_than_that() -> None:
    flops = ForwardFlops(0.0, 1.0, 100.0, 8)
    one_by_one = [1.0 * read + 100.0 * min(read, 8) for read in range(1, 31)]
    for start, end in ((0, 5), (3, 20), (8, 9), (12, 30), (0, 30)):
        assert flops.of(start, end) == sum(one_by_one[start:end])


def test_kinds_of_layers_are_told_apart(tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(
        **WIDE, head_dim=32, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    flops = forward_flops(tmp_path)
    assert flops is not None
    assert (flops.per_pair, flops.per_window_pair, flops.window) == (4 * 4 * 32, 2 * 4 * 4 * 32, 8)


def test_what_is_not_known_is_not_counted(tmp_path: Path) -> None:
    assert forward_flops(tmp_path) is None
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert forward_flops(tmp_path) is None
