"""One optimizer step: its gradient against a slow reference, its invariances, and how it fails."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    get_cosine_with_min_lr_schedule_with_warmup,
)

from stillhouse.learner.batch import BatchError, EmptyBatchError, TrainItem
from stillhouse.learner.config import LearnerConfig, LoraConfig
from stillhouse.learner.step.lora import Adapters
from stillhouse.learner.step.make_trainer import FrozenTrainer
from stillhouse.learner.step.train_step import NonFiniteError, Trainer
from stillhouse.models.description import resolve_dtype
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights.staged_weights import StagedWeights
from tests.learner.conftest import VOCAB, make_item, tiny_student
from tests.learner.settings import learner_config
from tests.learner.step.gradients import PLAIN, assert_close, slow_gradients, step_gradients
from tests.learner.step.test_mixture_of_experts import student as mixture


def _items(seed: int | None = None) -> list[TrainItem]:
    return [
        make_item("a", [0, 0, 1, 1, 1], seed=seed),
        make_item("b", [0, 1, 1, 0, 0, 1, 0, 0], teachers=("math", "style"), seed=seed),
        make_item("c", [0, 0, 0], seed=seed),
        make_item("d", [0] * 10 + [1] * 20, teachers=("style",), seed=seed),
        make_item("e", [0, 1, 1], teachers=(), seed=seed),
    ]


def test_gradient_equals_the_slow_reference() -> None:
    config = LearnerConfig(**PLAIN, pack_tokens=16, logprob_chunk_tokens=5)
    items = _items()
    trainer = Trainer(tiny_student(dtype=torch.float64), config, total_steps=10)
    got = step_gradients(trainer, items)
    expected = slow_gradients(tiny_student("eager", torch.float64), items, config)
    assert_close(got, expected)


def test_steps_raise_the_logprob_of_tokens_that_the_teacher_likes() -> None:
    """Ten steps on the same tokens, which the teacher finds likely and the student does not."""
    trainer = Trainer(
        tiny_student(), learner_config(warmup_steps=0, lr=1e-2, importance=("truncated", {"cap": 50.0})), total_steps=10
    )
    items = [make_item(str(i), [0, 0] + [1] * 8, seed=i) for i in range(4)]
    for train_item in items:
        train_item.teacher_ML[:] = -0.1
    metrics = [trainer.step(items) for _ in range(10)]
    assert trainer.steps_done == 10
    assert metrics[-1].logprob > metrics[0].logprob + 0.5


def test_metrics_equal_a_loop_over_tokens() -> None:
    items = _items()
    config = learner_config(**PLAIN, importance=("truncated", {"cap": 1.2}), pack_tokens=16)
    metrics = Trainer(tiny_student(), config, total_steps=10).step(items)
    plain = tiny_student("eager")
    s, mu, kl, entropy = [], [], [], []
    for train_item in items:
        ids_L = torch.from_numpy(train_item.tokens_L).long()
        with torch.no_grad():
            logprobs_LV = torch.log_softmax(plain(input_ids=ids_L[None]).logits[0].double(), dim=-1)
        for t in np.flatnonzero(train_item.train_mask_L):
            s.append(float(logprobs_LV[t - 1, ids_L[t]]))
            mu.append(float(train_item.behaviour_L[t]))
            entropy.append(float(-(logprobs_LV[t - 1].exp() * logprobs_LV[t - 1]).sum()))
            if len(train_item.item.teachers):
                kl.append(sum(s[-1] - float(q) for q in train_item.teacher_ML[:, t]))
    ratio = np.exp(np.array(s) - np.array(mu))
    assert (metrics.tokens, metrics.tokens_unscored, metrics.items, metrics.items_idle) == (28, 2, 5, 1)
    assert metrics.input_tokens == 4 + 5 + 29 + 2 and metrics.microbatches == 2
    expected = {
        "reverse_kl": np.mean(kl),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "truncated_fraction": (ratio > 1.2).mean(),
        "weight_mean": np.minimum(ratio, 1.2).mean(),
        "ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "entropy": np.mean(entropy),
        "logprob": np.mean(s),
    }
    assert {name: metrics.as_dict()[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def _students() -> dict[str, PreTrainedModel]:
    gpt2 = GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    return {
        "tied": tiny_student("eager"),
        "adapters": tiny_student("eager", tied=False),
        "experts": mixture("eager"),
        "dropout": GPT2LMHeadModel(gpt2),
    }


def _by_peft(plain: PreTrainedModel) -> None:
    """Adapters in all linear layers, which alone are trained."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(plain, peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear"))
    adapted.requires_grad_(requires_grad=False)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _plain_loss(plain: PreTrainedModel, items: list[TrainItem]) -> Tensor:
    """k1 with the truncated importance weight, token by token, over the trained ones of all items."""
    loss = torch.zeros(())
    for one in items:
        ids_L = torch.from_numpy(one.tokens_L).long()
        logprobs_LV = torch.log_softmax(plain(input_ids=ids_L[None]).logits[0], dim=-1)
        for t in np.flatnonzero(one.train_mask_L):
            s, mu = logprobs_LV[t - 1, ids_L[t]], float(one.behaviour_L[t])
            cost = sum(s.item() - float(q) for q in one.teacher_ML[:, t])
            loss = loss + min(math.exp(s.item() - mu), 2.0) * cost * s
    return loss / sum(int(one.train_mask_L.sum()) for one in items)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # by peft
