"""Trains from a file of recorded batches: the same step, metrics and checkpoints as a run, without anybody to wait for.

    recording --order--> batches --Trainer.step--> metrics, and now and then an evaluation or a checkpoint

In recorded order, from the same student and under the same settings, the updates are those of the run that was
recorded, bit for bit where the machine is the same. One thread; nothing here waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from learner.batch import TrainItem, train_items
from learner.config import LearnerConfig
from learner.evaluation.evaluation import EvaluationResult
from learner.offline import offline_item
from learner.reports.metrics import MetricsWriter
from learner.reports.step_metrics import StepMetrics
from learner.reports.wait_clock import WaitClock
from learner.step.finite_step import finite_step
from learner.step.train_step import Trainer
from recording.reader import Kept, Recording
from replay.plan import Turn

log = logging.getLogger(__name__)


class ReplayBatch(NamedTuple):
    """What one step trains."""

    own: list[TrainItem]
    offline: list[TrainItem]
    """Mixed in when the batch was recorded."""


def read_batch(recording: Recording, batch: Kept) -> ReplayBatch:
    """Raises RecordError, and BatchError for what a live learner would refuse too."""
    rollouts = recording.rollouts(batch)
    own = [rollout for rollout in rollouts if not rollout.offline]
    return ReplayBatch(
        own=train_items([r.item for r in own], [array for r in own for array in r.arrays]),
        offline=[offline_item(rollout) for rollout in rollouts if rollout.offline],
    )


@dataclass
class ReplayProgress:
    """Figures so far, of the replay that this one goes on with too."""

    evaluations: list[EvaluationResult] = field(default_factory=list[EvaluationResult])
    """Without the samples, which are in a file."""
    reverse_kl_first: float | None = None
    reverse_kl_last: float | None = None
    last: StepMetrics | None = None
    """Of the last step of this process; None before it."""
    tokens_trained: int = 0
    epoch: int = 0

    def state(self) -> dict[str, Any]:
        """Of what is carried over, as JSON types."""
        return msgspec.to_builtins(
            _ProgressState(
                tuple(self.evaluations), self.reverse_kl_first, self.reverse_kl_last, self.tokens_trained, self.epoch
            )
        )

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> ReplayProgress:
        """Raises msgspec.ValidationError for what is none."""
        told = msgspec.convert(state, _ProgressState)
        return cls(
            evaluations=list(told.evaluations),
            reverse_kl_first=told.reverse_kl_first,
            reverse_kl_last=told.reverse_kl_last,
            tokens_trained=told.tokens_trained,
            epoch=told.epoch,
        )


class _ProgressState(msgspec.Struct, frozen=True):
    evaluations: tuple[EvaluationResult, ...]
    reverse_kl_first: float | None
    reverse_kl_last: float | None
    tokens_trained: int
    epoch: int


class Replay:
    """Runs the steps `trainer.steps_done` .. `steps`, or until the batches end."""

    def __init__(
        self,
        recording: Recording,
        trainer: Trainer,
        metrics: MetricsWriter,
        config: LearnerConfig,
        *,
        steps: int,
        evaluate: Callable[[int], EvaluationResult] | None,
        save_checkpoint: Callable[[int, StepMetrics, ReplayProgress], None],
        progress: ReplayProgress | None = None,
        after_step: Callable[[int, ReplayProgress], None] = lambda step, progress: None,
    ) -> None:
        """`evaluate(step)` gives the figures of the present weights (None: nobody can); `save_checkpoint(step, figures,
        progress)` keeps the weights. `progress`: of the replay that is gone on with."""
        self._recording = recording
        self._trainer = trainer
        self._metrics = metrics
        self._config = config
        self._steps = steps
        self._evaluate = evaluate
        self._save_checkpoint = save_checkpoint
        self._after_step = after_step
        self._clock = WaitClock()
        self.progress = progress or ReplayProgress()

    def run(self, order: Iterator[Turn]) -> None:
        """Train one batch per turn; evaluations as in a run, at both ends and every `eval_every` steps. `order` begins
        with the turn of the trainer's next step."""
        every = self._config.eval_every
        if every and self._trainer.steps_done % every == 0:  # a checkpoint is written before the evaluation of its step
            self._evaluate_now()
        for turn in order:
            if self._trainer.steps_done >= self._steps:
                break
            self._one_step(turn)
            step = self._trainer.steps_done
            if every and step % every == 0:
                self._evaluate_now()
        self._evaluate_now()
        self.checkpoint()

    def checkpoint(self) -> None:
        """Of the present weights, if a step was made."""
        if self.progress.last is None:
            return
        with self._clock.waiting("checkpoint"):
            try:
                self._save_checkpoint(self._trainer.steps_done, self.progress.last, self.progress)
            except OSError as error:
                log.error("the checkpoint of step %d could not be written: %s", self._trainer.steps_done, error)

    def _one_step(self, turn: Turn) -> None:
        with self._clock.waiting("data"):
            kept = self._recording.batches[turn.batch]
            batch = read_batch(self._recording, kept)
        outcome = finite_step(self._trainer, batch.own, batch.offline)
        step, progress, figures = self._trainer.steps_done, self.progress, outcome.figures
        progress.epoch = turn.epoch
        if figures is not None:
            progress.last = figures
            progress.tokens_trained += figures.tokens
            if progress.reverse_kl_first is None:
                progress.reverse_kl_first = figures.reverse_kl
            progress.reverse_kl_last = figures.reverse_kl
        train = {"tokens": 0, "items": len(batch.own)} if figures is None else figures.as_dict()
        self._metrics.step(
            step,
            {**train, "items_nonfinite": len(outcome.masked)},
            staleness=kept.record.staleness,
            waits=self._clock.take(),
            snapshot=None,
            weights={},
            tasks_dropped={},
            tasks_done=kept.record.tasks_done,
            others={"replay/epoch": turn.epoch, "replay/recorded_step": kept.record.version.step},
        )
        self._after_step(step, progress)
        every = self._config.checkpoint_every
        if every and step % every == 0 and step < self._steps:
            self.checkpoint()

    def _evaluate_now(self) -> None:
        """Unless these weights have been evaluated."""
        step, done = self._trainer.steps_done, self.progress.evaluations
        if self._evaluate is None or (done and done[-1].step == step):
            return
        with self._clock.waiting("eval"):
            result = self._evaluate(step)
        self._metrics.evaluation(result)
        done.append(msgspec.structs.replace(result, samples=()))
