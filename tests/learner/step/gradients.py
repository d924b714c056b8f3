"""The gradient of one step, and a slow one to compare it with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.options import Capped
from stillhouse.learner.reports.step_metrics import StepMetrics
from stillhouse.learner.step.train_step import Trainer

PLAIN: Final[dict[str, Any]] = {"max_grad_norm": 0.0, "warmup_steps": 0, "schedule": "constant"}


def stepped(
    trainer: Trainer, items: Sequence[TrainItem], offline: Sequence[TrainItem] = ()
) -> tuple[dict[str, Tensor], StepMetrics]:
    """What a step hands to AdamW, by parameter name; and what it tells."""
    seen: dict[str, Tensor] = {}

    def look(*_: Any) -> None:
        seen.update({name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None})

    hook = trainer._optimizer.register_step_pre_hook(look)  # pyright: ignore[reportPrivateUsage]
    metrics = trainer.step(items, offline)
    hook.remove()
    return seen, metrics


def step_gradients(
    trainer: Trainer, items: Sequence[TrainItem], offline: Sequence[TrainItem] = ()
) -> dict[str, Tensor]:
    return stepped(trainer, items, offline)[0]


def of_loss(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    """Its gradients, by parameter name."""
    loss.backward()  # pyright: ignore[reportUnknownMemberType]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, atol: float = 1e-6, rtol: float = 1e-5
) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=atol, rtol=rtol, msg=name)


def slow_gradients(model: PreTrainedModel, items: Sequence[TrainItem], config: LearnerConfig) -> dict[str, Tensor]:
    """Plain forward of each item alone, and the objective token by token in Python."""
    n_global = sum(int(train_item.train_mask_L.sum()) for train_item in items)
    loss = torch.zeros((), dtype=torch.float64)
    for train_item in items:
        ids_L = torch.from_numpy(train_item.tokens_L).long()
        logprobs_LV = torch.log_softmax(model(input_ids=ids_L[None]).logits[0], dim=-1)
        for t in range(len(ids_L)):
            if not train_item.train_mask_L[t]:
                continue
            s = logprobs_LV[t - 1, ids_L[t]]
            advantage = -sum(config.objective.coef * (s.item() - float(q)) for q in train_item.teacher_ML[:, t])
            weight = min(math.exp(s.item() - float(train_item.behaviour_L[t])), Capped().cap)
            loss = loss - weight * advantage * s / n_global
    return of_loss(model, loss)
