"""The learner's loop: one scored batch in, one optimizer step, one weight version out.

    main thread   (here) asks the buffer for the batch of the next step, trains it, says so, publishes, records; every
                  so many steps it starts an evaluation or writes a checkpoint. It waits for a batch (unblocked by the
                  buffer, once enough is scored), for evaluations at both ends of the run, and for the buffer's
                  acknowledgement before a checkpoint, so that model, task stream and ledger speak of the same step.
    publisher     (weights.publisher) broadcasts each version while the next step is under way.
    client        (protocol.client) the connection, resending, heartbeats.

The clock of the run is here: `version.step` optimizer steps have been applied. A batch asked for at step k is trained
against version k and makes version k + 1; the buffer guarantees that none of its tokens is too stale for that.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from learner.batch import TrainItem, train_items
from learner.config import LearnerConfig
from learner.evaluation.desk import EvalDesk
from learner.evaluation.evaluation import EvaluationResult
from learner.evaluation.figures import describe
from learner.inbox import Delivered, Inbox, RunStopped, StopAsked, StopRequest
from learner.offline import OfflineMixer
from learner.prompts.sample_book import Account, Trained
from learner.prompts.tasks import TaskStream
from learner.reports.figures import RolloutFigures, WorkerFigures
from learner.reports.metrics import MetricsWriter
from learner.reports.wait_clock import WaitCause, WaitClock
from learner.step.ema import StudentEma
from learner.step.finite_step import Outcome, finite_step
from learner.step.train_step import StepMetrics, Trainer
from models.logprobs import lm_head
from protocol.client import Client
from protocol.errors import LinkError
from protocol.messages import (
    Batch,
    BatchTrained,
    BatchWanted,
    LearnerStarted,
    RunFinished,
    Snapshot,
    SnapshotWanted,
    TasksOffered,
    WeightVersion,
)
from recording.writer import BatchRecorder
from weights.publisher import Publisher, PublisherStats

log = logging.getLogger(__name__)

PUMP_S: Final = 0.1
"""One wait for the buffer; bounds how late the cause of a longer wait is noticed."""
ASK_AGAIN_S: Final = 2.0
"""A wanted batch is asked for again this often (the answer is the same batch)."""
LOOK_EVERY_S: Final = 0.5
"""A waiting learner asks what the buffer holds this often, to know what it waits for."""
TASKS_PER_MESSAGE: Final = 256
DOUBTFUL_SHARE: Final = 0.75
"""Of the log-prob of a uniform guess: a teacher this far down on the first batch is worth an error in the log."""
GOODBYE_S: Final = 30.0
"""How long the buffer may take to end the run once the learner is done."""
STOP_ANSWER_S: Final = 15.0
"""How long it may be silent when the learner, asked to leave, needs its answer for a checkpoint."""


class LearnerStalled(RuntimeError):
    """Nothing to train came for too long. The message says what the buffer holds."""


@dataclass(slots=True)
class Progress:
    """Figures of the run so far, for the summary."""

    evaluations: list[EvaluationResult]
    reverse_kl_first: float | None = None
    reverse_kl_last: float | None = None
    tokens_trained: int = 0
    """Of the student's own, as in the ledger."""
    tokens_trained_offline: int = 0
    """Of the teacher's text; the ledger knows nothing of them."""
    last: StepMetrics | None = None
    checkpoint: Path | None = None
    """Folder of the newest."""
    checkpoints_failed: int = 0
    """Checkpoints that could not be written."""
    steps_skipped: int = 0
    """Steps of which nothing finite was left to train."""


