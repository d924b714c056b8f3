"""The output head of a checkpoint is that of the loaded model, whatever files it is in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from models.head_file import load_head
from models.loading import ModelError, load_causal_lm
from models.logprobs import lm_head

SMALL: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True)),
    "untied": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=False)),
    "bias": lambda: PhiForCausalLM(PhiConfig(**SMALL)),
    "softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8)),
}


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_head_is_that_of_the_loaded_model(
    tmp_path: Path, make: Callable[[], PreTrainedModel], shards: bool
) -> None:
    torch.manual_seed(0)
    model = make()
    torch.nn.init.normal_(lm_head(model).weight_VH)
    model.save_pretrained(tmp_path, max_shard_size="8KB" if shards else "1GB")
    assert (tmp_path / "model.safetensors.index.json").is_file() == shards
    expected = lm_head(load_causal_lm(tmp_path, device="cpu", dtype="float32", attention="packed"))
    got = load_head(tmp_path, device="cpu", dtype="float32")
    hidden = torch.randn(5, 16)
    assert torch.equal(got.logits(hidden), expected.logits(hidden)) and got.softcap == expected.softcap
    assert (got.bias_V is None) == (expected.bias_V is None) and not got.weight_VH.requires_grad
    assert load_head(tmp_path, device="cpu", dtype="bfloat16").weight_VH.dtype == torch.bfloat16


def test_a_head_under_another_name_is_found_by_loading_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tied checkpoint saved from the model without its head has names without `model.`."""
    model = MODELS["tied"]()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    got = load_head(tmp_path, device="cpu", dtype="float32")
    assert torch.equal(got.weight_VH, lm_head(model).weight_VH) and "loading the whole model" in caplog.text


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    MODELS["untied"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 40}))
    with pytest.raises(ModelError, match=r"lm_head.weight is \[37, 16\], config.json says \[40, 16\]"):
        load_head(tmp_path, device="cpu", dtype="float32")
