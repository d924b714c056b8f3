from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.decoders import CachedSlots, Decoder, FusedDecoder, ModuleDecoder, build_slots
from stillhouse.engines.torch.engine import TorchEngine
from tests.engines.torch.generation import VOCAB, assert_true, make_engine, make_model, make_requests, run

torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ["gpt2", "gpt-neox", "mistral-window", "gemma2", "gpt-oss", "qwen3-moe"])
def test_any_architecture_with_the_attention_interface_runs_through_its_modules(kind: str) -> None:
    """Learned, rotary and partly rotary positions; sliding windows, capped scores, sinks and experts. Those with a
    decoder of their own are in test_weight_swap.py, with it and without."""
    requests = make_requests(5, new_tokens=9)
    outputs = run(make_engine(kind, fused=False), requests)
    assert_true(make_model(kind), requests, outputs)


@pytest.mark.parametrize(
    ("kind", "decoder"),
    [("llama", FusedDecoder), ("qwen2", FusedDecoder), ("qwen3", FusedDecoder), ("mistral-window", ModuleDecoder)],
)
def test_an_architecture_gets_its_own_decoder_or_its_modules(kind: str, decoder: type[Decoder]) -> None:
    slots = build_slots(make_model(kind), 2, 32, fused=True)
    assert isinstance(slots, CachedSlots) and isinstance(slots.decoder, decoder)


def test_half_precision_stays_near_the_truth() -> None:
    requests = make_requests(4, new_tokens=8)
    for fused in (True, False):
        outputs = run(make_engine(dtype="bfloat16", fused=fused), requests)
        model = make_model("qwen3").to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
        assert_true(model, requests, outputs, atol=0.5)


def test_rotary_frequencies_that_follow_the_batch_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=64,
        rope_parameters=rope,
    )
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        TorchEngine(LlamaForCausalLM(config), EngineConfig(max_context=32, device="cpu"))