@pytest.mark.parametrize("kind", ["tied", "adapters", "experts", "dropout"])
def test_clipped_steps_are_those_of_a_plain_loop(kind: str, tmp_path: Path) -> None:
    """By transformers, peft and torch alone. After two steps of six another trainer goes on, to a ninth."""
    _students()[kind].save_pretrained(tmp_path)
    lora = LoraConfig(rank=2 * (kind == "adapters"), alpha=4.0)
    clipped: dict[str, Any] = {
        "lr": 1e-2,
        "warmup_steps": 2,
        "max_grad_norm": 0.05,
        "pack_tokens": 16,
        "lora": lora,
        "eps": 1e-4,
    }
    config = learner_config(**clipped, importance=("truncated", {"cap": 2.0}))

    def trainer(total_steps: int) -> Trainer:
        model = load_causal_lm(tmp_path, device="cpu", dtype="float32", attention="packed", train=True)
        torch.manual_seed(0)
        return Trainer(
            model,
            config,
            total_steps=total_steps,
            adapters=Adapters(model, lora, base="tiny") if lora.rank else None,
        )

    first, second = trainer(6), trainer(9)
    norms = [first.step(_items(seed)).grad_norm for seed in (0, 1)]
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    norms += [second.step(_items(seed)).grad_norm for seed in (2, 3)]

    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    if lora.rank:
        _by_peft(plain)
    parameters = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, eps=1e-4, weight_decay=0.0)
    rates = [
        get_cosine_with_min_lr_schedule_with_warmup(optimizer, 2, n, min_lr_rate=0.1).lr_lambdas[0] for n in (6, 9)
    ]
    for step in range(4):
        optimizer.zero_grad()
        _plain_loss(plain, _items(step)).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), 0.05))
        assert norms[step] == pytest.approx(norm, rel=1e-3) and norm > 0.05
        optimizer.param_groups[0]["lr"] = 1e-2 * rates[step // 2](step + 1)
        optimizer.step()
    trained = {name: p for name, p in second.model.named_parameters() if p.requires_grad}
    assert_close(trained, parameters, atol=1e-5)
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in parameters.items()}
    saved = {name: second.state_dict().tensors[f"exp_avg/{name}"] for name in moments}
    assert_close(saved, moments, atol=1e-5, rtol=1e-3)


def test_bfloat16_products_keep_float32_parameters_and_stay_near_float32() -> None:
    items = _items()
    full = Trainer(tiny_student(), LearnerConfig(**PLAIN), total_steps=10).step(items)
    trainer = Trainer(tiny_student(), LearnerConfig(**PLAIN, dtype="bfloat16"), total_steps=10)
    half = trainer.step(items)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert half.logprob == pytest.approx(full.logprob, rel=0.02) and half.logprob != full.logprob
    assert half.grad_norm == pytest.approx(full.grad_norm, rel=0.1)


# ------------------------------------------------------------------------------------------------- failures


def _snapshot(trainer: Trainer) -> list[Tensor]:
    state = trainer.state_dict()
    return [p.detach().clone() for p in trainer.model.parameters()] + list(state.tensors.values())


def _assert_untouched(trainer: Trainer, before: list[Tensor], steps_done: int) -> None:
    after = _snapshot(trainer)
    assert trainer.steps_done == steps_done and len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in trainer.model.parameters())


def test_student_logprob_that_is_not_finite_names_its_rollout_and_changes_nothing() -> None:
    trainer = Trainer(tiny_student(), LearnerConfig(pack_tokens=8), total_steps=10)
    items = [make_item("good", [0, 1, 1]), make_item("bad", [0, 1, 1]), make_item("fine", [0, 1])]
    for train_item in items:
        train_item.tokens_L[:] = [1, 2, 3][: train_item.item.end]
    trainer.step(items)
    items[1].tokens_L[1] = 20
    embedding: Any = trainer.model.get_input_embeddings()
    head: Any = trainer.model.get_output_embeddings()
    with torch.no_grad():
        head.weight = torch.nn.Parameter(torch.randn((23, 16)))  # not tied to the NaN
        embedding.weight[20] = float("nan")
    trainer = Trainer(trainer.model, trainer.config, total_steps=10)
    before = _snapshot(trainer)
    with pytest.raises(
        NonFiniteError, match=r"step 1: the student log-prob of .* tokens is not finite, .*\['bad'\]"
    ) as caught:
        trainer.step(items)
    assert caught.value.rollout_ids == ("bad",)
    for a, b in zip(before, _snapshot(trainer), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=0, atol=0)
    assert trainer.steps_done == 0 and all(p.grad is None for p in trainer.model.parameters())


