"""Routers of many architectures: what they chose is recorded, and what is given is used instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stillhouse.models.routing import Recording, Replay, RoutingError, expert_shape, prepare, under

SIZES: dict[str, Any] = {
    **{"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 1},
    **{"bos_token_id": 0, "pad_token_id": 2, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
}
LATENT: dict[str, Any] = {
    **{"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "mlp_only_layers": [1]},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 24},
    "qwen3_5_moe_text": {"num_experts": 8, "shared_expert_intermediate_size": 24},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "deepseek_v3": LATENT,
    "glm4_moe": {**LATENT, "head_dim": 8},
    "granitemoe": {"num_local_experts": 8},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2},
    "minimax_m2": {"num_local_experts": 8},
    "llama4_text": {"num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
}
IDS = torch.arange(10)[None]
ALL = torch.ones(10, dtype=torch.bool)


def build(family: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if family != "deepseek_v3" or key != "head_dim"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(sizes | more))).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor = IDS) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_chosen_gives_the_same_bits_and_another_choice_another_answer(family: str) -> None:
    model = build(family, **FAMILIES[family])
    plain, shape = logits(model), expert_shape(model)
    prepare(model, shape)
    prepare(model, shape)
    recorded = Recording(shape)
    with under(recorded):
        assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), plain), "nothing is left of it"
    same = Replay(shape, recorded.ids, ALL)
    with same.over(slice(None)):
        assert torch.equal(logits(model), plain)
    assert int(same.differing) == 0
    free = Replay(shape, (recorded.ids + 3) % shape.experts, ~ALL)
    with free.over(slice(None)):
        assert torch.equal(logits(model), plain)
    other = Replay(shape, (recorded.ids + 3) % shape.experts, ALL)
    with other.over(slice(None)):
        assert float((logits(model) - plain).abs().max()) > 1e-3
    assert int(other.differing) >= 15


def test_routers_that_do_not_choose_by_one_topk_are_refused() -> None:
    model = build("phimoe", num_local_experts=8)
    shape = expert_shape(model)
    prepare(model, shape)
    with under(Recording(shape)), pytest.raises(RoutingError, match=r"0 times with torch\.topk"):
        logits(model)


def test_an_engine_in_bfloat16_disagrees_and_replay_brings_the_learner_closer_to_it() -> None:
    """Random models with 8 of 64 experts."""
    learner = build("qwen3_moe", norm_topk_prob=True, num_experts=64, num_experts_per_tok=8)
    engine = build("qwen3_moe", norm_topk_prob=True, num_experts=64, num_experts_per_tok=8).bfloat16()
    shape, recorded = expert_shape(learner), Recording(expert_shape(learner))
    prepare(learner, shape)
    prepare(engine, shape)
    ids, own = torch.randint(0, 50, (4, 100), generator=torch.Generator().manual_seed(1)), Recording(shape)
    with under(recorded):
        wanted = logits(engine, ids).float()
    with under(own):
        free = logits(learner, ids)
    replay = Replay(shape, recorded.ids, torch.ones(400, dtype=torch.bool))
    with replay.over(slice(None)):
        replayed = logits(learner, ids)
    disagree = (own.ids.sort(dim=-1).values != recorded.ids.sort(dim=-1).values).any(dim=-1).double().mean()
    assert 0.005 < float(disagree) < 0.2 and 0.005 < int(replay.differing) / 1200 < 0.2
    assert float((replayed - wanted).norm()) < float((free - wanted).norm())
