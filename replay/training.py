"""A replay: a recording as the source of the learner's steps, and what a replay does after each.

In recorded order, from the same student and with the same settings, the updates are those of the recorded run, bit for
bit on the same machine. One thread, which never waits for another process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.evaluation.evaluation import EvaluationResult
from stillhouse.learner.reports.metrics import MetricsWriter
from stillhouse.learner.reports.step_metrics import StepMetrics
from stillhouse.learner.reports.wait_clock import WaitClock
from stillhouse.learner.sources import RecordedBatches
from stillhouse.learner.step.train_step import Trainer
from stillhouse.learner.steps import StepDone, StepLoop
from stillhouse.protocol.messages import WeightVersion
from stillhouse.recording.reader import Recording

log = logging.getLogger(__name__)


class ReplayProgress(msgspec.Struct):
    """Figures so far, including those of the replay that this one resumes. Kept in checkpoints."""

    evaluations: list[EvaluationResult] = []
    """Without the samples, which are in a file."""
    reverse_kl_first: float | None = None
    reverse_kl_last: float | None = None
    tokens_trained: int = 0
    epoch: int = 0


Evaluate: TypeAlias = Callable[[int, str], EvaluationResult]
"""(step, name of a set) -> figures of the present weights."""
SaveCheckpoint: TypeAlias = Callable[[int, StepMetrics, ReplayProgress], None]
AfterStep: TypeAlias = Callable[[int, StepMetrics | None, int], None]
"""Called with the step, its figures and its epoch; may raise."""


class Replay:
    """Runs the steps from `trainer.steps_done` to `steps`, or until the batches end."""

    def __init__(
        self,
        trainer: Trainer,
        recording: Recording,
        turns: Iterator[tuple[int, int]],
        metrics: MetricsWriter,
        config: LearnerConfig,
        *,
        steps: int,
        evaluate: Evaluate | None,
        save_checkpoint: SaveCheckpoint,
        after_step: AfterStep,
        progress: ReplayProgress,
    ) -> None:
        """`turns` starts with that of the next step. `evaluate`: None without evaluations. `progress`: that of
        the replay that is resumed."""
        self._trainer = trainer
        self._metrics = metrics
        self._config = config
        self._steps = steps
        self._evaluate = evaluate
        self._save_checkpoint = save_checkpoint
        self._after_step = after_step
        self.progress = progress
        self._clock = WaitClock()
        self._last: StepMetrics | None = None
        """Figures of the last step of this process; None before it."""
        self._source = RecordedBatches(recording, turns, self._clock)
        observers = (self._count, self._report, self._announce, self._checkpoint_if_due, self._evaluate_if_due)
        version = WeightVersion(0, trainer.steps_done)
        self._loop = StepLoop(trainer, self._source, observers, version=version, steps=steps)

    def run(self) -> None:
        """Train one batch per turn, and evaluate as in a run: at both ends and every few steps. A checkpoint is written
        before the evaluation of its step."""
        self._evaluate_now(self._config.evaluated_at(self._trainer.steps_done))
        self._loop.run()
        self._evaluate_now(self._config.eval_names)
        self.checkpoint()
        self._metrics.ended(ok=True)

    def checkpoint(self) -> None:
        """Write a checkpoint of the present weights, if a step was made."""
        if self._last is None:
            return
        with self._clock.waiting("checkpoint"):
            try:
                self._save_checkpoint(self._trainer.steps_done, self._last, self.progress)
            except OSError as error:
                log.error("the checkpoint of step %d could not be written: %s", self._trainer.steps_done, error)

    def _count(self, done: StepDone) -> None:
        progress, figures = self.progress, done.outcome.figures
        progress.epoch = self._source.epoch
        if figures is not None:
            self._last = figures
            progress.tokens_trained += figures.tokens
            if progress.reverse_kl_first is None:
                progress.reverse_kl_first = figures.reverse_kl
            progress.reverse_kl_last = figures.reverse_kl

    def _report(self, done: StepDone) -> None:
        of_pools = done.outcome.figures.of_pools() if done.outcome.figures is not None else {}
        self._metrics.step(
            done.version.step,
            done.train,
            staleness=done.batch.staleness,
            waits=self._clock.take(),
            snapshot=None,
            weights={},
            tasks_dropped={},
            tasks_done=done.batch.tasks_done,
            others={**(done.batch.figures or {}), **of_pools},
        )

    def _announce(self, done: StepDone) -> None:
        self._after_step(done.version.step, self._last, self._source.epoch)

    def _checkpoint_if_due(self, done: StepDone) -> None:
        every, step = self._config.checkpoint_every, done.version.step
        if every and step % every == 0 and step < self._steps:
            self.checkpoint()

    def _evaluate_if_due(self, done: StepDone) -> None:
        self._evaluate_now(self._config.evaluated_at(done.version.step))

    def _evaluate_now(self, names: Sequence[str]) -> None:
        step, done = self._trainer.steps_done, self.progress.evaluations
        already = [result.name for result in done if result.step == step]
        for name in names:
            if self._evaluate is None or name in already:
                continue
            with self._clock.waiting("eval"):
                result = self._evaluate(step, name)
            self._metrics.evaluation(result)
            done.append(msgspec.structs.replace(result, samples=()))
