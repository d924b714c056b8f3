"""Checkpoints that also take images: their text model is trained on text, the rest stays in every export as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from stillhouse.builtin import STUDENT_DIR
from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.loading import describe_hf, load_causal_lm, load_config, outline, save_hf
from stillhouse.models.logprobs import lm_head
from stillhouse.models.packed import packed_hidden, way_of
from stillhouse.models.tokenizer import load_tokenizer
from tests.engines.torch.generation import assert_true, make_requests, run
from tests.learner.conftest import make_item
from tests.learner.settings import learner_config

TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
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
TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 8}
QWEN_TOWER: dict[str, Any] = {**TOWER, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}


def _qwen3_5() -> PreTrainedModel:
    config = Qwen3_5Config(text_config={**TEXT, **LINEAR}, vision_config=QWEN_TOWER, image_token_id=60)
    return Qwen3_5ForConditionalGeneration(config)


def _qwen3_vl() -> PreTrainedModel:
    tower = {**QWEN_TOWER, "deepstack_visual_indexes": [0]}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=TEXT, vision_config=tower, image_token_id=60))


def _mistral3() -> PreTrainedModel:
    tower = {**TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "image_size": 32}
    text, tower = {**TEXT, "model_type": "mistral"}, {**tower, "model_type": "pixtral"}
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=tower, image_token_index=60))


MODELS = {"qwen3.5": (_qwen3_5, "padded"), "qwen3-vl": (_qwen3_vl, "packed"), "mistral3": (_mistral3, "packed")}


@pytest.fixture(params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    make, way = MODELS[request.param]
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text('{"size": 1}')
    return tmp_path / "model", way


def test_the_text_model_is_trained_and_the_rest_is_exported_as_it_was(
    checkpoint: tuple[Path, str], tmp_path: Path
) -> None:
    folder, way = checkpoint
    model = load_causal_lm(folder, device="cpu", dtype="float32", attention="packed", train=True)
    assert way_of(model) == way
    plain = cast(Any, AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager"))
    ids_T = (torch.arange(14) * 37 + 11) % 59
    with torch.no_grad():
        found_TV = lm_head(model).logits(packed_hidden(model, ids_T, (5, 9)))
        expected_TV = torch.cat([plain(input_ids=ids[None]).logits[0] for ids in ids_T.split([5, 9])])
    torch.testing.assert_close(found_TV, expected_TV, atol=2e-5, rtol=1e-5)
    trainer = Trainer(model, learner_config(lr=1e-2, weight_decay=0.1, warmup_steps=0), total_steps=3)
    trainer.step([make_item("a", [0, 0, 1, 1, 1], vocab=59), make_item("b", [0] * 9 + [1] * 20, vocab=59)])
    save_hf(model, load_tokenizer(STUDENT_DIR), tmp_path / "export")
    describe_hf(model, load_tokenizer(STUDENT_DIR), tmp_path)
    for one in (tmp_path, tmp_path / "export"):  # AutoProcessor and servers of images need it
        assert (one / "preprocessor_config.json").read_text() == '{"size": 1}'
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "export"))
    assert before.keys() == after.keys(), "the names of the checkpoint"
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    of_text = {name for name in before if "language_model" in name or name == "lm_head.weight"}
    assert changed == of_text and of_text != before.keys()
    (tmp_path / "export" / "tokenizer.json").unlink()  # not the model's own
    load_causal_lm(tmp_path / "export", device="cpu", dtype="float32", attention="packed")


def test_the_embedded_engine_generates_with_it(checkpoint: tuple[Path, str]) -> None:
    folder, _ = checkpoint
    engine = TorchEngine(
        load_causal_lm(folder, device="cpu", dtype="float32", attention="sdpa"),
        EngineConfig(max_concurrent=3, max_context=64, device="cpu"),
    )
    requests = make_requests(4)
    plain = cast(Any, AutoModelForImageTextToText.from_pretrained(folder))
    assert_true(plain, requests, run(engine, requests))


def test_ranks_without_weights_have_the_same_names(checkpoint: tuple[Path, str]) -> None:
    folder, _ = checkpoint
    whole = load_causal_lm(folder, device="cpu", dtype="float32", attention="packed")
    empty = load_causal_lm(folder, device="cpu", dtype="float32", attention="packed", weights=False)
    assert [name for name, _ in whole.named_parameters()] == [name for name, _ in empty.named_parameters()]
    with torch.device("meta"):
        assert type(outline(load_config(str(folder)))) is type(whole)
