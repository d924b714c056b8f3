"""The output head of a checkpoint is that of the loaded model, whatever files it is in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stillhouse.models.head_file import load_head
from stillhouse.models.loading import ModelError, load_causal_lm
from stillhouse.models.logprobs import lm_head

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
    if not shards:  # old shards, which transformers passes over
        old = {name: value + 1 for name, value in load_file(tmp_path / "model.safetensors").items()}
        save_file(old, tmp_path / "model-1.safetensors", {"format": "pt"})
        index = {"weight_map": dict.fromkeys(old, "model-1.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = lm_head(load_causal_lm(tmp_path, device="cpu", dtype="float32", attention="packed"))
    got = load_head(tmp_path, device="cpu", dtype="float32")
    hidden = torch.randn(5, 16)
    assert torch.equal(got.logits(hidden), expected.logits(hidden)) and got.softcap == expected.softcap
    assert (got.bias_V is None) == (expected.bias_V is None) and not got.weight_VH.requires_grad
    half = load_head(tmp_path, device="cpu", dtype="bfloat16")
    assert half.weight_VH.dtype == torch.bfloat16 and half.identity == got.identity == expected.identity
    other = replace(got, weight_VH=got.weight_VH.clone())
    other.weight_VH[0, 0] *= 1.1
    assert other.identity != got.identity and replace(got, scale=2.0).identity != got.identity


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


@pytest.mark.parametrize("case", ["another head", "the same head", "no embedding", "former name", "untied, no head"])
@pytest.mark.parametrize("shards", [False, True])
def test_what_files_and_configuration_say_differently_is_read_as_transformers_reads_it(
    tmp_path: Path, case: str, shards: bool
) -> None:
    torch.manual_seed(0)
    model = MODELS["untied" if case.startswith("untied") else "tied"]()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    match case:
        case "another head":
            tensors["lm_head.weight"] = embedding * 0.8
        case "the same head":
            tensors["lm_head.weight"] = embedding.clone()
        case "no embedding":
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        case "former name":
            tensors["module.lm_head.weight"] = embedding * 0.8
        case _:
            del tensors["lm_head.weight"]
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = [names[::2], names[1::2]] if shards else [names]
    files = [f"model-{i}.safetensors" if shards else "model.safetensors" for i in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        save_file({name: tensors[name] for name in part}, tmp_path / file, metadata={"format": "pt"})
    if shards:
        placed = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    if case.startswith("untied"):
        with pytest.raises(ModelError, match=r"lm_head\.weight"):
            load_head(tmp_path, device="cpu", dtype="float32")
        return
    right = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded = load_causal_lm(tmp_path, device="cpu", dtype="float32", attention="packed")
    for got in (load_head(tmp_path, device="cpu", dtype="float32"), lm_head(loaded)):
        assert torch.equal(got.weight_VH, right.lm_head.weight)
    outline = load_causal_lm(tmp_path, device="cpu", dtype="float32", attention="packed", weights=False)
    assert [name for name, _ in outline.named_parameters()] == [name for name, _ in right.named_parameters()]
    loaded.save_pretrained(tmp_path / "export")
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert config["tie_word_embeddings"] == (right.lm_head.weight is right.model.embed_tokens.weight)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert torch.equal(again.lm_head.weight, right.lm_head.weight)


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    MODELS["untied"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 40}))
    with pytest.raises(ModelError, match=r"lm_head.weight is \[37, 16\], config.json says \[40, 16\]"):
        load_head(tmp_path, device="cpu", dtype="float32")
