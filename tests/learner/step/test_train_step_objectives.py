"""Objectives through a whole optimizer step: against a plain model and Python loops, and packed in every way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.step.train_step import Trainer
from tests.learner.settings import learner_config
from tests.learner.step.gradients import step_gradients

Make = Callable[..., TrainItem]
Student = Callable[..., PreTrainedModel]
PLAIN: dict[str, Any] = {"max_grad_norm": 0.0, "warmup_steps": 0, "schedule": "constant"}
ROUTES = {"default": (), "math": ("math",), "style": ("style",)}


def _items(make_item: Make) -> list[TrainItem]:
    """Two groups of unequal lengths, an environment's tokens in the middle of one; behaviour near the student, so that
    clips bind for some tokens only; an ungraded one, an unjudged one, and one with nothing to train."""
    return [
        make_item("a", [0, 0, 1, 1, 1], task_id=7, reward=1.0),
        make_item("b", [0, 1, 1, 0, 0, 1, 0, 0], task_id=7, reward=0.0, teachers=("math", "style")),
        make_item("c", [0, 0, 0], task_id=7, reward=0.25),
        make_item("d", [0] * 10 + [1] * 20, task_id=9, reward=-0.5, teachers=("style",)),
        make_item("e", [0, 1, 1], task_id=9, reward=2.0, teachers=()),
        make_item("f", [0, 1, 1, 1, 1], task_id=9, reward=None),
    ]


def _near_the_student(items: Sequence[TrainItem], model: PreTrainedModel) -> list[TrainItem]:
    """The same items as if a slightly older student had sampled them."""
    random = np.random.default_rng(0)
    for train_item in items:
        ids_L = torch.from_numpy(train_item.tokens_L).long()
        with torch.no_grad():
            logprobs_LV = torch.log_softmax(model(input_ids=ids_L[None]).logits[0], dim=-1)
        own_L = logprobs_LV[:-1].gather(1, ids_L[1:, None])[:, 0].double().numpy()
        older_L = own_L + random.normal(0, 0.3, len(own_L))
        train_item.behaviour_L[1:] = np.minimum(older_L, -1e-3)
    return list(items)


OBJECTIVES: dict[str, dict[str, Any]] = {
    "k2": {"divergence": "k2"},
    "k3": {"divergence": "k3", "coef": 0.3, "teacher_coefs": {"math": 2.0}},
    "grpo with ppo's clip, mixed": {"advantage": "grpo", "importance": "ppo"},
    "gspo": {
        "advantage": "grpo",
        "coef": 0.0,
        "importance": ("gspo", {"low": 0.9, "high": 1.1}),
        "aggregation": "sequence_mean",
    },
    "dr. grpo": {
        "advantage": ("grpo", {"std": False}),
        "coef": 0.0,
        "importance": "ppo",
        "aggregation": "constant",
    },
    "reinforce++ and whole-rollout weights": {"advantage": "reinforce_pp", "importance": ("sequence", {"cap": 1.3})},
    "reinforce++ with a baseline": {"advantage": "reinforce_pp_baseline", "importance": "geometric"},
    "costs of all that follows": {"cost_discount": 0.9, "teacher_coefs": {"math": 2.0}},
    "their mean": {"cost_discount": 1.0, "cost_return": "mean", "importance": "ppo"},
    "rejected rollouts, weighted tokens": {
        "importance": ("truncated", {"cap": 1.1}),
        "rejection": ("geometric", {"low": 0.95, "high": 1.05}),
    },
}


def _config(**fields: Any) -> LearnerConfig:
    return learner_config(tasks=TaskConfig(routes=ROUTES), **PLAIN, **fields)


@pytest.mark.parametrize("fields", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("pack_tokens", [1, 9, 25])
def test_packing_and_order_do_not_change_the_gradient(
    tiny_student: Student, make_item: Make, fields: dict[str, Any], pack_tokens: int
) -> None:
    items = _near_the_student(_items(make_item), tiny_student("eager"))
    whole = step_gradients(Trainer(tiny_student(dtype=torch.float64), _config(**fields), total_steps=10), items)
    config = _config(**fields, pack_tokens=pack_tokens, logprob_chunk_tokens=3)
    parts = step_gradients(Trainer(tiny_student(dtype=torch.float64), config, total_steps=10), items[::-1])
    assert any(bool(gradient.any()) for gradient in whole.values())
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def _slow_gspo(model: PreTrainedModel, items: Sequence[TrainItem]) -> dict[str, Tensor]:
    """The published objective, rollout by rollout: mean over rollouts of min(s A, clip(s, 0.9, 1.1) A) with
    s = exp(mean over the rollout's tokens of (s_t - mu_t)) and A from the rewards of the group."""
    total = torch.zeros((), dtype=torch.float64)
    trained = [train_item for train_item in items if train_item.n_trained]
    for train_item in trained:
        rewards = [t.item.reward for t in items if t.item.task_id == train_item.item.task_id]
        judged = [reward for reward in rewards if reward is not None]
        if train_item.item.reward is None:
            continue
        advantage = (train_item.item.reward - statistics.fmean(judged)) / (statistics.stdev(judged) + 1e-6)
        ids_L = torch.from_numpy(train_item.tokens_L).long()
        logprobs_LV = torch.log_softmax(model(input_ids=ids_L[None]).logits[0], dim=-1)
        places = [t for t in range(len(ids_L)) if train_item.train_mask_L[t]]
        log_ratios = [logprobs_LV[t - 1, ids_L[t]] - float(train_item.behaviour_L[t]) for t in places]
        ratio = torch.exp(torch.stack(log_ratios).sum() / len(log_ratios))
        total = total + torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
    (-total / len(trained)).backward()  # pyright: ignore[reportUnknownMemberType]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gspo_is_the_published_objective(tiny_student: Student, make_item: Make) -> None:
    items = _near_the_student(_items(make_item), tiny_student("eager"))
    got = step_gradients(
        Trainer(tiny_student(dtype=torch.float64), _config(**OBJECTIVES["gspo"]), total_steps=10), items
    )
    expected = _slow_gspo(tiny_student("eager", torch.float64), items)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def _slow_dr_grpo(model: PreTrainedModel, items: Sequence[TrainItem], max_new_tokens: int) -> dict[str, Tensor]:
    """The published objective: PPO's surrogate summed over tokens, divided by rollouts and by the length allowed."""
    total, trained = torch.zeros((), dtype=torch.float64), [t for t in items if t.n_trained]
    for train_item in trained:
        judged = [t.item.reward for t in items if t.item.task_id == train_item.item.task_id]
        reward = train_item.item.reward
        if reward is None:
            continue
        advantage = reward - statistics.fmean([one for one in judged if one is not None])
        ids_L = torch.from_numpy(train_item.tokens_L).long()
        logprobs_LV = torch.log_softmax(model(input_ids=ids_L[None]).logits[0], dim=-1)
        for t in np.flatnonzero(train_item.train_mask_L).tolist():
            ratio = torch.exp(logprobs_LV[t - 1, ids_L[t]] - float(train_item.behaviour_L[t]))
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total + surrogate / max_new_tokens / len(trained)
    (-total).backward()  # pyright: ignore[reportUnknownMemberType]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_dr_grpo_is_the_published_objective(tiny_student: Student, make_item: Make) -> None:
    items = _near_the_student(_items(make_item), tiny_student("eager"))
    config = _config(**OBJECTIVES["dr. grpo"])
    got = step_gradients(Trainer(tiny_student(dtype=torch.float64), config, total_steps=10), items)
    expected = _slow_dr_grpo(tiny_student("eager", torch.float64), items, config.tasks.max_new_tokens)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-4
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-8, rtol=1e-5, msg=name)


