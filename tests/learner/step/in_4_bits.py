"""QLoRA (learner.lora.quantize). test_qlora.py runs this in a process of its own: peft and transformers look for
bitsandbytes once, when they are imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast

from stillhouse.builtin import STUDENT_DIR
from stillhouse.learner.batch import TrainItem
from stillhouse.learner.checkpoints.checkpoint import LearnerState, capture_rng, load_checkpoint
from stillhouse.learner.config import LearnerConfig, LoraConfig
from stillhouse.learner.step.lora import Adapters, LoraError
from stillhouse.learner.step.make_trainer import make_trainer
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.loading import load_causal_lm
from stillhouse.models.tokenizer import load_tokenizer
from stillhouse.protocol.messages import WeightVersion
from stillhouse.tools.export.command import main as export
from stillhouse.weights.staged_weights import StagedWeights, tensor_of
from tests.learner.checkpoints.saving import save_checkpoint
from tests.learner.conftest import make_item

LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj"), quantize="nf4")
CONFIG = LearnerConfig(lora=LORA, lr=1e-2, warmup_steps=0, device="cpu")
IDS = torch.tensor([[1, 5, 9, 3, 7, 2, 8, 4, 6, 11, 12, 10]])


def trainer_of(config: LearnerConfig = CONFIG, checkpoint: Path | None = None) -> Trainer:
    torch.manual_seed(0)
    return make_trainer(str(STUDENT_DIR), config, steps=9, vocab_tokens=15, seed=0, checkpoint=checkpoint)


def theirs() -> Any:
    """transformers alone, in 4 bits."""
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return AutoModelForCausalLM.from_pretrained(
        STUDENT_DIR, dtype=torch.float32, quantization_config=how, device_map={"": "cpu"}
    )


def rounded() -> dict[str, Tensor]:
    """The student's weights as they are in 4 bits."""
    named = dict(theirs().named_parameters())
    return {
        name: dequantize_4bit(p.data, p.quant_state) if hasattr(p, "quant_state") else p.detach()
        for name, p in named.items()
    }


def over_rounded(config: LearnerConfig) -> Trainer:
    """The same adapters over a plain float32 model of those weights: no 4 bits, no bitsandbytes."""
    model = load_causal_lm(STUDENT_DIR, device="cpu", dtype="float32", attention="packed", train=True)
    with torch.no_grad():
        for name, value in rounded().items():
            dict(model.named_parameters())[name].copy_(value)
    torch.manual_seed(0)
    adapters = Adapters(model, msgspec.structs.replace(LORA, quantize="none"), base="rounded")
    return Trainer(model, config, total_steps=9, vocab_tokens=15, adapters=adapters)


def batch(name: str = "a") -> list[TrainItem]:
    return [make_item(name, [0, 0, 1, 1, 1]), make_item(f"{name}2", [0, 1, 1])]


def published(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor_of(weight).clone() for name, weight in trainer.weights()}


def test_without_a_step_it_is_transformers_own_model_in_4_bits() -> None:
    ours = trainer_of().model
    ours.set_attn_implementation("sdpa")
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, theirs()(IDS).logits, atol=1e-5, rtol=1e-5)
        plain = AutoModelForCausalLM.from_pretrained(STUDENT_DIR, dtype=torch.float32)(IDS).logits
    assert (ours(IDS).logits - plain).abs().max() > 1e-2, "4 bits are not the whole weights"


def test_gradients_and_steps_are_those_over_the_rounded_weights_in_float32() -> None:
    ours, plain = trainer_of(), over_rounded(CONFIG)
    for name in ("a", "b", "c"):
        found, expected = (one.gradient(batch(name)) for one in (ours, plain))
        assert len(found) == len(expected) == 2 * 2 * ours.model.config.num_hidden_layers
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=2e-3)
        losses = [one.step(batch(name)).loss for one in (ours, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_actors_are_sent_the_policy_that_is_trained() -> None:
    trainer = trainer_of()
    trainer.step(batch())
    staged = StagedWeights()
    staged.fill(WeightVersion(0, 1), trainer.weights())
    actor = AutoModelForCausalLM.from_pretrained(STUDENT_DIR, dtype=torch.float32)
    assert [name for name, _ in staged.named] == [name for name, _ in actor.named_parameters()]
    with torch.no_grad():
        for (_, sent), held in zip(staged.named, actor.parameters(), strict=True):
            held.copy_(sent)
        trainer.model.set_attn_implementation("sdpa")
        torch.testing.assert_close(actor(IDS).logits, trainer.model(IDS).logits, atol=1e-4, rtol=1e-4)
    base = rounded()
    changed = {name for name, value in staged.named if not torch.equal(value, base[name])}
    assert all(name.endswith(("q_proj.weight", "down_proj.weight")) for name in changed) and changed


def test_a_resumed_run_goes_on_to_the_bit_and_an_export_is_what_was_trained(tmp_path: Path) -> None:
    tokenizer: PreTrainedTokenizerFast = load_tokenizer(STUDENT_DIR)  # pyright: ignore[reportAssignmentType]
    trainer = trainer_of()
    trainer.step(batch())
    state = LearnerState(WeightVersion(0, 1), trainer.state_dict(), {}, None, capture_rng(), {})
    path = save_checkpoint(tmp_path / "runs", trainer.model, tokenizer, state, keep=1, adapters=trainer.adapters)
    assert export([str(path), "--to", str(tmp_path / "out")]) == 0
    merged, expected = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32), published(trainer)
    assert all(torch.equal(value, expected[name]) for name, value in merged.named_parameters())
    resumed = trainer_of(checkpoint=path)
    resumed.load_state_dict(load_checkpoint(path).optimizer)
    assert trainer.step(batch("b")).loss == resumed.step(batch("b")).loss
    expected = published(trainer)
    assert all(torch.equal(value, expected[name]) for name, value in published(resumed).items())
    whole = msgspec.structs.replace(CONFIG, lora=msgspec.structs.replace(LORA, quantize="none"))
    with pytest.raises(LoraError, match="expected the same weights"):
        trainer_of(whole, checkpoint=path)


def test_products_in_bfloat16_train_too() -> None:
    trainer = trainer_of(msgspec.structs.replace(CONFIG, dtype="bfloat16"))
    reference = trainer_of()
    losses = [one.step(batch()).loss for one in (trainer, reference)]
    assert losses[0] == pytest.approx(losses[1], rel=0.1, abs=0.02)
