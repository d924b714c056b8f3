"""The loop of optimizer steps, the same for a run and for a replay.

source   the buffer or a recording, and the file of offline rollouts      learner.sources
  -> one optimizer step
  -> observers, in their order: what else is to be done after each step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.inbox import Delivered
from stillhouse.learner.prompts.sample_book import Account
from stillhouse.learner.step.finite_step import StepOutcome, finite_step
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol.messages import WeightVersion
from stillhouse.recording.format import RecordedRollout
from stillhouse.tracing import events


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBatch:
    """What one step trains, and where it comes from."""

    items: list[TrainItem]
    offline: Sequence[TrainItem] = ()
    """Rollouts that the student did not write."""
    staleness: Mapping[int, int]
    """Distance -> tokens."""
    delivered: Delivered | None = None
    """As the buffer sent it; None from a recording."""
    mixed: Sequence[RecordedRollout] = ()
    """Those of `offline`, as their file has them."""
    tasks_done: Sequence[int] = ()
    """Tasks that this batch settled when it was recorded."""
    figures: Mapping[str, float] | None = None
    """More figures for the metrics, by tag."""


class BatchSource(Protocol):
    """Where batches come from: one for each version, in their order."""

    def next(self, version: WeightVersion) -> SourceBatch | None:
        """The batch that makes this version the next one; None: there are no more."""
        ...


@dataclass(slots=True, kw_only=True)
class StepDone:
    """A step that was made or skipped."""

    batch: SourceBatch
    outcome: StepOutcome
    version: WeightVersion
    """The one that it made."""
    began_ns: int
    account: Account | None = None
    """What it settled; filled in by the observer that books it."""

    @property
    def train(self) -> dict[str, float]:
        """Figures of the step for the metrics. A skipped one trained 0 tokens."""
        figures, masked = self.outcome.figures, len(self.outcome.masked)
        made = {"tokens": 0, "items": len(self.batch.items)} if figures is None else figures.as_dict()
        return {**made, "items_nonfinite": masked}


Observer: TypeAlias = Callable[[StepDone], None]
"""Called after each step. May raise, which ends the loop."""


class StepLoop:
    """Makes the steps from `version.step` to `steps`, or until the source has no more batches."""

    def __init__(
        self,
        trainer: Trainer,
        source: BatchSource,
        observers: Sequence[Observer],
        *,
        version: WeightVersion,
        steps: int,
    ) -> None:
        self._trainer = trainer
        self._source = source
        self._observers = observers
        self.version = version
        self._steps = steps
        self.ended = False
        """Set by an observer that wants no further step."""

    def run(self) -> None:
        while not self.ended and self.version.step < self._steps:
            if (batch := self._source.next(self.version)) is None:
                return
            began_ns = events.now_ns()
            outcome = finite_step(self._trainer, batch.items, batch.offline)
            self.version = WeightVersion(self.version.epoch, self.version.step + 1)
            done = StepDone(batch=batch, outcome=outcome, version=self.version, began_ns=began_ns)
            for observer in self._observers:
                observer(done)
