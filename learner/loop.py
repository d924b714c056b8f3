"""The learner's loop: one scored batch in, one optimizer step, one weight version out.

    main thread   (learner.steps) trains a batch. Then, here, it reports it as trained, publishes the weights and writes
                  metrics. Every few steps it starts an evaluation or copies what a checkpoint needs. It waits for a
                  batch (until the buffer has enough scored tokens), for the evaluations at both ends of the run, and
                  for the buffer's acknowledgement before a checkpoint, so that model, task stream and ledger belong to
                  the same step.
    next-batch    (learner.feed) receives and packs the batch of the next step while the present one trains.
    checkpoint    (learner.checkpoints.writer) writes those copies while the next steps are under way.
    publisher     (weights.publisher) broadcasts each version while the next step is under way.
    client        (protocol.client) the connection, resending, heartbeats.

The loop owns the clock of the run: `version.step` optimizer steps have been applied. A batch requested for version k is
trained against version k and makes version k + 1. The buffer guarantees that none of its tokens is too stale for that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stillhouse.learner.assembly import TrainingParts, report_evaluation
from stillhouse.learner.device_turns import InTurns, LearnerTurns
from stillhouse.learner.evaluation.desk import EvaluationDesk
from stillhouse.learner.evaluation.evaluation import EvaluationResult, EvaluationRun
from stillhouse.learner.feed import PUMP_S, BatchFeed, LearnerStalled
from stillhouse.learner.group_rewards import GroupRewards, GroupRewardsFailed
from stillhouse.learner.inbox import Inbox, RunStopped, StopAsked, StopRequest
from stillhouse.learner.offline import OfflineMixer
from stillhouse.learner.prompts.sample_book import TrainedSample
from stillhouse.learner.prompts.tasks import TaskStream, in_messages
from stillhouse.learner.reports.alarms import LENGTH, PER_ANSWER, describe_alarm
from stillhouse.learner.reports.figures import RolloutFigures, WorkerFigures, staleness
from stillhouse.learner.reports.progress import AccountWriter, weight_figures
from stillhouse.learner.reports.sample import Decode, sample_of
from stillhouse.learner.reports.wait_clock import WaitClock
from stillhouse.learner.sources import BufferBatches
from stillhouse.learner.step.ema import StudentEma
from stillhouse.learner.steps import StepDone, StepLoop
from stillhouse.models.flops import ForwardFlops
from stillhouse.models.logprobs import lm_head
from stillhouse.protocol.client import Client
from stillhouse.protocol.errors import LinkError
from stillhouse.protocol.messages import (
    Batch,
    BatchTrained,
    LearnerStarted,
    RunFinished,
    Snapshot,
    SnapshotWanted,
    WeightVersion,
)
from stillhouse.recording.writer import BatchRecorder
from stillhouse.tracing import events
from stillhouse.weights.publisher import Publisher

log = logging.getLogger(__name__)

MAX_SKIPPED_STEPS: Final = 3
"""Skipped steps in a row that end the run."""
GOODBYE_S: Final = 30.0
"""Time for the buffer to end the run once the learner is done."""
HEARTBEAT_S: Final = 0.5
"""Interval at which a waiting learner updates the figures of its heartbeat."""
ACCOUNT_S: Final = 2.0
"""Interval at which learner.json is written anew, from which the launcher shows a sample."""
STOP_ANSWER_S: Final = 15.0
"""Time for the buffer to answer when a learner that was asked to stop needs its snapshot for a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class LearnerParts(TrainingParts):
    """What a run's loop uses. learner.worker makes and closes all of it."""

    client: Client
    stream: TaskStream
    publisher: Publisher
    make_evaluation: Callable[[WeightVersion, str], EvaluationRun]
    """An evaluation of this version on the set of this name."""
    parent: WeightVersion
    """As in LearnerStarted."""
    account: AccountWriter
    stop: StopRequest
    """Ends the loop early."""
    ema: StudentEma | None = None
    mixer: OfflineMixer | None = None
    """Adds the teacher's rollouts to the batches."""
    recorder: BatchRecorder | None = None
    group_rewards: GroupRewards | None = None
    """Judges groups."""
    fetch_ahead: bool = True
    """Ask for a batch while the one before it trains; without staleness it could hold nothing."""
    max_equal_batches: int = 0
    """`buffer.dynamic_sampling`."""
    decode: Decode | None = None
    """For the sample of a step."""
    forward: ForwardFlops | None = None
    """What tokens cost the student; None: not known."""
    turns: LearnerTurns | None = None
    """With `launch.share = turns`."""

    @property
    def figures(self) -> dict[str, float]:
        """Running totals of the optional parts, by tag."""
        parts = (self.mixer, self.recorder, self.group_rewards)
        return {tag: value for part in parts if part is not None for tag, value in part.figures.items()}