class LearnerLoop:
    """Runs steps `version.step` .. `steps`. Everything it uses is made, and closed, by learner.worker."""

    def __init__(
        self,
        *,
        client: Client,
        trainer: Trainer,
        stream: TaskStream,
        publisher: Publisher,
        metrics: MetricsWriter,
        make_eval_desk: Callable[[Callable[[EvaluationResult], None]], EvalDesk],
        save_checkpoint: Callable[[WeightVersion, Snapshot], None],
        config: LearnerConfig,
        version: WeightVersion,
        parent: WeightVersion,
        steps: int,
        ema: StudentEma | None = None,
        mixer: OfflineMixer | None = None,
        recorder: BatchRecorder | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        """`version`, `parent`: as in LearnerStarted. `mixer`: what adds the teacher's rollouts to the batches;
        `recorder`: what keeps them in a file; `stop`: what asks the loop to end early."""
        self._client = client
        self._trainer = trainer
        self._last_batch_id: int | None = None
        self._skipped_in_a_row = 0
        self._stream = stream
        self._publisher = publisher
        self._metrics = metrics
        self._ema = ema
        self._save_checkpoint = save_checkpoint
        self._config = config
        self._version = version
        self._parent = parent
        self._first_step = version.step
        self._steps = steps
        self._mixer = mixer
        self._recorder = recorder
        self._stop = stop or StopRequest()
        self._clock = WaitClock()
        self._rollout_figures = RolloutFigures()
        self._worker_figures = WorkerFigures()
        self._desk = make_eval_desk(self._on_evaluation)
        self._inbox = Inbox(client, on_membership=publisher.membership, on_eval=self._desk.add)
        self.progress = Progress(evaluations=[])

    @property
    def clock(self) -> WaitClock:
        return self._clock

    @property
    def versions_published(self) -> int:
        """Broadcasts that reached every member of the weight group, and those that found nobody there."""
        return self._publisher.stats.broadcasts_total

    @property
    def version(self) -> WeightVersion:
        return self._version

    def run(self) -> None:
        """All steps, the evaluations around them and the checkpoints. Raises RunStopped when the buffer ends the
        run, also when it does so because the last checkpoint could not be written, LearnerStalled when nothing to train
        comes, StopAsked when it was asked to leave (what it trained is in a checkpoint then), and whatever a step
        raises."""
        try:
            self._run()
        except StopAsked:
            self._save_before_leaving()
            raise

    def _run(self) -> None:
        self._client.send(LearnerStarted(self._version, self._parent, self._stream.next_task_id, self._stream.progress))
        self._publisher.publish(self._version, self._trainer.weights())
        if self._ema is not None:
            self._ema.publish(self._version)  # before any task: no rollout is graded by another teacher
        self._inbox.tasks_wanted = 1  # the first acknowledgement says how many more
        self._offer_tasks()
        if self._config.eval_every and self._version.step == 0:
            self._evaluate_and_wait()
        while self._version.step < self._steps:
            self._one_step()
        self._close_run()

    def _one_step(self) -> None:
        delivered = self._next_batch()
        items = train_items(delivered.batch.items, delivered.arrays)
        mixed = self._mixer.take(sum(item.n_trained for item in items)) if self._mixer is not None else []
        outcome = finite_step(self._trainer, items, [item for _, item in mixed])
        self._version = WeightVersion(self._version.epoch, self._version.step + 1)
        self._client.send(BatchTrained(delivered.batch.batch_id, self._version, outcome.masked))
        self._stop_if_diverged(outcome)
        step = self._version.step
        if step % self._config.publish_every == 0 or step == self._steps:
            with self._clock.waiting("weights"):
                self._publisher.publish(self._version, self._trainer.weights())
        if self._ema is not None:
            with self._clock.waiting("weights"):
                self._ema.step(self._version, self._trainer.weights())
        account = self._account(delivered.batch, items, outcome)
        self._offer_tasks()
        if self._recorder is not None:
            self._recorder.add(
                delivered.batch,
                account.settled,
                account.tasks_done,
                outcome.masked,
                delivered.arrays,
                [one for one, _ in mixed],
            )
        self._report(delivered, outcome, account)
        every = self._config.checkpoint_every
        if every and step % every == 0 and step < self._steps:
            self._checkpoint(delivered.batch.batch_id)
        if self._config.eval_every and step % self._config.eval_every == 0 and step < self._steps:
            self._desk.start(self._version)
        self._last_batch_id = delivered.batch.batch_id

    def _account(self, batch: Batch, items: Sequence[TrainItem], outcome: Outcome) -> Account:
        """Which samples and tasks are settled with this step."""
        samples = [(one.item.task_id, one.item.sample_index, one.item.rollout_id, one.n_trained) for one in items]
        trained = [Trained(*sample) for sample in samples if sample[2] not in outcome.masked]
        left_out = {sample[:2] for sample in samples if sample[2] in outcome.masked}
        return self._stream.step(trained, batch.settled, left_out)

    def _stop_if_diverged(self, outcome: Outcome) -> None:
        """A run that trains nothing is ended for everybody: started again, it would go on like that."""
        if outcome.figures is not None:
            self._skipped_in_a_row = 0
            return
        self.progress.steps_skipped += 1
        self._skipped_in_a_row += 1
        log.error("step %d is skipped: no rollout of its batch gives finite numbers", self._version.step)
        if self._skipped_in_a_row < self._config.max_skipped_steps:
            return
        self._finish(
            ok=False,
            reason=f"{self._skipped_in_a_row} steps in a row gave no finite number (learner.max_skipped_steps), the "
            f"last was {self._version.step}: the weights have diverged, or a teacher is broken; go on from an earlier "
            "checkpoint with a lower learner.lr, and see learner-0.log",
        )

    def _next_batch(self) -> Delivered:
        """Wait for the batch of this version, putting the wait down to what it is for."""
        began_s = asked_s = looked_s = time.monotonic()
        wanted = BatchWanted(version=self._version)
        self._client.send(wanted)
        with self._clock.waiting("data"):
            while True:
                self._stop.check()
                self._inbox.pump(PUMP_S)
                self._desk.ask()
                self._offer_tasks()
                batch = self._inbox.batch
                if batch is not None and batch.batch.version == self._version:
                    self._inbox.batch = None
                    if not batch.batch.items:
                        self._stream.step((), batch.batch.settled)
                        raise LearnerStalled(f"nothing is left to train at step {self._version.step}")
                    return batch
                now_s = time.monotonic()
                if now_s - asked_s > ASK_AGAIN_S:
                    asked_s = now_s
                    self._client.send(wanted)
                if now_s - began_s > PUMP_S:
                    self._clock.blame(self._cause_of_wait())
                if now_s - looked_s > LOOK_EVERY_S:
                    looked_s = now_s
                    self._client.send(SnapshotWanted())
                if now_s - began_s > self._config.stall_timeout_s:
                    raise LearnerStalled(
                        f"no batch for step {self._version.step} in {self._config.stall_timeout_s:.0f} s: "
                        f"{describe_queues(self._inbox.snapshot)}; see the actors' and teachers' logs"
                    )

    def _cause_of_wait(self) -> WaitCause:
        """Weights that are not out yet; else grades, when all that is generated waits for them; else data."""
        snapshot = self._inbox.snapshot
        if self._publisher.busy:
            return "weights"
        if snapshot is None:
            return "data"
        queues = snapshot.queues
        ungraded = queues.get("tokens_unscored", 0) + queues.get("tokens_scoring", 0)
        generating = queues.get("tickets_outstanding", 0)
        return "scoring" if ungraded > 0 and generating == 0 else "data"

    def _offer_tasks(self) -> None:
        """Keep the buffer's queue topped up."""
        wanted, self._inbox.tasks_wanted = self._inbox.tasks_wanted, 0
        for first in range(0, wanted, TASKS_PER_MESSAGE):
            offers = self._stream.next(min(TASKS_PER_MESSAGE, wanted - first))
            self._client.send(TasksOffered(tasks=tuple(o.task for o in offers)), [o.frame for o in offers])

    def _evaluate_and_wait(self) -> None:
        """Evaluate the present version, with no step in between."""
        self._desk.start(self._version)
        self._wait_for_evaluations()

    def _wait_for_evaluations(self) -> None:
        deadline_s = time.monotonic() + self._config.stall_timeout_s
        with self._clock.waiting("eval"):
            while self._desk.active:
                self._stop.check()
                self._desk.ask()
                self._inbox.pump(PUMP_S)
                self._offer_tasks()
                self._heartbeat()
                if time.monotonic() > deadline_s:
                    log.error("evaluations incomplete after %.0f s", self._config.stall_timeout_s)
                    self._desk.give_up()

    def _on_evaluation(self, result: EvaluationResult) -> None:
        self._metrics.evaluation(result)
        self.progress.evaluations.append(msgspec.structs.replace(result, samples=()))  # they are in a file
        log.info("evaluation at step %d: %s", result.step, describe(result))
        for tag, figures in result.tags.items():
            log.info("evaluation at step %d, %s: %s", result.step, tag, describe(figures))

    def _checkpoint(self, batch_id: int) -> OSError | None:
        """Model, optimizer, stream and ledger of one and the same step. Returns why it could not be written: training
        goes on then, and the next one may find room."""
        with self._clock.waiting("checkpoint"):
            snapshot = self._snapshot_after(batch_id)
            if self._recorder is not None:
                self._recorder.sync()
            try:
                self._save_checkpoint(self._version, snapshot)
            except OSError as error:
                self.progress.checkpoints_failed += 1
                log.error(
                    "the checkpoint of step %d could not be written (%d so far): %s; the newest one is %s",
                    self._version.step,
                    self.progress.checkpoints_failed,
                    error,
                    self.progress.checkpoint or "none of this process",
                )
                self._heartbeat()
                return error
        return None

    def _save_before_leaving(self) -> None:
        """A checkpoint of all that was trained. Without one the learner leaves all the same: the log says why."""
        if self._last_batch_id is None:
            log.info("asked to leave before the first step of this process; there is nothing new to keep")
            return
        try:
            self._checkpoint(self._last_batch_id)
        except (LearnerStalled, LinkError) as error:
            log.error("no checkpoint of step %d: %s", self._version.step, error)

    def _snapshot_after(self, batch_id: int) -> Snapshot:
        """A snapshot in which the batch counts as trained."""
        deadline_s = time.monotonic() + (STOP_ANSWER_S if self._stop.asked else self._config.stall_timeout_s)
        while self._inbox.last_trained_ack < batch_id:
            self._inbox.pump(PUMP_S)
            if time.monotonic() > deadline_s:
                raise LearnerStalled(f"the buffer did not acknowledge batch {batch_id} as trained")
        self._inbox.snapshot = None
        self._client.send(SnapshotWanted())
        while (snapshot := self._inbox.snapshot) is None:
            self._inbox.pump(PUMP_S)
            if time.monotonic() > deadline_s:
                raise LearnerStalled("the buffer did not answer with its snapshot")
        return snapshot

    def _close_run(self) -> None:
        """The last evaluation and checkpoint, then the end of the run for everybody."""
        with self._clock.waiting("weights"):
            self._publisher.wait_idle(self._config.stall_timeout_s)
        if self._config.eval_every:
            self._evaluate_and_wait()
        lost = self._checkpoint(self._last_batch_id) if self._last_batch_id is not None else None
        self._heartbeat()
        reason = f"{self._version.step} steps done"
        if lost is not None:
            reason += f", but the last checkpoint could not be written: {lost}; make room and go on by --resume"
        self._finish(ok=lost is None, reason=reason)

    def _finish(self, *, ok: bool, reason: str) -> None:
        """The end of the run for everybody. Raises RunStopped where it is not a good one."""
        self._client.send(RunFinished(ok=ok, reason=reason))
        self._heartbeat(at_once=True)  # the last figures, for the buffer's final account
        deadline_s = time.monotonic() + GOODBYE_S
        while time.monotonic() < deadline_s:
            try:
                self._inbox.pump(PUMP_S)
            except RunStopped as stopped:
                if stopped.shutdown.ok:
                    return
                raise
        raise LearnerStalled(f"the buffer did not end the run within {GOODBYE_S:.0f} s of RunFinished")

    def _report(self, delivered: Delivered, outcome: Outcome, account: Account) -> None:
        """Metrics of the step just made, and the gauges of the next heartbeat. A skipped one trained 0 tokens."""
        batch, figures = delivered.batch, outcome.figures
        if figures is not None:
            self._note_progress(figures)
        train = {"tokens": 0, "items": len(batch.items)} if figures is None else figures.as_dict()
        self._metrics.step(
            self._version.step,
            {**train, "items_nonfinite": len(outcome.masked)},
            staleness=batch.staleness,
            waits=self._clock.take(),
            snapshot=batch.snapshot,
            weights=weight_figures(self._publisher.stats) | (self._ema.figures if self._ema is not None else {}),
            tasks_dropped=self._stream.dropped,
            tasks_done=account.tasks_done,
            others={
                **(self._mixer.figures if self._mixer is not None else {}),
                **(self._recorder.figures if self._recorder is not None else {}),
                **self._rollout_figures.update(batch.items, delivered.arrays),
                **self._worker_figures.update(batch.snapshot),
            },
        )
        self._heartbeat()

    def _note_progress(self, figures: StepMetrics) -> None:
        progress = self.progress
        progress.tokens_trained += figures.tokens
        progress.tokens_trained_offline += figures.offline.tokens if figures.offline is not None else 0
        progress.last = figures
        if figures.reverse_kl is None:
            return  # no teacher has graded any of it
        if progress.reverse_kl_first is None:
            progress.reverse_kl_first = figures.reverse_kl
            self._doubt_the_teacher(figures.logprob - figures.reverse_kl)
        progress.reverse_kl_last = figures.reverse_kl

    def _doubt_the_teacher(self, teacher_logprob: float) -> None:
        """A teacher on random weights finds every token about as likely as any other. It must be noticed."""
        uniform_logprob = -math.log(lm_head(self._trainer.model).weight_VH.shape[0])
        if teacher_logprob < DOUBTFUL_SHARE * uniform_logprob:
            log.error(
                "the teacher gives the student's tokens %.2f nats each, random weights would give %.2f: is it the "
                "right checkpoint, fully loaded?",
                teacher_logprob,
                uniform_logprob,
            )

    def _heartbeat(self, *, at_once: bool = False) -> None:
        progress, total = self.progress, self._clock.total()
        gauges = {
            "step": float(self._version.step),
            "steps_total": float(self._steps),
            "tokens_trained_total": float(progress.tokens_trained),
            "tokens_trained_offline_total": float(progress.tokens_trained_offline),
            "metrics_unwritten_rows_total": float(self._metrics.unwritten.rows_total),
            "checkpoints_failed_total": float(progress.checkpoints_failed),
            "steps_skipped_total": float(progress.steps_skipped),
            **total.gauges(),
        }
        if progress.last is not None:
            gauges["loss"] = progress.last.loss
            if progress.last.reverse_kl is not None:
                gauges["reverse_kl"] = progress.last.reverse_kl
        for result in progress.evaluations[-1:]:
            if result.accuracy_greedy is not None:
                gauges["eval_greedy"] = result.accuracy_greedy
            if result.accuracy_sampled is not None:
                gauges["eval_sampled"] = result.accuracy_sampled
        self._client.set_heartbeat(self._version, gauges, at_once=at_once)


def weight_figures(stats: PublisherStats) -> dict[str, float]:
    """The publisher's numbers, flat, for the metrics."""
    figures = {
        name: float(value)
        for name, value in dataclasses.asdict(stats).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    figures.update({f"dropped_{reason}_total": float(n) for reason, n in stats.dropped_total.items()})
    return figures


def describe_queues(snapshot: Snapshot | None) -> str:
    """One line for an error: what the buffer held and who was there."""
    if snapshot is None:
        return "the buffer said nothing of what it holds"
    held = ", ".join(f"{name} {n}" for name, n in snapshot.queues.items())
    alive = [peer.name for peer in snapshot.peers if peer.alive]
    return f"the buffer holds {held}; connected are {', '.join(sorted(alive)) or 'nobody'}"
