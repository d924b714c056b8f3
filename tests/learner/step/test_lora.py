"""Adapters: what is trained, what actors get, what a checkpoint holds, and which layers cannot have one."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.checkpoints.checkpoint import LearnerState, capture_rng, load_checkpoint
from stillhouse.learner.config import LearnerConfig, LoraConfig
from stillhouse.learner.export import export as export_run
from stillhouse.learner.step.lora import Adapters, LoraError
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.loading import load_causal_lm, save_hf
from stillhouse.models.packed import IMPLEMENTATION
from stillhouse.protocol.messages import WeightVersion
from stillhouse.tools.export.command import main as export
from stillhouse.weights.staged_weights import Merged, StagedWeights, tensor_of
from tests.learner.checkpoints.saving import save_checkpoint
from tests.learner.conftest import build_hybrid, make_item, tiny_student

STUDENTS = (tiny_student, build_hybrid, partial(build_hybrid, num_experts=4))
LORA = LoraConfig(rank=4, alpha=8.0)
CONFIG = LearnerConfig(lora=LORA, lr=1e-2, warmup_steps=0)


@pytest.fixture
def base(request: pytest.FixtureRequest, small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A student's folder. Its vocabulary has to have a row for each token of the tokenizer."""
    folder = tmp_path / "base"
    save_hf(getattr(request, "param", tiny_student)(vocab=len(small_tokenizer)), small_tokenizer, folder)
    return folder


def make_trainer(base: Path, lora: LoraConfig = LORA, **changes: Any) -> Trainer:
    model = load_causal_lm(base, device="cpu", dtype="float32", attention="packed", train=True)
    torch.manual_seed(0)
    adapters = Adapters(model, lora, base=str(base))
    return Trainer(model, msgspec.structs.replace(CONFIG, **changes), total_steps=9, adapters=adapters)


def batch(name: str = "a") -> list[TrainItem]:
    return [make_item(name, [0, 0, 1, 1, 1]), make_item(f"{name}2", [0, 1, 1])]


def published(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor_of(weight).clone() for name, weight in trainer.weights()}


def test_published_weights_are_those_of_merge_and_unload_by_the_names_of_the_student(base: Path) -> None:
    trainer = make_trainer(base)
    for name in ("a", "b"):
        trainer.step(batch(name))
    staged = StagedWeights()
    staged.fill(WeightVersion(0, 2), trainer.weights())
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert [name for name, _ in staged.named] == [name for name, _ in plain.named_parameters()]
    assert trainer.adapters is not None
    merged = dict(trainer.adapters.merge().named_parameters())
    changed = {name for name, value in plain.named_parameters() if not torch.equal(value, merged[name])}
    for name, value in staged.named:
        assert torch.equal(value, merged[name]), name
    assert len(changed) == 2 * 7, "every linear layer of both blocks learns, and nothing else does"


def test_only_adapters_have_gradients_and_a_place_in_the_optimizer(base: Path) -> None:
    trainer = make_trainer(base, LoraConfig(rank=2, targets=("q_proj", "down_proj")))
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora_" not in n}
    trainer.step(batch())
    trained = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 2 and all(".lora_A." in n or ".lora_B." in n for n in trained)
    assert {key.partition("/")[2] for key in trainer.state_dict().tensors} == trained
    assert all(torch.equal(p, frozen[n]) for n, p in trainer.model.named_parameters() if n in frozen)
    assert all(p.grad is None for n, p in trainer.model.named_parameters() if n in frozen)


