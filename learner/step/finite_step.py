"""A step on what of a batch can be read and gives finite numbers.

One rollout with an absurd number (a teacher's, an engine's, its own length) or a payload that cannot be read must not
end a run, and must not come again and again to one learner after another: it is left out, named, and the buffer books
it as masked. When nothing is left the step is skipped and counts, as loss scalers do it: the version rises, the weights
stay.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from learner.batch import TrainItem, UnreadableScores
from learner.reports.step_metrics import StepMetrics
from learner.step.train_step import NonFiniteError, Trainer

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What became of a batch."""

    figures: StepMetrics | None
    """None: skipped, nothing was left to train."""
    masked: tuple[str, ...]
    """Rollouts that were left out, in the order of the batch."""


def finite_step(trainer: Trainer, items: Sequence[TrainItem], offline: Sequence[TrainItem] = ()) -> Outcome:
    """One tick of the run's clock. An item that is left out stays as context of the batch, so that its group keeps its
    size and its mean reward; one of `offline` (`Trainer.step`) just goes. Each try leaves out at least one more; where
    only their sum is not finite, all."""
    masked: set[str] = set()
    while True:
        left = [_as_context(train_item) if train_item.item.rollout_id in masked else train_item for train_item in items]
        if masked and not any(train_item.n_trained for train_item in left):
            trainer.skip()
            return Outcome(None, _in_order(items, masked))
        try:
            theirs = [train_item for train_item in offline if train_item.item.rollout_id not in masked]
            return Outcome(trainer.step(left, theirs), _in_order(items, masked))
        except (NonFiniteError, UnreadableScores) as error:
            log.error("left out of step %d: %s", trainer.steps_done + 1, error)
            culprits = set(error.rollout_ids) - masked
            masked |= culprits or {train_item.item.rollout_id for train_item in (*items, *offline)}


def _as_context(train_item: TrainItem) -> TrainItem:
    return dataclasses.replace(train_item, train_mask_L=np.zeros_like(train_item.train_mask_L))


def _in_order(items: Sequence[TrainItem], masked: Collection[str]) -> tuple[str, ...]:
    return tuple(train_item.item.rollout_id for train_item in items if train_item.item.rollout_id in masked)