def _log_ratios(model: PreTrainedModel, train_item: TrainItem) -> list[float]:
    """s - mu of each trained token, by a plain forward pass over the item alone."""
    ids_L = torch.from_numpy(train_item.tokens_L).long()
    with torch.no_grad():
        logprobs_LV = torch.log_softmax(model(input_ids=ids_L[None]).logits[0], dim=-1)
    places = np.flatnonzero(train_item.train_mask_L).tolist()
    return [float(logprobs_LV[t - 1, ids_L[t]]) - float(train_item.behaviour_L[t]) for t in places]


@pytest.mark.parametrize(
    ("level", "low", "high"), [("token", 0.8, 1.3), ("sequence", 0.5, 1.6), ("geometric", 0.9, 1.1)]
)
@pytest.mark.parametrize("pack_tokens", [9, 4096])
def test_a_step_counts_the_tokens_that_it_rejects(
    tiny_student: Student, make_item: Make, level: str, low: float, high: float, pack_tokens: int
) -> None:
    model = tiny_student("eager", torch.float64)
    items = _near_the_student(_items(make_item), model)
    rejected = capped = 0
    for train_item in items:
        logs = _log_ratios(model, train_item)
        for log in logs:
            judged = {"token": log, "sequence": sum(logs), "geometric": sum(logs) / len(logs)}[level]
            out = not low <= math.exp(judged) <= high
            rejected += out
            capped += not out and math.exp(log) > 1.05
    n = sum(train_item.n_trained for train_item in items)
    assert 0 < rejected < n and capped > 0
    config = _config(
        rejection=(level, {"low": low, "high": high}), importance=("truncated", {"cap": 1.05}), pack_tokens=pack_tokens
    )
    figures = Trainer(tiny_student(dtype=torch.float64), config, total_steps=10).step(items).as_dict()
    assert figures["rejected_fraction"] == pytest.approx(rejected / n, abs=1e-12)
    assert figures["truncated_fraction"] == pytest.approx(capped / n, abs=1e-12)


@pytest.mark.parametrize("pack_tokens", [9, 4096])
def test_several_updates_do_not_depend_on_the_order_or_the_packs_of_rollouts(
    tiny_student: Student, make_item: Make, pack_tokens: int
) -> None:
    """Each update clips a token against what the first one found for that very token."""
    items = _near_the_student(_items(make_item), tiny_student("eager"))
    narrow = ("decoupled", {"low": 0.98, "high": 1.02, "cap": 1.5})
    config = _config(updates_per_batch=3, importance=narrow, advantage="grpo", coef=0.3, lr=3e-3, eps=1e-4)
    one, other = (
        Trainer(tiny_student(dtype=torch.float64), msgspec.structs.replace(config, pack_tokens=n), total_steps=10)
        for n in (40, pack_tokens)
    )
    first = one.step(sorted(items, key=lambda item: item.item.end)).as_dict()
    again = other.step(sorted(items, key=lambda item: -item.item.end)).as_dict()
    assert first["loss"] == pytest.approx(again["loss"], abs=1e-12)
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)


def test_rollouts_without_a_reward_are_counted(tiny_student: Student, make_item: Make) -> None:
    config = _config(advantage="grpo")
    metrics = Trainer(tiny_student(), config, total_steps=10).step(_items(make_item))
    assert metrics.items_unrewarded == 1 and metrics.items_idle == 1
