"""Objectives through a whole optimizer step: against a plain model and Python loops, and packed in every way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
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
from tests.learner.conftest import make_item, tiny_student
from tests.learner.settings import learner_config
from tests.learner.step.gradients import PLAIN, assert_close, of_loss, step_gradients

ROUTES = {"default": (), "math": ("math",), "style": ("style",)}


def _items() -> list[TrainItem]:
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
    "dr. grpo": {"advantage": ("grpo", {"std": False}), "coef": 0.0, "importance": "ppo", "aggregation": "constant"},
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
def test_packing_and_order_do_not_change_the_gradient(fields: dict[str, Any]) -> None:
    items = _near_the_student(_items(), tiny_student("eager"))
    whole = step_gradients(Trainer(tiny_student(dtype=torch.float64), _config(**fields), total_steps=10), items)
    assert any(bool(gradient.any()) for gradient in whole.values())
    for pack_tokens in (1, 16):
        config = _config(**fields, pack_tokens=pack_tokens, logprob_chunk_tokens=3)
        parts = step_gradients(Trainer(tiny_student(dtype=torch.float64), config, total_steps=10), items[::-1])
        assert_close(parts, whole)


def _published(model: PreTrainedModel, items: Sequence[TrainItem], name: str, max_new_tokens: int) -> dict[str, Tensor]:
    """GSPO: mean over rollouts of min(s A, clip(s, 0.9, 1.1) A) with s = exp(mean over the rollout's tokens of
    (s_t - mu_t)). Dr. GRPO: PPO's surrogate summed over tokens, divided by rollouts and by the length allowed. A: from
    the rewards of the group, with its standard deviation in GSPO."""
    total, trained = torch.zeros((), dtype=torch.float64), [one for one in items if one.n_trained]
    for train_item in trained:
        rewards = [one.item.reward for one in items if one.item.task_id == train_item.item.task_id]
        judged = [reward for reward in rewards if reward is not None]
        if train_item.item.reward is None:
            continue
        advantage = train_item.item.reward - statistics.fmean(judged)
        ids_L = torch.from_numpy(train_item.tokens_L).long()
        logprobs_LV = torch.log_softmax(model(input_ids=ids_L[None]).logits[0], dim=-1)
        places = np.flatnonzero(train_item.train_mask_L).tolist()
        logs = torch.stack([logprobs_LV[t - 1, ids_L[t]] - float(train_item.behaviour_L[t]) for t in places])
        if name == "gspo":
            advantage /= statistics.stdev(judged) + 1e-6
            ratio, low, high, divisor = torch.exp(logs.mean()), 0.9, 1.1, 1
        else:
            ratio, low, high, divisor = logs.exp(), 0.8, 1.2, max_new_tokens
        total = total + torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).sum() / divisor
    return of_loss(model, -total / len(trained))


@pytest.mark.parametrize("name", ["gspo", "dr. grpo"])
def test_it_is_the_published_objective(name: str) -> None:
    items, config = _near_the_student(_items(), tiny_student("eager")), _config(**OBJECTIVES[name])
    got = step_gradients(Trainer(tiny_student(dtype=torch.float64), config, total_steps=10), items)
    expected = _published(tiny_student("eager", torch.float64), items, name, config.tasks.max_new_tokens)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-4
    assert_close(got, expected, atol=1e-6 if name == "gspo" else 1e-8)


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
def test_a_step_counts_the_tokens_that_it_rejects(level: str, low: float, high: float) -> None:
    model = tiny_student("eager", torch.float64)
    items = _near_the_student(_items(), model)
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
        rejection=(level, {"low": low, "high": high}), importance=("truncated", {"cap": 1.05}), pack_tokens=9
    )
    figures = Trainer(tiny_student(dtype=torch.float64), config, total_steps=10).step(items).as_dict()
    assert figures["rejected_fraction"] == pytest.approx(rejected / n, abs=1e-12)
    assert figures["truncated_fraction"] == pytest.approx(capped / n, abs=1e-12)


def test_several_updates_do_not_depend_on_the_order_or_the_packs_of_rollouts() -> None:
    """Each update clips a token against what the first one found for that very token."""
    items = _near_the_student(_items(), tiny_student("eager"))
    narrow = ("decoupled", {"low": 0.98, "high": 1.02, "cap": 1.5})
    config = _config(updates_per_batch=3, importance=narrow, advantage="grpo", coef=0.3, lr=3e-3, eps=1e-4)
    one, other = (
        Trainer(tiny_student(dtype=torch.float64), msgspec.structs.replace(config, pack_tokens=n), total_steps=10)
        for n in (40, 9)
    )
    first = one.step(sorted(items, key=lambda item: item.item.end)).as_dict()
    again = other.step(sorted(items, key=lambda item: -item.item.end)).as_dict()
    assert first["loss"] == pytest.approx(again["loss"], abs=1e-12)
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)


def test_rollouts_without_a_reward_are_counted() -> None:
    config = _config(advantage="grpo")
    metrics = Trainer(tiny_student(), config, total_steps=10).step(_items())
    assert metrics.items_unrewarded == 1 and metrics.items_idle == 1
