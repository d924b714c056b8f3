"""Teachers in 4 bits: what transformers' own quantised model computes, over our rows, and the planned bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from stillhouse.builtin import TEACHER_DIR
from stillhouse.engines.base import ScoreRequest
from stillhouse.engines.config import ScorerSettings
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.models.description import NF4_BYTES
from stillhouse.models.loading import ModelError, load_causal_lm
from stillhouse.models.packed import PackingError, choose_way
from tests.torchao_packages import add_torchao, needs_bitsandbytes

pytestmark = [needs_bitsandbytes, pytest.mark.slow]
LENGTHS = (5, 23, 40)


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    add_torchao()


def rows() -> list[Any]:
    drawn = np.random.default_rng(0)
    return [drawn.integers(1, 15, length).astype(np.int32) for length in LENGTHS]


def theirs(**how: Any) -> Any:
    """transformers alone."""
    return AutoModelForCausalLM.from_pretrained(TEACHER_DIR, dtype=torch.float32, **how).eval()


def nf4() -> Any:
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return theirs(quantization_config=how, device_map={"": "cpu"})


@torch.no_grad()
def logprobs(model: Any, ids: Any) -> Any:
    rows_TV = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
    return rows_TV[:-1].gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0].numpy()


def test_scores_are_those_of_transformers_own_model_in_4_bits_alone_and_together_and_after_a_turn() -> None:
    scorer = TorchScorer.load(TEACHER_DIR, ScorerSettings(device="cpu", quantize="nf4", prefix_cache_mb=0))
    quantised, plain = nf4(), theirs()
    requests = [ScoreRequest(ids, 1, f"{number}") for number, ids in enumerate(rows())]
    together = [result.logprobs for result in scorer.score(requests)]
    scorer.give_back()
    scorer.take_again()
    for request, found in zip(requests, together, strict=True):
        np.testing.assert_allclose(found, logprobs(quantised, request.token_ids), atol=2e-5)
        assert np.abs(found - logprobs(plain, request.token_ids)).max() > 1e-3, (
            "they are not those of the whole weights"
        )
        np.testing.assert_array_equal(scorer.score([request])[0].logprobs, scorer.score([request])[0].logprobs)
        np.testing.assert_allclose(scorer.score([request])[0].logprobs, found, atol=2e-5)
    scorer.close()


def test_a_number_takes_the_planned_bytes() -> None:
    import bitsandbytes as bnb  # pyright: ignore[reportMissingImports]

    layer = bnb.nn.Linear4bit(4096, 1024, bias=False, compress_statistics=True, quant_type="nf4").to("cpu")
    state = layer.weight.quant_state
    held = [layer.weight.data, state.absmax, state.state2.absmax]
    assert sum(t.nbytes for t in held) / (4096 * 1024) == pytest.approx(NF4_BYTES, rel=1e-3)


def test_8_bits_of_the_same_package_are_refused_by_our_probe() -> None:
    """Why nf4 is the only choice: LLM.int8 rounds activations by what else is in the batch."""
    model = theirs(quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map={"": "cpu"})
    with pytest.raises(PackingError, match="tokens change logits before them"):
        choose_way(model)


def test_a_checkpoint_that_is_quantised_already_is_scored_as_it_is(tmp_path: Path) -> None:
    nf4().save_pretrained(tmp_path)
    found = load_causal_lm(tmp_path, device="cpu", dtype="float32", attention="packed")
    ids = rows()[2]
    np.testing.assert_array_equal(logprobs(copy_of_plain(found), ids), logprobs(nf4(), ids))


def copy_of_plain(model: Any) -> Any:
    """With transformers' own attention again."""
    model.set_attn_implementation("sdpa")
    return model


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be quantized"):
        load_causal_lm(tmp_path, device="cpu", dtype="float32", attention="packed", quantize="nf4")