@pytest.mark.parametrize("tied", [True, False])
def test_a_frozen_base_in_bfloat16_changes_no_bit_of_what_is_trained(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its products are in bfloat16 anyway. The embedding, and a head that is tied to it, stay as they are."""

    def trained() -> tuple[Trainer, list[float]]:
        model = tiny_student(tied=tied)
        torch.manual_seed(0)
        config = msgspec.structs.replace(CONFIG, dtype="bfloat16")
        trainer = Trainer(model, config, total_steps=9, adapters=Adapters(model, LORA, base="tiny"))
        return trainer, [trainer.step(batch(name)).loss for name in ("a", "b", "c")]

    def as_they_are(_: torch.nn.Module) -> int:
        return 0

    halved, losses = trained()
    monkeypatch.setattr("stillhouse.learner.step.train_step.halve_frozen", as_they_are)
    plain, plain_losses = trained()
    assert losses == plain_losses
    ours, theirs = (dict(one.model.named_parameters()) for one in (halved, plain))
    for name, parameter in ours.items():
        in_half = name.endswith("base_layer.weight") or (name == "lm_head.weight" and not tied)
        assert parameter.dtype == (torch.bfloat16 if in_half else torch.float32), name
        assert torch.equal(parameter, theirs[name].to(parameter.dtype)), name
    assert sum(p.dtype == torch.bfloat16 for p in ours.values()) == 2 * 7 + (not tied)


def test_merged_weights_exist_one_at_a_time(base: Path) -> None:
    """A second whole copy is what adapters are there to do without."""
    trainer = make_trainer(base)
    alive = most = 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def counted(weight: Merged) -> Merged:
        def delta() -> Tensor:
            nonlocal alive, most
            result = weight.delta()
            alive += 1
            most = max(most, alive)
            weakref.finalize(result, gone)
            return result

        return Merged(weight.base, delta)

    staged = StagedWeights()
    staged.fill(WeightVersion(0, 1), [(n, counted(w) if isinstance(w, Merged) else w) for n, w in trainer.weights()])
    assert most == 1 and alive == 0


@pytest.mark.parametrize("base", STUDENTS, indirect=True)
def test_a_checkpoint_holds_adapters_and_goes_on_exactly(
    base: Path, small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    trainer = make_trainer(base)
    trainer.step(batch())
    state = LearnerState(WeightVersion(0, 1), trainer.state_dict(), {}, None, capture_rng(), {})
    path = save_checkpoint(
        tmp_path / "checkpoints", trainer.model, small_tokenizer, state, keep=1, adapters=trainer.adapters
    )
    assert not list(path.glob("model*.safetensors"))
    resumed = make_trainer(base)
    torch.manual_seed(7)
    assert resumed.adapters is not None
    resumed.adapters.load(path)
    resumed.load_state_dict(load_checkpoint(path).optimizer)
    one, other = (t.step(batch("b")).as_dict() for t in (trainer, resumed))
    assert {**one, "step_s": 0} == {**other, "step_s": 0}
    expected = published(trainer)
    assert all(torch.equal(value, expected[name]) for name, value in published(resumed).items())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_what_a_run_in_bfloat16_leaves_is_what_peft_merges_in_float32(
    base: Path, small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    trainer = make_trainer(base, dtype="bfloat16")
    trainer.step(batch())
    assert trainer.adapters is not None
    export_run(trainer.adapters, small_tokenizer, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(base)
    by_peft = peft.PeftModel.from_pretrained(plain, str(tmp_path / "out" / "adapter")).merge_and_unload()
    merged = load_file(tmp_path / "out" / "merged" / "model.safetensors")
    assert all(torch.equal(value, merged[name]) for name, value in by_peft.named_parameters())


@pytest.mark.parametrize("base", STUDENTS, indirect=True)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21 on transformers 5
def test_export_gives_the_merged_student_and_adapters_that_peft_loads(
    base: Path, small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    trainer = make_trainer(base)
    trainer.step(batch())
    expected = published(trainer)
    state = LearnerState(WeightVersion(0, 1), trainer.state_dict(), {}, None, capture_rng(), {})
    path = save_checkpoint(
        tmp_path / "checkpoints", trainer.model, small_tokenizer, state, keep=1, adapters=trainer.adapters
    )
    out = tmp_path / "out"
    assert export([str(path), "--to", str(out)]) == 0
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(value, expected[name]) for name, value in merged.named_parameters())
    by_peft = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(out / "adapter"))
    for name, value in by_peft.merge_and_unload().named_parameters():
        assert torch.equal(value, expected[name]), name


def test_adapters_of_another_student_are_refused(base: Path, tmp_path: Path) -> None:
    trainer = make_trainer(base)
    assert trainer.adapters is not None
    trainer.adapters.save(tmp_path / "saved")
    other = make_trainer(base)
    assert other.adapters is not None
    other.adapters.base = msgspec.structs.replace(other.adapters.base, sha256="0" * 64)
    with pytest.raises(LoraError, match="expected the same weights"):
        other.adapters.load(tmp_path / "saved")
    smaller = make_trainer(base, LoraConfig(rank=2))
    assert smaller.adapters is not None
    with pytest.raises(LoraError, match="rank and targets"):
        smaller.adapters.load(tmp_path / "saved")


def test_one_changed_weight_is_another_student(base: Path) -> None:
    model = load_causal_lm(base, device="cpu", dtype="float32", attention="packed", train=True)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-6
    changed, same = Adapters(model, LORA, base="x"), make_trainer(base).adapters
    assert same is not None and changed.base.sha256 != same.base.sha256
    again = make_trainer(base).adapters
    assert again is not None and again.base.sha256 == same.base.sha256


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("k_prj", "no layer .* is called 'k_prj'"),
        ("lm_head", "output head"),
        ("embed_tokens", "the embedding"),
        ("norm", "a Qwen3RMSNorm"),
    ],
)
def test_targets_that_cannot_have_an_adapter_are_named(target: str, why: str) -> None:
    with pytest.raises(LoraError, match=why):
        Adapters(tiny_student(IMPLEMENTATION), LoraConfig(rank=2, targets=("q_proj", target)), base="x")
