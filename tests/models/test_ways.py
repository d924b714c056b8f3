"""Architectures that leak in a row without padding run padded, or one sequence at a time, and then exactly: logits and
gradients are those of each sequence alone through transformers' own code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from stillhouse.models import packed
from stillhouse.models.logprobs import lm_head
from stillhouse.models.packed import PackingError, choose_way, packed_hidden, set_way, way_of
from stillhouse.models.past import CacheUse, Cells

LENGTHS = (3, 17, 1, 40, 9, 8, 2)
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
LATENT: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
SPARSE: dict[str, Any] = {**LATENT, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


def _qwen3_5() -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SMALL, **LINEAR))


def _qwen3_5_moe() -> PreTrainedModel:
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SMALL, **LINEAR, **EXPERTS))


def _qwen3_next() -> PreTrainedModel:
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL, **LINEAR, **EXPERTS))


def _lfm2() -> PreTrainedModel:
    return Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]))


def _falcon_h1() -> PreTrainedModel:
    state: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8}
    return FalconH1ForCausalLM(FalconH1Config(**SMALL, **state, mamba_chunk_size=8))


def _mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2))


def _bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4))


def _llama4() -> PreTrainedModel:
    chunks: dict[str, Any] = {"attention_chunk_size": 16, "layer_types": ["chunked_attention", "full_attention"]}
    experts: dict[str, Any] = {"num_local_experts": 2, "intermediate_size_mlp": 48, "floor_scale": 4}
    return Llama4ForCausalLM(Llama4TextConfig(**SMALL, **chunks, **experts))


def _deepseek_v32() -> PreTrainedModel:
    shape = {**SMALL, "num_key_value_heads": 4}
    del shape["head_dim"]
    return DeepseekV32ForCausalLM(DeepseekV32Config(**shape, **SPARSE, **ROUTED, moe_intermediate_size=24))


def _dynamic() -> PreTrainedModel:
    """Frequencies that the longest sequence of a call decides, and a convolution."""
    rope: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 8.0}
    return Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"], rope_parameters=rope))


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "qwen3.5 (gated delta rule)": (_qwen3_5, "padded"),
    "qwen3.5 mixture": (_qwen3_5_moe, "padded"),
    "qwen3-next": (_qwen3_next, "padded"),
    "lfm2 (convolutions)": (_lfm2, "padded"),
    "falcon-h1 (mamba beside attention)": (_falcon_h1, "padded"),
    "mamba (no attention)": (_mamba, "padded"),
    "bloom (distances of its own)": (_bloom, "padded"),
    "llama4 (chunks)": (_llama4, "padded"),
    "deepseek v3.2 (sparse indexer)": (_deepseek_v32, "padded"),
    "dynamic frequencies, convolutions": (_dynamic, "alone"),
}


def build(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the stock initialisation is so small that attention hardly matters
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    return model


def _ids() -> Tensor:
    return torch.randint(0, 61, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def _alone(model: PreTrainedModel, ids_T: Tensor) -> Tensor:
    return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in ids_T.split(list(LENGTHS))])


@pytest.mark.parametrize("name", MODELS)
def test_rows_equal_each_sequence_alone_and_so_do_gradients(name: str) -> None:
    make, way = MODELS[name]
    model, plain, ids_T = build(make), build(make), _ids()
    plain.set_attn_implementation("eager")
    choose_way(model)
    assert way_of(model) == way
    weight_TV = torch.randn((len(ids_T), 61), generator=torch.Generator().manual_seed(2))
    found_TV, expected_TV = lm_head(model).logits(packed_hidden(model, ids_T, LENGTHS)), _alone(plain, ids_T)
    assert expected_TV.abs().max() > 0.05
    torch.testing.assert_close(found_TV, expected_TV, atol=2e-5, rtol=1e-5)
    for logits_TV in (found_TV, expected_TV):
        (logits_TV * weight_TV).sum().backward()
    for (named, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == ("indexer" in named), named
        if ours.grad is not None and theirs.grad is not None:
            scale = max(1.0, float(theirs.grad.abs().max()))
            torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-5 * scale, rtol=1e-4, msg=named)


def test_a_row_without_padding_leaks_and_the_probe_says_by_how_much(caplog: pytest.LogCaptureFixture) -> None:
    """Its configuration names no types of layers: only the measurement shows it."""
    model = build(_bloom)
    set_way(model, "packed")
    with pytest.raises(PackingError, match=r"packed logits differ from the plain forward by \d.* mixes tokens outside"):
        packed.probe(model)
    with caplog.at_level(logging.INFO):
        choose_way(model)
    assert "runs its sequences padded: BloomForCausalLM: packed logits differ" in caplog.text


def test_padding_that_leaks_leaves_one_sequence_at_a_time() -> None:
    model = build(_qwen3_5)

    def leak(_module: Any, _inputs: Any, out: Tensor) -> Tensor:
        return out + 0.1 * out.mean(dim=0, keepdim=True)  # between the rows of a batch

    cast(Any, model).model.layers[0].mlp.register_forward_hook(leak)
    choose_way(model)
    assert way_of(model) == "alone"


def _looks_ahead(out_BTH: Tensor) -> Tensor:
    return out_BTH + out_BTH.mean(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (_looks_ahead, "is not causal: tokens change logits before them by"),
        (
            None,
            "alone logits differ .* changes its logits after the head; it can be neither .*engine = sglang",
        ),
    ],
    ids=["looks ahead", "other head"],
)
def test_what_no_way_makes_exact_is_refused(wrong: Callable[[Tensor], Tensor] | None, named: str) -> None:
    model = cast(Any, build(_qwen3_5))
    if wrong is None:
        model.lm_head.register_forward_hook(lambda _m, _i, out: out * 1.01)  # pyright: ignore
    else:
        model.model.layers[0].mlp.register_forward_hook(lambda _m, _i, out: wrong(out))  # pyright: ignore
    with pytest.raises(PackingError, match=named):
        choose_way(model)


def test_a_bidirectional_model_is_refused_from_its_configuration() -> None:
    with pytest.raises(PackingError, match="configured as bidirectional"):
        choose_way(LlamaForCausalLM(LlamaConfig(**cast(Any, {**SMALL, "is_causal": False}))))


def test_only_packed_sequences_continue_a_past() -> None:
    model, ids_T = build(_qwen3_5), _ids()[:5]
    choose_way(model)
    with pytest.raises(PackingError, match="runs padded; only packed sequences continue a past"):
        packed_hidden(model, ids_T, [5], [CacheUse(cells=Cells(), keep_last=5)])
    with pytest.raises(PackingError, match="its state is more than keys and values"):
        packed.probe_past(model)


def test_ranks_that_share_parameters_make_as_many_passes_as_any() -> None:
    model, ids_T = build(_qwen3_5), _ids()
    choose_way(model)
    expected_TH = packed_hidden(model, ids_T, LENGTHS)
    asked: list[int] = []
    calls: list[Any] = []
    cast(Any, model).model.layers[0].register_full_backward_hook(lambda *_: calls.append(1))  # pyright: ignore

    def most(number: int) -> int:
        asked.append(number)
        return number + 2

    set_way(model, "padded", most=most)
    found_TH = packed_hidden(model, ids_T, LENGTHS)
    assert torch.equal(found_TH, expected_TH)
    found_TH.sum().backward()
    assert len(calls) == asked[0] + 2
