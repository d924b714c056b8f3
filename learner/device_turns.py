"""The learner's turns on a device that it shares (`launch.share = turns`, protocol.turns).

it has a batch    back: waits for the turn, and brings weights and moments to the device
                  trains, and copies the weights that are sent
it needs none     aside: weights and moments leave the device, the actors take the copies, the turn is over
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from stillhouse.learner.feed import LearnerStalled
from stillhouse.learner.reports.wait_clock import WaitClock
from stillhouse.learner.step.train_step import Trainer
from stillhouse.learner.steps import BatchSource, SourceBatch
from stillhouse.protocol.messages import WeightVersion
from stillhouse.protocol.turns import Turn, TurnTimeout
from stillhouse.weights.parked import Parked
from stillhouse.weights.publisher import Publisher

log = logging.getLogger(__name__)

HANDOVER_S: Final = 5.0
"""How long the learner keeps the turn for weights that are on their way. It need not, because the publisher takes it to
send them, but then others may come first."""


class LearnerTurns:
    """For the training thread. Begins in the learner's first turn."""

    def __init__(self, turn: Turn, trainer: Trainer, publisher: Publisher) -> None:
        self._turn, self._publisher = turn, publisher
        self._parked = (Parked(trainer.model.parameters), Parked(trainer.moments))
        self._taken = True
        self._before = dict(turn.stats)

    def aside(self, meanwhile: Callable[[float], object]) -> None:
        """Leave the device to others. `meanwhile(seconds)` passes that time. Idempotent."""
        if not self._taken:
            return
        for parked in self._parked:
            parked.leave()
        deadline_s = time.monotonic() + HANDOVER_S
        while self._publisher.busy and time.monotonic() < deadline_s:
            meanwhile(0.01)
        self._taken = False
        self._turn.give_back()

    def back(self, clock: WaitClock, meanwhile: Callable[[float], object], timeout_s: float) -> None:
        """Wait for the turn; the time counts for what its holder does. Idempotent. Raises LearnerStalled."""
        if self._taken:
            return

        def wait(seconds: float) -> None:
            clock.blame("scoring" if self._turn.holder.startswith("teacher") else "data")
            meanwhile(seconds)

        with clock.waiting("data"):
            try:
                self._turn.take(timeout_s, wait)
            except TurnTimeout as error:
                raise LearnerStalled(str(error)) from error
        self._taken = True
        for parked in self._parked:
            parked.come_back()

    def figures(self) -> dict[str, float]:
        """What was added since the last call, by the tags of the metrics."""
        before, self._before = self._before, dict(self._turn.stats)
        return {f"turns/learner_{name.removesuffix('_total')}": n - before[name] for name, n in self._before.items()}


class InTurns:
    """A BatchSource whose batches are trained in the learner's turns, and waited for in those of others."""

    def __init__(self, source: BatchSource, aside: Callable[[], None], back: Callable[[], None]) -> None:
        self._source, self._aside, self._back = source, aside, back

    def next(self, version: WeightVersion) -> SourceBatch | None:
        self._aside()
        batch = self._source.next(version)
        self._back()
        return batch
