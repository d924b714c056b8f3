"""Loading says early and clearly what is wrong; saving gives a folder that transformers loads by itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
)

from stillhouse.builtin import STUDENT_DIR
from stillhouse.models.loading import IMPLEMENTATIONS, ModelError, load_causal_lm, save_hf
from stillhouse.models.packed import packed_hidden

VOCAB = 29
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
}
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "attention": "sdpa"}


def _tokenizer(n_tokens: int = VOCAB) -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(n_tokens)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY))
    model.generation_config = GenerationConfig(eos_token_id=[1, 5], temperature=0.7, do_sample=True)
    save_hf(model, _tokenizer(), tmp_path / "model")
    return tmp_path / "model"


def test_what_save_hf_wrote_is_loaded_by_transformers_itself(folder: Path) -> None:
    ours = load_causal_lm(folder, device="cpu", dtype="float32", attention="sdpa")
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert theirs.generation_config.eos_token_id == [1, 5]
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == _tokenizer().get_vocab()
    assert sorted(p.suffix for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".safetensors"}) == [".safetensors"]


def test_all_files_of_a_model_have_the_permissions_that_the_umask_gives(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    former = os.umask(0o027)
    try:
        save_hf(model, tokenizer, tmp_path / "saved")
    finally:
        os.umask(former)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "saved").iterdir()} == {0o640}
    assert not list((tmp_path / "saved").glob(".*"))


def test_model_comes_in_eval_mode_with_gradients_only_for_training(folder: Path) -> None:
    fixed = load_causal_lm(folder, **CPU)
    trained = load_causal_lm(folder, **CPU, train=True)
    assert not fixed.training and not trained.training
    assert not any(p.requires_grad for p in fixed.parameters()) and all(p.requires_grad for p in trained.parameters())


def test_packed_model_saves_without_a_trace_of_our_attention(folder: Path, tmp_path: Path) -> None:
    model = load_causal_lm(folder, device="cpu", dtype="float32", attention="packed")
    assert packed_hidden(model, torch.arange(5), (2, 3)).shape == (5, 16)
    save_hf(model, _tokenizer(), tmp_path / "again")
    assert "stillhouse" not in (tmp_path / "again" / "config.json").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path / "again")(input_ids=torch.arange(5)[None])


def _missing(tmp_path: Path, folder: Path) -> Path:
    return tmp_path / "nowhere"


def _a_file(tmp_path: Path, folder: Path) -> Path:
    return folder / "model.safetensors"


def _no_config(tmp_path: Path, folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


def _broken_config(tmp_path: Path, folder: Path) -> Path:
    (folder / "config.json").write_text("{not json")
    return folder


def _masked_lm(tmp_path: Path, folder: Path) -> Path:
    small: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    BertForMaskedLM(BertConfig(vocab_size=20, **small)).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def _encoder_decoder(tmp_path: Path, folder: Path) -> Path:
    T5Config().save_pretrained(tmp_path / "t5")
    return tmp_path / "t5"


def _no_weights(tmp_path: Path, folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    return folder


def _tensor_missing(tmp_path: Path, folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _smaller_embedding(tmp_path: Path, folder: Path) -> Path:
    return _rewritten(folder, vocab_size=VOCAB + 3)


def _larger_tokenizer(tmp_path: Path, folder: Path) -> Path:
    _tokenizer(VOCAB + 1).save_pretrained(folder)
    return folder


def _rewritten(folder: Path, **changes: Any) -> Path:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    return folder


def _in_codes(tmp_path: Path, folder: Path, *, dtype: torch.dtype = torch.int8, scaled: bool = True) -> Path:
    """Layers in one byte, as of [-2, 2]; config.json says nothing of it."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "proj" in name]:
        tensors[name] = tensors[name].mul(64.0).clamp(-127, 127).to(dtype)
        tensors |= {f"{name}_scale": torch.tensor(1 / 64)} if scaled else {}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _eight_bits(tmp_path: Path, folder: Path) -> Path:
    return _in_codes(tmp_path, folder, dtype=torch.float8_e4m3fn)


def _own_code(tmp_path: Path, folder: Path) -> Path:
    return _rewritten(folder, model_type="odd", auto_map={"AutoConfig": "odd.Odd", "AutoModelForCausalLM": "odd.Lm"})


def _package_missing(tmp_path: Path, folder: Path) -> Path:
    return _rewritten(folder, quantization_config={"quant_method": "aqlm"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_missing, "does not exist"),
        (_a_file, "is a file; expected the folder"),
        (_no_config, r"has no config\.json \(it holds: generation_config\.json, model\.safetensors"),
        (_broken_config, "cannot read the model configuration"),
        (_masked_lm, "BertForMaskedLM; expected a causal language model"),
        (_encoder_decoder, "'t5', for which transformers has no causal LM"),
        (_no_weights, "cannot load the weights"),
        (_tensor_missing, r"lacks 1 tensors .*up_proj.* random numbers"),
        (_smaller_embedding, "cannot load the weights"),
        (_in_codes, "7 of its tensors are codes of one byte whose scales were not used"),
        (_eight_bits, "7 of its tensors are codes of one byte whose scales were not used"),
        (_own_code, "needs code of its own"),
        (_package_missing, "cannot load the weights.*aqlm"),
        (_larger_tokenizer, r"tokenizer has id 29 \('w29'\), its embedding only 29 rows"),
    ],
)
def test_unusable_path_is_refused_with_its_reason(spoil: Any, message: str, tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_causal_lm(spoil(tmp_path, folder), **CPU)


def test_numbers_of_eight_bits_without_scales_are_those_of_the_file(tmp_path: Path, folder: Path) -> None:
    model = load_causal_lm(_in_codes(tmp_path, folder, dtype=torch.float8_e4m3fn, scaled=False), **CPU)
    stored = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"], stored.float())


def test_code_that_a_configuration_names_goes_along(folder: Path, tmp_path: Path) -> None:
    """transformers has the architecture, but who trusts the code runs it, or finds none."""
    _rewritten(folder, auto_map={"AutoModelForCausalLM": "odd.Odd"})
    (folder / "odd.py").write_text("from transformers import Qwen3ForCausalLM\nclass Odd(Qwen3ForCausalLM): pass\n")
    save_hf(load_causal_lm(folder, **CPU), _tokenizer(), tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert type(again).__name__ == "Odd"


def test_unknown_hub_name_offline_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"no local folder of that name either .*HF_HUB_OFFLINE is set"):
        load_causal_lm("stillhouse/no-such-model", **CPU)


def test_attention_that_nobody_registered_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS, "decode", "not_registered")
    with pytest.raises(ModelError, match="import the module that defines it"):
        load_causal_lm(folder, device="cpu", dtype="float32", attention="decode")


@pytest.mark.parametrize(("device", "current"), [("cuda:3", [3]), ("cuda", []), ("cpu", [])])
def test_a_model_on_a_gpu_makes_it_the_current_one(
    device: str, current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []

    def choose(device: torch.device) -> None:
        chosen.append(device.index)

    def stays(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
        return model  # there is no such GPU here

    monkeypatch.setattr(torch.cuda, "set_device", choose)
    monkeypatch.setattr(PreTrainedModel, "to", stays)
    load_causal_lm(STUDENT_DIR, device=device, dtype="float32", attention="sdpa")
    assert chosen == current


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named(folder: Path, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][-1, 0] = value  # a row that no probe reads
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"NaN or infinity in 1 of its tensors .*embed_tokens"):
        load_causal_lm(folder, device="cpu", dtype="float32", attention="packed")
