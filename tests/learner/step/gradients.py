"""The gradient of one step, for tests that compare it with a slow one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from learner.batch import TrainItem
from learner.step.train_step import Trainer


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