def test_gradient_that_overflows_names_its_rollout_and_changes_nothing() -> None:
    trainer = Trainer(tiny_student(), LearnerConfig(), total_steps=10)
    items = [make_item("good", [0, 1, 1]), make_item("bad", [0, 1, 1])]
    trainer.step(items)
    items[1].teacher_ML[:] = -1e38
    before = _snapshot(trainer)
    with pytest.raises(NonFiniteError, match=r"step 2: .* rollouts \['bad'\]") as caught:
        trainer.step(items)
    assert caught.value.rollout_ids == ("bad",)
    _assert_untouched(trainer, before, 1)
    items[1].teacher_ML[:] = -1.0
    assert trainer.step(items).grad_norm > 0 and trainer.steps_done == 2


def test_batch_without_a_trainable_token_makes_no_step() -> None:
    trainer = Trainer(tiny_student(), LearnerConfig(), total_steps=10)
    before = _snapshot(trainer)
    with pytest.raises(EmptyBatchError):
        trainer.step([make_item("a", [0, 0, 0])])
    _assert_untouched(trainer, before, 0)


def test_token_id_outside_the_vocabulary_is_refused() -> None:
    trainer = Trainer(tiny_student(), LearnerConfig(), total_steps=10)
    items = [make_item("a", [0, 1]), make_item("b", [0, 1, 1])]
    items[1].tokens_L[2] = 23
    with pytest.raises(BatchError, match=r"vocabulary of 23 in the rollouts \['b'\]"):
        trainer.step(items)


@pytest.mark.parametrize("half", [True, False])
def test_parameters_that_cannot_be_trained_are_refused(half: bool) -> None:
    model = tiny_student(dtype=torch.bfloat16 if half else torch.float32)
    if not half:
        model.requires_grad_(False)
    with pytest.raises(ValueError, match="load the model with train=True"):
        Trainer(model, LearnerConfig(), total_steps=10)


def test_a_frozen_trainer_changes_nothing_and_reports_what_the_engine_did() -> None:
    items = _items()
    trainer = FrozenTrainer(tiny_student(), LearnerConfig(frozen=True), total_steps=10)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    metrics = trainer.step(items)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert (trainer.steps_done, metrics.tokens, metrics.tokens_unscored, metrics.items_idle) == (1, 28, 2, 1)
    gaps = [
        float(item.behaviour_L[t]) - float(q)
        for item in items
        for t in np.flatnonzero(item.train_mask_L)
        for q in item.teacher_ML[:, t]
    ]
    assert metrics.reverse_kl == pytest.approx(sum(gaps) / 26, rel=1e-5)
    assert metrics.ess == metrics.ratio_mean == 1.0
    with pytest.raises(EmptyBatchError):
        trainer.step([make_item("c", [0, 0])])


# ----------------------------------------------------------------------------- masters of bfloat16 products


def _masters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def test_auto_means_bfloat16_on_a_gpu_and_float32_elsewhere() -> None:
    assert LearnerConfig().dtype == "auto"
    assert [resolve_dtype("auto", device) for device in ("cuda", "cuda:3", "cpu")] == ["bfloat16"] * 2 + ["float32"]
    assert resolve_dtype("float32", "cuda") == "float32" and resolve_dtype("bfloat16", "cpu") == "bfloat16"


def test_updates_too_small_for_bfloat16_add_up_and_reach_the_actors() -> None:
    config, items = LearnerConfig(**PLAIN, dtype="bfloat16", lr=3e-5), _items()
    trainer, rounded = (Trainer(tiny_student(), config, total_steps=99) for _ in range(2))
    with torch.no_grad():
        for parameter in rounded.model.parameters():
            parameter.copy_(parameter.bfloat16())
    start = {name: tensor.bfloat16() for name, tensor in _masters(trainer).items()}
    for _ in range(30):
        trainer.step(items)
        rounded.step(items)
        with torch.no_grad():  # as if there were no masters
            for parameter in rounded.model.parameters():
                parameter.copy_(parameter.bfloat16())
    staged = StagedWeights(dtype="bfloat16")
    staged.fill(WeightVersion(0, 30), trainer.weights())
    moved = sum(int((tensor != start[name]).sum()) for name, tensor in staged.named)
    lost = sum(int((tensor.bfloat16() != start[name]).sum()) for name, tensor in _masters(rounded).items())
    assert moved > 3 * lost  # of 3,000 numbers; those near 0 move in bfloat16 too
    masters = _masters(trainer)
    for name, tensor in staged.named:
        assert torch.equal(tensor, masters[name].bfloat16()) and not torch.equal(tensor.float(), masters[name])
