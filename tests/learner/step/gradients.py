"""The gradient of one step, and a slow one to compare it with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.options import Capped
from stillhouse.learner.step.train_step import Trainer


def step_gradients(
    trainer: Trainer, items: Sequence[TrainItem], offline: Sequence[TrainItem] = ()
) -> dict[str, Tensor]:
    """What a step hands to AdamW, by parameter name."""
    seen: dict[str, Tensor] = {}

    def look(*_: Any) -> None:
        seen.update({name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None})

    hook = trainer._optimizer.register_step_pre_hook(look)  # pyright: ignore[reportPrivateUsage]
    trainer.step(items, offline)
    hook.remove()
    return seen


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
    loss.backward()  # pyright: ignore[reportUnknownMemberType]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
