"""The packed forward equals the plain per-sequence forward, values and gradients, and refuses what it cannot pack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stillhouse.models import packed
from stillhouse.models.logprobs import lm_head
from stillhouse.models.packed import PackingError, packed_hidden
from stillhouse.models.packed_layout import first_fit_decreasing
from stillhouse.models.past import CacheUse, Cells, CellSpan, Past

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOWED: dict[str, Any] = {**SMALL, "head_dim": 8, "sliding_window": 4}


def _qwen3() -> Any:
    return Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True)


def _qwen3_moe() -> Any:
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    return Qwen3MoeForCausalLM, Qwen3MoeConfig(**SMALL, **experts)


def _gpt2() -> Any:
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel, GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, **ends)


def _mistral() -> Any:
    return MistralForCausalLM, MistralConfig(**WINDOWED)


def _gemma2() -> Any:
    return Gemma2ForCausalLM, Gemma2Config(**WINDOWED, final_logit_softcapping=0.3, attn_logit_softcapping=0.5)


def _gpt_oss() -> Any:
    experts: dict[str, Any] = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default"},
    }
    return GptOssForCausalLM, GptOssConfig(**WINDOWED, **experts)


def _cohere() -> Any:
    return CohereForCausalLM, CohereConfig(**SMALL, logit_scale=0.25)


def _hyperclovax() -> Any:
    return HyperCLOVAXForCausalLM, HyperCLOVAXConfig(**SMALL, logits_scaling=0.25)


def _granite() -> Any:
    return GraniteForCausalLM, GraniteConfig(**SMALL, logits_scaling=4.0)


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0, 9.0, 10.0, 11.0],
    "factor": 8.0,
    "original_max_position_embeddings": 8,
}


def _phi3() -> Any:
    return Phi3ForCausalLM, Phi3Config(**SMALL, original_max_position_embeddings=8, rope_parameters=dict(LONGROPE))


def _phimoe() -> Any:
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    scales = {"short_mscale": 1.0, "long_mscale": 1.7}
    return PhimoeForCausalLM, PhimoeConfig(**SMALL, **experts, rope_parameters={**LONGROPE, **scales})


def _gemma3() -> Any:
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}, "full_attention": dict(LONGROPE)}
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM, Gemma3TextConfig(**WINDOWED, layer_types=kinds, rope_parameters=ropes)


def _yarn() -> Any:
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 8}
    return Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=8, rope_parameters=rope)


def _dynamic() -> Any:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 8.0}
    return Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=8, rope_parameters=rope)


MOVING: dict[str, Callable[[], Any]] = {
    "phi3 (longrope)": _phi3,
    "phimoe (longrope with scales, experts)": _phimoe,
    "gemma3 (longrope in layers of one type)": _gemma3,
    "yarn": _yarn,
    "dynamic": _dynamic,
}
"""What else may depend on the longest sequence of a row. The original context is 8 tokens."""
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "qwen3 (GQA, rotary)": _qwen3,
    "qwen3_moe (experts in every layer)": _qwen3_moe,
    "gpt2 (learned positions, Conv1D)": _gpt2,
    "mistral (sliding window)": _mistral,
    "gemma2 (soft caps, alternating windows)": _gemma2,
    "gpt_oss (sinks, experts)": _gpt_oss,
    "cohere (logit scale)": _cohere,
    "granite (logits divided)": _granite,
    "hyperclovax (logits multiplied, under the name by which granite divides)": _hyperclovax,
}


def _build(make: Callable[[], Any], implementation: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model_class, config = make()
    model = model_class._from_config(config, attn_implementation=implementation, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the stock initialisation is so small that attention hardly matters
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    return cast(PreTrainedModel, model)


def _ids(lengths: Sequence[int], vocab_size: int = 61) -> Tensor:
    return torch.randint(0, vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(1))


def _plain_logits(model: PreTrainedModel, ids_T: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in ids_T.split(list(lengths))])


@pytest.mark.parametrize("name", ARCHITECTURES | MOVING)
@pytest.mark.parametrize("lengths", [(7,), (5, 5, 5), (3, 17, 1, 40, 9, 8, 2)], ids=str)
def test_packed_equals_plain_forward(name: str, lengths: tuple[int, ...]) -> None:
    dtype = torch.float32 if "experts" in name else torch.float64  # torch has no float64 kernel for experts
    make = (ARCHITECTURES | MOVING)[name]
    model, plain = _build(make, packed.IMPLEMENTATION, dtype), _build(make, "eager", dtype)
    ids_T = _ids(lengths)
    with torch.no_grad():
        logits_TV = lm_head(model).logits(packed_hidden(model, ids_T, lengths))
        expected_TV = _plain_logits(plain, ids_T, lengths)
    assert expected_TV.abs().max() > 0.05
    # norms and rotary angles are float32 inside whatever the model's dtype
    torch.testing.assert_close(logits_TV, expected_TV, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [_qwen3, _qwen3_moe, _gpt2, _gemma2, _phi3])
def test_packed_gradients_equal_plain_gradients(make: Callable[[], Any]) -> None:
    lengths = (3, 17, 1, 30, 9)
    model, plain = _build(make, packed.IMPLEMENTATION), _build(make, "eager")
    ids_T = _ids(lengths)
    weight_TV = torch.randn((sum(lengths), 61), generator=torch.Generator().manual_seed(2))
    (lm_head(model).logits(packed_hidden(model, ids_T, lengths)) * weight_TV).sum().backward()
    (_plain_logits(plain, ids_T, lengths) * weight_TV).sum().backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None, name
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5 * max(scale, 1.0), rtol=1e-4, msg=name)


def test_a_sequence_does_not_feel_its_neighbours() -> None:
    model = _build(_qwen3, packed.IMPLEMENTATION)
    lengths = (6, 9, 4)
    ids_T = _ids(lengths)
    other_T = ids_T.clone()
    other_T[6:15] = (other_T[6:15] + 1) % 61
    with torch.no_grad():
        before_TH, after_TH = packed_hidden(model, ids_T, lengths), packed_hidden(model, other_T, lengths)
    assert torch.equal(before_TH[:6], after_TH[:6]) and torch.equal(before_TH[15:], after_TH[15:])
    assert not torch.allclose(before_TH[6:15], after_TH[6:15])


def test_bfloat16_autocast_runs_and_stays_near_float32() -> None:
    model = _build(_qwen3, packed.IMPLEMENTATION)
    lengths = (6, 9, 4)
    with torch.no_grad():
        full_TH = packed_hidden(model, _ids(lengths), lengths)
        with torch.autocast("cpu", torch.bfloat16):
            half_TH = packed_hidden(model, _ids(lengths), lengths).float()
    assert 0 < float((half_TH - full_TH).norm() / full_TH.norm()) < 0.05


@pytest.mark.parametrize("lengths", [(3, 4), (9, 0), (), (8,)], ids=str)
def test_lengths_that_do_not_fit_the_row_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected ids"):
        packed_hidden(_build(_qwen3, packed.IMPLEMENTATION), _ids((9,)), lengths)


def test_sequence_longer_than_the_context_window_is_refused() -> None:
    with pytest.raises(ValueError, match="context window of this model is 64"):
        packed_hidden(_build(_gpt2, packed.IMPLEMENTATION), _ids((65,)), (65,))


def test_packed_model_called_directly_is_refused() -> None:
    model = _build(_qwen3, packed.IMPLEMENTATION)
    with pytest.raises(PackingError, match="called directly"):
        model(input_ids=_ids((9,))[None])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sequences_that_continue_a_past_equal_the_whole_ones(name: str) -> None:
    """In one pack: two that continue (one a past of several pieces, the last of them cut), and two from the start."""
    model = _build(ARCHITECTURES[name], packed.IMPLEMENTATION)
    long_T, other_T = _ids((23,)), _ids((23,))[8:]
    whole_TH, other_TH = (packed_hidden(model, ids_T, [len(ids_T)]) for ids_T in (long_T, other_T))
    first, second, third = Cells(), Cells(), Cells()
    packed_hidden(model, long_T[:11], [11], [CacheUse(cells=first, keep_last=11)])
    packed_hidden(model, long_T[11:17], [6], [CacheUse(Past((CellSpan(first, 11),)), second, 4)])
    assert second.layers[0][0].shape[1] == 4, "of the last tokens only"
    packed_hidden(model, long_T[11:17], [6], [CacheUse(Past((CellSpan(first, 11),)), third, 6)])
    pasts = (Past((CellSpan(first, 11), CellSpan(third, 4))), Past((CellSpan(first, 3),)))
    row_T = torch.cat([long_T[15:], other_T, long_T[3:], other_T[:2]])
    around = [CacheUse(pasts[0]), None, CacheUse(pasts[1]), CacheUse()]
    found_TH = packed_hidden(model, row_T, [8, 15, 20, 2], around)
    expected_TH = torch.cat([whole_TH[15:], other_TH, whole_TH[3:], other_TH[:2]])
    torch.testing.assert_close(found_TH, expected_TH, rtol=1e-4, atol=1e-5)
    assert packed.probe_past(model) == first.nbytes // 11


def test_a_past_counts_towards_the_context_window() -> None:
    model = _build(_qwen3, packed.IMPLEMENTATION)
    cells = Cells()
    packed_hidden(model, _ids((60,)), [60], [CacheUse(cells=cells, keep_last=60)])
    with pytest.raises(ValueError, match="sequence of 65 tokens; the context window of this model is 64"):
        packed_hidden(model, _ids((5,)), [5], [CacheUse(Past((CellSpan(cells, 60),)))])


def test_probe_refuses_a_past_that_a_model_does_not_continue() -> None:
    model = _build(_qwen3, packed.IMPLEMENTATION)
    model.model.layers[1].mlp.register_forward_hook(lambda _m, _i, out: out + out.mean(dim=1, keepdim=True))  # pyright: ignore
    with pytest.raises(PackingError, match="cannot continue from kept keys"):
        packed.probe_past(model)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_probe_accepts_what_packs_correctly_and_puts_the_attention_back(name: str) -> None:
    model = _build(ARCHITECTURES[name], packed.IMPLEMENTATION)
    packed.probe(model)
    packed_hidden(model, _ids((4, 3)), (4, 3))


def test_probe_refuses_a_model_whose_logits_are_not_its_linear_head() -> None:
    model = _build(_qwen3, packed.IMPLEMENTATION)
    model.lm_head.register_forward_hook(lambda _m, _i, out: out * 1.01)  # pyright: ignore
    with pytest.raises(PackingError, match="differ from the plain forward"):
        packed.probe(model)


def test_probe_refuses_a_model_that_mixes_tokens_outside_attention() -> None:
    model = _build(_qwen3, packed.IMPLEMENTATION)

    def leak(_module: Any, _inputs: Any, out_1TH: Tensor) -> Tensor:
        return out_1TH + 0.1 * torch.nn.functional.pad(out_1TH, (0, 0, 1, 0))[:, :-1]  # a causal convolution

    model.model.layers[0].mlp.register_forward_hook(leak)  # pyright: ignore
    with pytest.raises(PackingError, match="mixes tokens outside"):
        packed.probe(model)


def test_probe_refuses_rotations_that_depend_on_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "turn_each_alone", lambda _model: None)  # pyright: ignore
    with pytest.raises(PackingError, match="Phi3RotaryEmbedding turns a short sequence otherwise beside a long one"):
        packed.probe(_build(_phi3, packed.IMPLEMENTATION))


@pytest.mark.parametrize("name", MOVING)
def test_probe_accepts_what_is_turned_alone(name: str) -> None:
    packed.probe(_build(MOVING[name], packed.IMPLEMENTATION))


def test_a_window_that_an_architecture_keeps_to_itself_is_run_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build(_mistral, packed.IMPLEMENTATION)
    inner = packed.packed_attention

    def without_window(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **{**kwargs, "sliding_window": None})

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, packed.IMPLEMENTATION, without_window)  # pyright: ignore
    with pytest.raises(PackingError, match="sliding window of 4 tokens"):
        packed_hidden(model, _ids((4,)), (4,))
    packed.choose_way(model)
    assert packed.way_of(model) == "padded"


def test_first_fit_decreasing_drops_nothing_and_keeps_to_the_budget() -> None:
    lengths = [5, 9, 3, 12, 4, 1, 9]
    packs = first_fit_decreasing(lengths, 10)
    assert sorted(index for pack in packs for index in pack) == list(range(7))
    assert [[lengths[i] for i in pack] for pack in packs] == [[12], [9, 1], [9], [5, 4], [3]]
    with pytest.raises(ValueError, match="budget 0"):
        first_fit_decreasing(lengths, 0)
