"""A replay: a recording as the source of the learner's steps, and what a replay does after each.

In recorded order, from the same student and with the same settings, the updates are those of the recorded run, bit for
bit on the same machine. No step waits for another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from stillhouse.learner.assembly import TrainingParts, report_evaluation
from stillhouse.learner.evaluation.evaluation import EvaluationResult
from stillhouse.learner.reports.wait_clock import WaitClock
from stillhouse.learner.sources import RecordedBatches
from stillhouse.learner.steps import StepDone, StepLoop
from stillhouse.models.logprobs import lm_head
from stillhouse.recording.reader import Recording

Evaluate: TypeAlias = Callable[[int, str], EvaluationResult]
"""(step, name of a set) -> figures of the present weights."""
Say: TypeAlias = Callable[[str], None]
AfterStep: TypeAlias = Callable[[StepDone, int], None]
"""Called with each step and its epoch; may raise."""


class Replay:
    """Runs the steps from `parts.version` to `parts.steps`, or until the batches end."""

    def __init__(
        self,
        parts: TrainingParts,
        recording: Recording,
        turns: Iterator[tuple[int, int]],
        *,
        evaluate: Evaluate | None,
        say: Say,
        after_step: AfterStep,
    ) -> None:
        """`turns` starts with that of the next step. `evaluate`: None without evaluations."""
        self._parts = parts
        self._evaluate = evaluate
        self._say = say
        self._after_step = after_step
        self.progress = parts.checkpoints.progress
        self._clock = WaitClock()
        self._source = RecordedBatches(recording, turns, self._clock)
        observers = (
            self._report,
            self.announce,
            self._checkpoint_if_due,
            self._evaluate_if_due,
            self._end_if_far_enough,
        )
        self._loop = StepLoop(parts.trainer, self._source, observers, version=parts.version, steps=parts.steps)

    @property
    def ended_early(self) -> str:
        """Why `learner.until` ended it; empty: it did not."""
        return self.progress.rule.reason if self._loop.ended else ""

    def run(self) -> None:
        """Train one batch per turn, and evaluate as in a run: at both ends and every few steps. A checkpoint is written
        before the evaluation of its step, so a resumed replay begins with that evaluation."""
        first = self._loop.version.step
        if first < self._parts.steps:
            self._evaluate_now(self._parts.config.evaluated_at(first))
        self._loop.ended = first > 0 and bool(self.progress.rule.reason)  # before it was resumed
        self._loop.run()
        if self._loop.version.step > first:
            self._evaluate_now(self._parts.config.eval_names)
        self.checkpoint()
        self._parts.metrics.ended(ok=True)

    def checkpoint(self) -> None:
        """Write a checkpoint of the present weights, if a step was made."""
        if self.progress.last is not None:
            with self._clock.waiting("checkpoint"):
                self._parts.checkpoints.save(self._loop.version)
                self._parts.checkpoints.wait()

    def _report(self, done: StepDone) -> None:
        figures = done.outcome.figures
        self.progress.step = done.version.step
        if figures is not None:
            self.progress.add(figures, vocab_rows=lm_head(self._parts.trainer.model).weight_VH.shape[0])
        self._parts.metrics.step(
            done.version.step,
            done.train,
            staleness=done.batch.staleness,
            waits=self._clock.take(),
            snapshot=None,
            weights={},
            tasks_dropped={},
            tasks_done=done.batch.tasks_done,
            others={**(done.batch.figures or {}), **(figures.of_pools() if figures is not None else {})},
        )

    def announce(self, done: StepDone) -> None:
        self._after_step(done, self._source.epoch)

    def _checkpoint_if_due(self, done: StepDone) -> None:
        every, step = self._parts.config.checkpoint_every, done.version.step
        if every and step % every == 0 and step < self._parts.steps:
            self.checkpoint()

    def _evaluate_if_due(self, done: StepDone) -> None:
        self._evaluate_now(self._parts.config.evaluated_at(done.version.step))

    def _end_if_far_enough(self, _done: StepDone) -> None:
        self._loop.ended = bool(self.progress.rule.reason)

    def _evaluate_now(self, names: Sequence[str]) -> None:
        step = self._loop.version.step
        already = {result.name for result in self.progress.evaluations if result.step == step}
        for name in names:
            if self._evaluate is None or name in already:
                continue
            with self._clock.waiting("eval"):
                result = self._evaluate(step, name)
            for line in report_evaluation(self._parts.metrics, self.progress, result):
                self._say(line)
