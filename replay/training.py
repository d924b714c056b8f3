"""Trains from a file of recorded batches, with the same step, metrics and checkpoints as a run.

    recording --order--> batches --Trainer.step--> metrics, and now and then an evaluation or a checkpoint

In recorded order, from the same student and with the same settings, the updates are those of the recorded run, bit for
bit on the same machine. One thread, which never waits for another process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from stillhouse.learner.batch import TrainItem, train_items
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.evaluation.evaluation import EvaluationResult
from stillhouse.learner.offline import offline_item
from stillhouse.learner.reports.metrics import MetricsWriter
from stillhouse.learner.reports.step_metrics import StepMetrics
from stillhouse.learner.reports.wait_clock import WaitClock
from stillhouse.learner.step.finite_step import finite_step
from stillhouse.learner.step.train_step import Trainer
from stillhouse.recording.reader import Kept, Recording
from stillhouse.replay.plan import Turn

log = logging.getLogger(__name__)


class ReplayBatch(NamedTuple):
    """Items that one step trains."""

    own: list[TrainItem]
    offline: list[TrainItem]
    """Items that were mixed in when the batch was recorded."""


def read_batch(recording: Recording, batch: Kept) -> ReplayBatch:
    """Read one batch. Raises RecordError, or BatchError for a batch that a live learner would refuse too."""
    rollouts = recording.rollouts(batch)
    own = [rollout for rollout in rollouts if not rollout.offline]
    return ReplayBatch(
        own=train_items([r.item for r in own], [array for r in own for array in r.arrays]),
        offline=[offline_item(rollout) for rollout in rollouts if rollout.offline],
    )


class ReplayProgress(msgspec.Struct):
    """Figures so far, including those of the replay that this one resumes. Kept in checkpoints."""

    evaluations: list[EvaluationResult] = []
    """Without the samples, which are in a file."""
    reverse_kl_first: float | None = None
    reverse_kl_last: float | None = None
    tokens_trained: int = 0
    epoch: int = 0


class Replay:
    """Runs the steps from `trainer.steps_done` to `steps`, or until the batches end."""

    def __init__(
        self,
        recording: Recording,
        trainer: Trainer,
        metrics: MetricsWriter,
        config: LearnerConfig,
        *,
        steps: int,
        evaluate: Callable[[int, str], EvaluationResult] | None,
        save_checkpoint: Callable[[int, StepMetrics, ReplayProgress], None],
        progress: ReplayProgress | None = None,
        after_step: Callable[[int, StepMetrics | None], None],
    ) -> None:
        """`evaluate(step, name)` evaluates the present weights on one set (None: no evaluations).
        `save_checkpoint(step, figures, progress)` saves them. `progress`: that of the replay that is resumed."""
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
        self._last: StepMetrics | None = None
        """Figures of the last step of this process; None before it."""

    def run(self, order: Iterator[Turn]) -> None:
        """Train one batch per turn, and evaluate as in a run: at both ends and every few steps. `order` starts with the
        turn of the trainer's next step."""
        # A checkpoint is written before the evaluation of its step.
        self._evaluate_now(self._config.evaluated_at(self._trainer.steps_done))
        for turn in order:
            if self._trainer.steps_done >= self._steps:
                break
            self._one_step(turn)
            self._evaluate_now(self._config.evaluated_at(self._trainer.steps_done))
        self._evaluate_now(self._config.eval_names)
        self.checkpoint()

    def checkpoint(self) -> None:
        """Write a checkpoint of the present weights, if a step was made."""
        if self._last is None:
            return
        with self._clock.waiting("checkpoint"):
            try:
                self._save_checkpoint(self._trainer.steps_done, self._last, self.progress)
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
            self._last = figures
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
            others={
                "replay/epoch": turn.epoch,
                "replay/recorded_step": kept.record.version.step + 1,
                **(figures.of_pools() if figures is not None else {}),
            },
        )
        self._after_step(step, self._last)
        every = self._config.checkpoint_every
        if every and step % every == 0 and step < self._steps:
            self.checkpoint()

    def _evaluate_now(self, names: Sequence[str]) -> None:
        """Evaluate the present weights on these sets, unless that was done."""
        step, done = self._trainer.steps_done, self.progress.evaluations
        already = [result.name for result in done if result.step == step]
        for name in names:
            if self._evaluate is None or name in already:
                continue
            with self._clock.waiting("eval"):
                result = self._evaluate(step, name)
            self._metrics.evaluation(result)
            done.append(msgspec.structs.replace(result, samples=()))
