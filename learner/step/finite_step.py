"""An optimizer step that leaves out rollouts it cannot read, or that give non-finite numbers.

One rollout with an absurd number (from a teacher, an engine, or its own length) or an unreadable payload must not end a
run, nor crash one learner after another. It is left out and named, and the buffer books it as masked. A step with
nothing left is skipped and counted, as loss scalers do: the version rises, the weights stay.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from stillhouse.learner.batch import TrainItem, UnreadableScores
from stillhouse.learner.reports.step_metrics import StepMetrics
from stillhouse.learner.step.train_step import NonFiniteError, Trainer

log = logging.getLogger(__name__)


class StepOutcome(NamedTuple):
    """Result of a step."""

    figures: StepMetrics | None
    """None if the step was skipped."""
    masked: tuple[str, ...]
    """Ids of the rollouts left out, in the order of the batch."""


def finite_step(trainer: Trainer, items: Sequence[TrainItem], offline: Sequence[TrainItem] = ()) -> StepOutcome:
    """Make or skip one step. An item that is left out stays in the batch without trained tokens, so that its group
    keeps its size and mean reward; an item of `offline` is removed. Each attempt leaves out at least one more item, or
    all of them if only their sum is not finite."""
    masked: set[str] = set()
    while True:
        left = [
            dataclasses.replace(one, train_mask_L=np.zeros_like(one.train_mask_L))
            if one.item.rollout_id in masked
            else one
            for one in items
        ]
        if masked and not any(train_item.n_trained for train_item in left):
            trainer.skip()
            return StepOutcome(None, _in_order(items, masked))
        try:
            theirs = [train_item for train_item in offline if train_item.item.rollout_id not in masked]
            return StepOutcome(trainer.step(left, theirs), _in_order(items, masked))
        except (NonFiniteError, UnreadableScores) as error:
            log.error("left out of step %d: %s", trainer.steps_done + 1, error)
            culprits = set(error.rollout_ids) - masked
            masked |= culprits or {train_item.item.rollout_id for train_item in (*items, *offline)}


def _in_order(items: Sequence[TrainItem], masked: Collection[str]) -> tuple[str, ...]:
    return tuple(train_item.item.rollout_id for train_item in items if train_item.item.rollout_id in masked)
