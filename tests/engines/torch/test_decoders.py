from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.decoders import CachedSlots, Decoder, FusedDecoder, ModuleDecoder, build_slots
from stillhouse.engines.torch.engine import TorchEngine
from tests.engines.torch.generation import VOCAB, assert_true, make_engine, make_model, make_requests, run

torch.set_num_threads(1)


@pytest.mark.parametrize(
    "kind", ["llama", "gpt2", "gpt-neox", "mistral-window", "gemma2", "gpt-oss", "qwen2", "qwen3-moe"]
)
def test_any_architecture_with_the_attention_interface_runs_through_its_modules(kind: str) -> None:
    """Learned, rotary and partly rotary positions; sliding windows, capped scores, sinks and experts."""
    requests = make_requests(5, new_tokens=9)
    outputs = run(make_engine(kind, fused=False), requests)
    assert_true(make_model(kind), requests, outputs)


def _decoder(kind: str) -> Decoder:
    slots = build_slots(make_model(kind), 2, 32, fused=True)
    assert isinstance(slots, CachedSlots)
    return slots.decoder


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_fused_decoder_agrees_with_the_modules(kind: str) -> None:
    assert isinstance(_decoder(kind), FusedDecoder)
    requests = make_requests(5, new_tokens=9)
    fused, plain = (run(make_engine(kind, fused=choice), requests) for choice in (True, False))
    for request in requests:
        a, b = fused[request.request_id], plain[request.request_id]
        assert a.ids == b.ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_an_architecture_without_a_fused_decoder_gets_its_modules() -> None:
    assert isinstance(_decoder("mistral-window"), ModuleDecoder)


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