class EndRun(Exception):
    """An observer ends the run for all workers: a restarted learner would come to the same."""

    def __init__(self, reason: str, *, save: bool) -> None:
        """`save`: with a checkpoint."""
        super().__init__(reason)
        self.save = save


class LearnerLoop:
    """Runs the steps of a run, from `version.step` to `steps`."""

    def __init__(self, parts: LearnerParts) -> None:
        self._parts = parts
        self._client, self._config, self._steps = parts.client, parts.config, parts.steps
        self._stop, self._publisher, self._checkpoints = parts.stop, parts.publisher, parts.checkpoints
        self.progress = parts.checkpoints.progress
        self.clock = WaitClock()
        self._last_batch_id: int | None = None
        self._skipped_in_a_row = self._alarms_seen = 0
        self._account_s = self._heartbeat_s = 0.0
        self._rollout_figures, self._worker_figures = RolloutFigures(), WorkerFigures()
        self._desk = EvaluationDesk(parts.make_evaluation, parts.client.send, self._on_evaluation)
        self._inbox = Inbox(parts.client, on_membership=parts.publisher.membership, on_eval=self._desk.add)
        self._feed = BatchFeed(
            parts.client,
            self._inbox,
            pack=parts.trainer.pack_ahead,
            clock=self.clock,
            stop=parts.stop,
            publishing=lambda: parts.publisher.busy,
            meanwhile=self._meanwhile,
            stall_timeout_s=parts.config.stall_timeout_s,
        )
        source = BufferBatches(
            self._feed,
            parts.stream,
            self.clock,
            ahead_until=parts.steps if parts.fetch_ahead else 0,
            group_rewards=parts.group_rewards,
            mixer=parts.mixer,
        )
        observers = (
            self._trace,
            self._tell_buffer,
            self._stop_if_diverged,
            self._publish,
            self._settle,
            self._record,
            self._report,
            self._stop_if_alarmed,
            self._checkpoint_if_due,
            self._end_if_far_enough,  # first: the step that ends the run is evaluated at its end
            self._evaluate_if_due,
        )
        batches = source if parts.turns is None else InTurns(source, self._aside, self._back)
        self._loop = StepLoop(parts.trainer, batches, observers, version=parts.version, steps=parts.steps)

    @property
    def version(self) -> WeightVersion:
        return self._loop.version

    def run(self) -> None:
        """Run all steps, evaluations and checkpoints. Raises RunStopped when the buffer ends the run, also after a last
        checkpoint that could not be written; LearnerStalled when no batch arrives; StopAsked after SIGTERM, once the
        trained steps are in a checkpoint; and whatever a step raises."""
        try:
            self._begin()
            self._loop.run()
            self._close_run()
        except StopAsked:
            self._save_before_leaving()
            raise
        except EndRun as end:
            if end.save:
                self._save_before_leaving()
            self._finish(ok=False, reason=str(end))
        except GroupRewardsFailed as error:
            self._finish(ok=False, reason=str(error))
            raise
        finally:
            self._feed.close()

    def _begin(self) -> None:
        events.mark("ready")
        parts, stream = self._parts, self._parts.stream
        self._alarms_seen = self.progress.alarms.raised_total
        self._client.send(LearnerStarted(self.version, parts.parent, stream.next_task_id, stream.progress))
        self._client.send(SnapshotWanted())  # where the figures of the whole run begin (`RunLimits`)
        self._publisher.publish(self.version, parts.trainer.named_weights())
        if parts.ema is not None:
            parts.ema.publish(self.version)  # before any task: no other teacher scores a rollout
        self._inbox.tasks_wanted = 1  # the first acknowledgement asks for more
        self._offer_tasks()
        if self._config.eval_every and self.version.step == 0:
            self._evaluate_and_wait()
        self._loop.ended = self.version.step > 0 and bool(self.progress.rule.reason)  # before it was resumed

    # ------------------------------------------------------------------------------------------------- observers

    def _trace(self, done: StepDone) -> None:
        if not events.tracing():
            return
        trained = [one for one in done.batch.items if one.n_trained and one.item.rollout_id not in done.outcome.masked]
        places = [(one.item.rollout_id, int(one.train_mask_L.argmax()), one.item.end) for one in trained]
        tokens = sum(one.n_trained for one in trained)
        events.done("learner", "train", done.began_ns, step=done.version.step, items=places, tokens=tokens)
        mean, largest = staleness(done.batch.staleness)
        events.counter("staleness", mean=mean, max=largest)

    def _tell_buffer(self, done: StepDone) -> None:
        self._last_batch_id = _batch(done).batch_id
        self._client.send(BatchTrained(self._last_batch_id, done.version, done.outcome.masked))

    def _stop_if_diverged(self, done: StepDone) -> None:
        if done.outcome.figures is not None:
            self._skipped_in_a_row = 0
            return
        self.progress.steps_skipped += 1
        self._skipped_in_a_row += 1
        log.error("step %d is skipped: no rollout of its batch gives finite numbers", done.version.step)
        if self._skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise EndRun(
                f"{self._skipped_in_a_row} steps in a row gave no finite number, the last was {done.version.step}: "
                "the weights have diverged, or a teacher is broken; resume from an earlier checkpoint with a lower "
                "learner.lr, and see learner-0.log",
                save=False,
            )

    def _publish(self, done: StepDone) -> None:
        step, parts = done.version.step, self._parts
        with self.clock.waiting("weights"):
            if step % self._config.publish_every == 0 or step == self._steps:
                self._publisher.publish(done.version, parts.trainer.named_weights())
            if parts.ema is not None:
                parts.ema.step(done.version, parts.trainer.weights())

    def _settle(self, done: StepDone) -> None:
        """Book the samples and tasks that this step settles, and offer new ones."""
        masked = done.outcome.masked
        samples = [
            (one.item.task_id, one.item.sample_index, one.item.rollout_id, one.n_trained) for one in done.batch.items
        ]
        trained = [TrainedSample(*sample) for sample in samples if sample[2] not in masked]
        left_out = {sample[:2] for sample in samples if sample[2] in masked}
        done.account = self._parts.stream.step(trained, _batch(done).settled, left_out)
        self._offer_tasks()

    def _record(self, done: StepDone) -> None:
        delivered, account = done.batch.delivered, done.account
        if self._parts.recorder is not None and delivered is not None and account is not None:
            settled, masked, mixed = account.settled, done.outcome.masked, list(done.batch.mixed)
            self._parts.recorder.add(delivered.batch, settled, account.tasks_done, masked, delivered.arrays, mixed)

    def _report(self, done: StepDone) -> None:
        parts, progress, batch, step = self._parts, self.progress, _batch(done), done.version.step
        arrays = done.batch.delivered.arrays if done.batch.delivered is not None else ()
        figures, train = done.outcome.figures, done.train
        if figures is not None:
            progress.add(figures, vocab_rows=lm_head(parts.trainer.model).weight_VH.shape[0])
        rollouts = self._rollout_figures.update(batch.items, arrays)
        if LENGTH in rollouts and figures is not None and figures.reverse_kl is not None:
            rollouts[PER_ANSWER] = figures.reverse_kl * rollouts[LENGTH]
        waits, limits, alarms = self.clock.take(), progress.limits, progress.alarms
        progress.step, progress.waits = step, progress.waits.plus(waits)
        progress.flops += self._flops(done)
        if (first := self._inbox.snapshot) is not None and first.time_s < batch.snapshot.time_s:
            limits.update(first)
        alarms.add(step, rollouts | {f"train/{name}": value for name, value in train.items()})
        parts.metrics.step(
            step,
            train,
            staleness=done.batch.staleness,
            waits=waits,
            snapshot=batch.snapshot,
            weights=weight_figures(self._publisher.stats) | (parts.ema.figures if parts.ema is not None else {}),
            tasks_dropped=parts.stream.dropped,
            tasks_done=done.account.tasks_done if done.account is not None else (),
            others={
                **parts.figures,
                **rollouts,
                **(figures.of_pools() if figures is not None else {}),
                **alarms.figures(),
                **self._worker_figures.update(batch.snapshot),
                **limits.update(batch.snapshot),
                **(parts.turns.figures() if parts.turns is not None else {}),
            },
        )
        if parts.decode is not None and (sample := sample_of(step, batch.items, arrays, parts.decode)):
            progress.sample = sample
        self._heartbeat()
        if time.monotonic() - self._account_s > ACCOUNT_S:
            self._account_s = time.monotonic()
            parts.account.write()

    def _flops(self, done: StepDone) -> float:
        """Operations of a step's forward and backward passes."""
        forward, config = self._parts.forward, self._config
        if forward is None or done.outcome.figures is None:
            return 0.0
        lengths = [len(one.tokens_L) for one in (*done.batch.items, *done.batch.offline)]
        frozen = config.lora.rank > 0
        return config.updates_per_batch * sum(forward.training(length, frozen=frozen) for length in lengths)

    def _stop_if_alarmed(self, done: StepDone) -> None:
        """End the run if a new alarm is to end it. Those of before a resume do not: the user has seen them."""
        alarms = self.progress.alarms
        if self._config.stop_on_alarm and alarms.raised_total > self._alarms_seen:
            self.progress.stopped_by_alarm = True
            raise EndRun(f"{describe_alarm(alarms.raised[-1])} (learner.stop_on_alarm)", save=True)

    def _checkpoint_if_due(self, done: StepDone) -> None:
        every, step = self._config.checkpoint_every, done.version.step
        if self._checkpoints.should_save(due=every > 0 and step % every == 0) and step < self._steps:
            self._checkpoint(_batch(done).batch_id)

    def _evaluate_if_due(self, done: StepDone) -> None:
        step = done.version.step
        if step < self._steps and not self._loop.ended and (due := self._config.evaluated_at(step)):
            self._desk.start(done.version, due)

    def _end_if_far_enough(self, done: StepDone) -> None:
        """At a step whose weights the actors get: they answer the last evaluation with them."""
        published = done.version.step % self._config.publish_every == 0
        self._loop.ended = published and bool(self.progress.rule.reason)

    # ------------------------------------------------------------------------------- while it waits, and at the end

    def _stop_if_all_groups_are_equal(self) -> None:
        snapshot, limit = self._inbox.snapshot, self._parts.max_equal_batches
        n = snapshot.queues.get("batches_equal_in_a_row", 0) if snapshot is not None else 0
        if limit and n >= limit:
            raise EndRun(
                f"dynamic sampling dropped {n} batches of rollouts in a row at step {self.version.step}, because all "
                f"rewards of a group were equal; expected fewer than buffer.dynamic_sampling = {limit}. The prompts "
                "are too hard or too easy for the student, or no rollout gets a reward; try others, or a larger "
                "group_size",
                save=True,
            )

    def _meanwhile(self) -> None:
        self._stop_if_all_groups_are_equal()
        self._desk.ask()
        self._offer_tasks()
        if time.monotonic() - self._heartbeat_s > HEARTBEAT_S:
            self._heartbeat()  # a wait may be long, and says what limits the run

    def _aside(self) -> None:
        """Leave a shared device to the others."""
        if self._parts.turns is not None:
            with self.clock.waiting("weights"):
                self._parts.turns.aside(self._pass_time)

    def _back(self) -> None:
        """Wait for the device, where it is shared. Raises LearnerStalled."""
        if self._parts.turns is not None:
            limit_s = STOP_ANSWER_S if self._stop.asked else self._config.stall_timeout_s
            self._parts.turns.back(self.clock, self._pass_time, limit_s)

    def _pass_time(self, seconds: float) -> None:
        self._inbox.pump(seconds)
        if not self._stop.asked:
            self._meanwhile()

    def _offer_tasks(self) -> None:
        wanted, self._inbox.tasks_wanted = self._inbox.tasks_wanted, 0
        for message, frames in in_messages(self._parts.stream.next(wanted)):
            self._client.send(message, frames)

    def _evaluate_and_wait(self) -> None:
        """Evaluate the current version on all sets and wait for the results, also those of earlier evaluations."""
        self._desk.start(self.version, self._config.eval_names)
        self._aside()
        deadline_s = time.monotonic() + self._config.stall_timeout_s
        with self.clock.waiting("eval"):
            while self._desk.active:
                self._stop.check()
                self._desk.ask()
                self._inbox.pump(PUMP_S)
                self._offer_tasks()
                self._heartbeat()
                if time.monotonic() > deadline_s:
                    log.error("evaluations are incomplete after %.0f s", self._config.stall_timeout_s)
                    self._desk.give_up()

    def _on_evaluation(self, result: EvaluationResult) -> None:
        for line in report_evaluation(self._parts.metrics, self.progress, result):
            log.info("%s", line)
        self._parts.account.write()

    def _checkpoint(self, batch_id: int, *, last: bool = False) -> OSError | None:
        """Copy model, optimizer, task stream and ledger of the same step for a checkpoint, which is written in the
        background. If that fails, training goes on: the next one may find room. The last one is waited for; returns
        why it could not be written."""
        self._back()
        with self.clock.waiting("checkpoint"):
            snapshot = self._snapshot_after(batch_id)
            if self._parts.recorder is not None:
                self._parts.recorder.sync()
            self._checkpoints.save(self.version, snapshot)
            if last:
                self.progress.limits.end(snapshot)
            return self._checkpoints.wait() if last else None

    def _save_before_leaving(self) -> None:
        """Save what was trained before leaving. If that fails, the learner logs why and leaves all the same."""
        if self._last_batch_id is None:
            log.info("this process has made no step; there is nothing new to save")
            return
        try:
            self._checkpoint(self._last_batch_id, last=True)
        except (LearnerStalled, LinkError) as error:
            log.error("no checkpoint of step %d: %s", self.version.step, error)

    def _snapshot_after(self, batch_id: int) -> Snapshot:
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
        step, early = self.version.step, self.progress.rule.reason if self.version.step < self._steps else ""
        with self.clock.waiting("weights"):
            self._publisher.wait_idle(self._config.stall_timeout_s)
        if self._config.eval_every:
            if self._last_batch_id is not None:
                self.progress.limits.end(self._snapshot_after(self._last_batch_id))
            self._evaluate_and_wait()
        lost = self._checkpoint(self._last_batch_id, last=True) if self._last_batch_id is not None else None
        self._heartbeat()
        reason = f"{step} step{'s' if step != 1 else ''} done{f', as {early}' if early else ''}"
        if lost is not None:
            reason += f", but the last checkpoint could not be written: {lost}; free some space, and use --resume"
        self._finish(ok=lost is None, reason=reason)

    def _finish(self, *, ok: bool, reason: str) -> None:
        """End the run for all workers. Raises RunStopped unless it ended well."""
        self._parts.metrics.ended(ok=ok)
        sigterms = self._stop.count  # before the launcher can hear of the end, or its answer would be missed
        self._client.send(RunFinished(ok=ok, reason=reason))
        self._heartbeat(at_once=True)  # the last figures, for the buffer's final report
        deadline_s = time.monotonic() + GOODBYE_S
        while time.monotonic() < deadline_s:
            try:
                self._inbox.pump(PUMP_S)
            except RunStopped as stopped:
                if stopped.shutdown.ok:
                    return
                raise
            if ok and self._stop.count > sigterms:
                return  # the launcher has heard of the end, and the buffer is gone for good
        raise LearnerStalled(f"the buffer did not end the run within {GOODBYE_S:.0f} s of RunFinished")

    def _heartbeat(self, *, at_once: bool = False) -> None:
        self._heartbeat_s = time.monotonic()
        gauges = {
            "step": float(self.version.step),
            "steps_total": float(self._steps),
            **self._parts.metrics.gauges(),
            **self.clock.total().gauges(),
            **self.progress.gauges(),
        }
        if self._parts.ema is not None:
            gauges["ema_failures_total"] = float(self._parts.ema.failed_total)
        self._client.set_heartbeat(self.version, gauges, at_once=at_once)


def _batch(done: StepDone) -> Batch:
    assert done.batch.delivered is not None, "a batch of the buffer"
    return done.batch.delivered.batch
