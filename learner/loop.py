"""The learner's loop: one scored batch in, one optimizer step, one weight version out.

    main thread   (here) trains a batch, reports it as trained, publishes the weights and writes metrics. Every few
                  steps it starts an evaluation or copies what a checkpoint needs. It waits for a batch (until the
                  buffer has enough scored tokens), for the evaluations at both ends of the run, and for the buffer's
                  acknowledgement before a checkpoint, so that model, task stream and ledger belong to the same step.
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
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.checkpoints.writer import CheckpointWriter
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.evaluation.desk import EvalDesk
from stillhouse.learner.evaluation.evaluation import EvaluationResult
from stillhouse.learner.evaluation.figures import describe
from stillhouse.learner.feed import PUMP_S, BatchFeed, LearnerStalled, Ready
from stillhouse.learner.group_rewards import GroupRewards, GroupRewardsFailed
from stillhouse.learner.inbox import Delivered, Inbox, RunStopped, StopAsked, StopRequest
from stillhouse.learner.offline import OfflineMixer
from stillhouse.learner.prompts.sample_book import Account, Trained
from stillhouse.learner.prompts.tasks import TaskStream, in_messages
from stillhouse.learner.reports.alarms import LENGTH, PER_ANSWER, describe_alarm
from stillhouse.learner.reports.figures import RolloutFigures, WorkerFigures, staleness
from stillhouse.learner.reports.metrics import MetricsWriter
from stillhouse.learner.reports.progress import weight_figures
from stillhouse.learner.reports.sample import Decode, sample_of
from stillhouse.learner.reports.wait_clock import WaitClock
from stillhouse.learner.step.ema import StudentEma
from stillhouse.learner.step.finite_step import Outcome, finite_step
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.logprobs import lm_head
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
from stillhouse.protocol.shards.client import AnyClient
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


class LearnerLoop:
    """Runs steps `version.step` to `steps`. learner.worker makes and closes everything that it uses."""

    def __init__(
        self,
        *,
        client: AnyClient,
        trainer: Trainer,
        stream: TaskStream,
        publisher: Publisher,
        metrics: MetricsWriter,
        make_eval_desk: Callable[[Callable[[EvaluationResult], None]], EvalDesk],
        checkpoints: CheckpointWriter,
        config: LearnerConfig,
        version: WeightVersion,
        parent: WeightVersion,
        steps: int,
        ema: StudentEma | None = None,
        mixer: OfflineMixer | None = None,
        recorder: BatchRecorder | None = None,
        group_rewards: GroupRewards | None = None,
        stop: StopRequest | None = None,
        fetch_ahead: bool = True,
        max_equal_batches: int = 0,
        decode: Decode | None = None,
        write_account: Callable[[], None] = lambda: None,
    ) -> None:
        """`version` and `parent` are those of LearnerStarted. `mixer` adds the teacher's rollouts to the batches,
        `recorder` writes them to a file, `group_rewards` judges their groups, `stop` ends the loop early. With
        `fetch_ahead` a batch is asked for while the one before it trains; without staleness it could hold nothing.
        `max_equal_batches`: `buffer.dynamic_sampling`. `decode`: for the sample of a step. `write_account` is called
        every ACCOUNT_S with a step."""
        self._client = client
        self._trainer = trainer
        self._last_batch_id: int | None = None
        self._skipped_in_a_row = 0
        self._alarms_seen = 0
        self._stream = stream
        self._publisher = publisher
        self._metrics = metrics
        self._ema = ema
        self._checkpoints = checkpoints
        self._config = config
        self.version = version
        self._parent = parent
        self._steps = steps
        self._mixer = mixer
        self._recorder = recorder
        self._group_rewards = group_rewards
        self._stop = stop or StopRequest()
        self._max_equal_batches = max_equal_batches
        self._decode = decode
        self._write_account = write_account
        self._account_s = 0.0
        self.clock = WaitClock()
        self._heartbeat_s = 0.0
        self._rollout_figures = RolloutFigures()
        self._worker_figures = WorkerFigures()
        self._desk = make_eval_desk(self._on_evaluation)
        self._inbox = Inbox(client, on_membership=publisher.membership, on_eval=self._desk.add)
        self.progress = checkpoints.progress
        self._fetch_ahead = fetch_ahead
        self._feed = BatchFeed(
            client,
            self._inbox,
            pack=trainer.pack_ahead,
            clock=self.clock,
            stop=self._stop,
            publishing=lambda: publisher.busy,
            meanwhile=self._meanwhile,
            stall_timeout_s=config.stall_timeout_s,
        )

    @property
    def average_error(self) -> str:
        """Why the newest average that its teachers did not get is not there; empty: all are."""
        return self._ema.error if self._ema is not None else ""

    @property
    def versions_published(self) -> int:
        """Broadcasts that reached every member of the weight group, including those to an empty group."""
        return self._publisher.stats.broadcasts_total

    def run(self) -> None:
        """Run all steps, evaluations and checkpoints. Raises RunStopped when the buffer ends the run, also after a last
        checkpoint that could not be written; LearnerStalled when no batch arrives; StopAsked after SIGTERM, once the
        trained steps are in a checkpoint; and whatever a step raises."""
        try:
            self._run()
        except StopAsked:
            self._save_before_leaving()
            raise
        finally:
            self._feed.close()

    def _run(self) -> None:
        events.mark("ready")
        self._alarms_seen = self.progress.alarms.raised_total
        self._client.send(LearnerStarted(self.version, self._parent, self._stream.next_task_id, self._stream.progress))
        self._client.send(SnapshotWanted())  # where the figures of the whole run begin (`Limits`)
        self._publisher.publish(self.version, self._trainer.named_weights())
        if self._ema is not None:
            self._ema.publish(self.version)  # before any task: no other teacher scores a rollout
        self._inbox.tasks_wanted = 1  # the first acknowledgement asks for more
        self._offer_tasks()
        if self._config.eval_every and self.version.step == 0:
            self._evaluate_and_wait()
        while self.version.step < self._steps:
            self._one_step()
        self._close_run()

    def _one_step(self) -> None:
        delivered, items = self._next_batch()
        mixed = self._mixer.take(sum(item.n_trained for item in items)) if self._mixer is not None else []
        began_ns = events.now_ns()
        outcome = finite_step(self._trainer, items, [item for _, item in mixed])
        self._trace_step(began_ns, delivered.batch, items, outcome)
        self.version = WeightVersion(self.version.epoch, self.version.step + 1)
        self._client.send(BatchTrained(delivered.batch.batch_id, self.version, outcome.masked))
        self._stop_if_diverged(outcome)
        step = self.version.step
        if step % self._config.publish_every == 0 or step == self._steps:
            with self.clock.waiting("weights"):
                self._publisher.publish(self.version, self._trainer.named_weights())
        if self._ema is not None:
            with self.clock.waiting("weights"):
                self._ema.step(self.version, self._trainer.weights())
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
        self._stop_if_alarmed()
        every = self._config.checkpoint_every
        if self._checkpoints.should_save(due=every > 0 and step % every == 0) and step < self._steps:
            self._checkpoint(delivered.batch.batch_id)
        if step < self._steps and (due := self._config.evaluated_at(step)):
            self._desk.start(self.version, due)
        self._last_batch_id = delivered.batch.batch_id

    def _trace_step(self, began_ns: int, batch: Batch, items: Sequence[TrainItem], outcome: Outcome) -> None:
        if not events.tracing():
            return
        trained = [one for one in items if one.n_trained and one.item.rollout_id not in outcome.masked]
        places = [(one.item.rollout_id, int(one.train_mask_L.argmax()), one.item.end) for one in trained]
        tokens = sum(one.n_trained for one in trained)
        events.done("learner", "train", began_ns, step=batch.version.step + 1, items=places, tokens=tokens)
        mean, largest = staleness(batch.staleness)
        events.counter("staleness", mean=mean, max=largest)

    def _next_batch(self) -> Ready:
        """The batch of this version, judged. Asks for the one after it."""
        ready = self._feed.next(self.version)
        if not ready.items:
            self._stream.step((), ready.delivered.batch.settled)
            raise LearnerStalled(f"nothing is left to train at step {self.version.step}")
        if self._fetch_ahead and self.version.step + 1 < self._steps:
            self._feed.ask_ahead(WeightVersion(self.version.epoch, self.version.step + 1))
        return self._judged(ready)

    def _judged(self, ready: Ready) -> Ready:
        """With the rewards of `learner.tasks.group_reward`. A function that judges nothing ends the run for all
        workers: a restarted learner would call it again."""
        if self._group_rewards is None:
            return ready
        delivered = ready.delivered
        try:
            with self.clock.waiting("data"):
                batch = self._group_rewards.apply(delivered.batch, delivered.arrays)
        except GroupRewardsFailed as error:
            self._finish(ok=False, reason=str(error))
            raise
        items = [replace(one, item=item) for one, item in zip(ready.items, batch.items, strict=True)]
        return Ready(replace(delivered, batch=batch), items)

    def _account(self, batch: Batch, items: Sequence[TrainItem], outcome: Outcome) -> Account:
        """The samples and tasks that this step settles."""
        samples = [(one.item.task_id, one.item.sample_index, one.item.rollout_id, one.n_trained) for one in items]
        trained = [Trained(*sample) for sample in samples if sample[2] not in outcome.masked]
        left_out = {sample[:2] for sample in samples if sample[2] in outcome.masked}
        return self._stream.step(trained, batch.settled, left_out)

    def _stop_if_diverged(self, outcome: Outcome) -> None:
        """End the run for all workers after too many skipped steps: a restarted learner would skip them again."""
        if outcome.figures is not None:
            self._skipped_in_a_row = 0
            return
        self.progress.steps_skipped += 1
        self._skipped_in_a_row += 1
        log.error("step %d is skipped: no rollout of its batch gives finite numbers", self.version.step)
        if self._skipped_in_a_row < MAX_SKIPPED_STEPS:
            return
        self._finish(
            ok=False,
            reason=f"{self._skipped_in_a_row} steps in a row gave no finite number, the last was {self.version.step}: "
            "the weights have diverged, or a teacher is broken; resume from an earlier checkpoint with a lower "
            "learner.lr, and see learner-0.log",
        )

    def _stop_if_alarmed(self) -> None:
        """End the run for all workers, with a checkpoint, if a new alarm is to end it. Those of before a resume do
        not: the user has seen them."""
        alarms = self.progress.alarms
        if not self._config.stop_on_alarm or alarms.raised_total == self._alarms_seen:
            return
        self._save_before_leaving()
        self.progress.stopped_by_alarm = True
        self._finish(ok=False, reason=f"{describe_alarm(alarms.raised[-1])} (learner.stop_on_alarm)")

    def _stop_if_all_groups_are_equal(self) -> None:
        """End the run for all workers when dynamic sampling has reached its limit, with a checkpoint."""
        snapshot, limit = self._inbox.snapshot, self._max_equal_batches
        n = snapshot.queues.get("batches_equal_in_a_row", 0) if snapshot is not None else 0
        if not limit or n < limit:
            return
        self._save_before_leaving()
        self._finish(
            ok=False,
            reason=f"dynamic sampling dropped {n} batches of rollouts in a row at step {self.version.step}, because "
            f"all rewards of a group were equal; expected fewer than buffer.dynamic_sampling = {limit}. The prompts "
            "are too hard or too easy for the student, or no rollout gets a reward; try others, or a larger group_size",
        )

    def _meanwhile(self) -> None:
        """What goes on while the loop waits for a batch."""
        self._stop_if_all_groups_are_equal()
        self._desk.ask()
        self._offer_tasks()
        if time.monotonic() - self._heartbeat_s > HEARTBEAT_S:
            self._heartbeat()  # a wait may be long, and says what limits the run

    def _offer_tasks(self) -> None:
        """Send the buffer as many tasks as it asked for."""
        wanted, self._inbox.tasks_wanted = self._inbox.tasks_wanted, 0
        for message, frames in in_messages(self._stream.next(wanted)):
            self._client.send(message, frames)

    def _evaluate_and_wait(self) -> None:
        """Evaluate the current version on all sets and wait for the results, also those of earlier evaluations."""
        self._desk.start(self.version, self._config.eval_names)
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
        self._metrics.evaluation(result)
        if result.accuracy_sampled is not None and not result.name:
            self.progress.alarms.add_accuracy(result.step, result.accuracy_sampled, result.n_sampled or 0)
        self.progress.evaluations.append(msgspec.structs.replace(result, samples=()))  # samples.jsonl has them
        name = f" on {result.name}" if result.name else ""
        log.info("evaluation at step %d%s: %s", result.step, name, describe(result))
        for group, figures in (*result.tags.items(), *result.environments.items()):
            log.info("evaluation at step %d%s, %s: %s", result.step, name, group, describe(figures))

    def _checkpoint(self, batch_id: int, *, last: bool = False) -> OSError | None:
        """Copy model, optimizer, task stream and ledger of the same step for a checkpoint, which is written in the
        background. If that fails, training goes on: the next one may find room. The last one is waited for; returns
        why it could not be written."""
        with self.clock.waiting("checkpoint"):
            snapshot = self._snapshot_after(batch_id)
            if self._recorder is not None:
                self._recorder.sync()
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
            self._wait_for_average()
        except (LearnerStalled, LinkError) as error:
            log.error("no checkpoint of step %d: %s", self.version.step, error)

    def _wait_for_average(self) -> None:
        """Until the one that is on its way to the teachers is there, or has failed."""
        if self._ema is not None:
            with self.clock.waiting("weights"):
                self._ema.wait()

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
        """The last evaluation and checkpoint, then the end of the run."""
        with self.clock.waiting("weights"):
            self._publisher.wait_idle(self._config.stall_timeout_s)
        if self._config.eval_every:
            if self._last_batch_id is not None:
                self.progress.limits.end(self._snapshot_after(self._last_batch_id))
            self._evaluate_and_wait()
        lost = self._checkpoint(self._last_batch_id, last=True) if self._last_batch_id is not None else None
        self._wait_for_average()
        self._heartbeat()
        reason = f"{self.version.step} step{'s' if self.version.step != 1 else ''} done"
        if lost is not None:
            reason += (
                f", but the last checkpoint could not be written: {lost}; free some space, or mend the store, and use "
                "--resume"
            )
        self._finish(ok=lost is None, reason=reason)

    def _finish(self, *, ok: bool, reason: str) -> None:
        """End the run for all workers. Raises RunStopped unless it ended well."""
        self._metrics.ended(ok=ok)
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

    def _report(self, delivered: Delivered, outcome: Outcome, account: Account) -> None:
        """Write the metrics of the step, and update the heartbeat. A skipped step trained 0 tokens."""
        batch, figures, step = delivered.batch, outcome.figures, self.version.step
        if figures is not None:
            self.progress.add(figures, vocab_rows=lm_head(self._trainer.model).weight_VH.shape[0])
        train = {"tokens": 0, "items": len(batch.items)} if figures is None else figures.as_dict()
        rollouts = self._rollout_figures.update(batch.items, delivered.arrays)
        if LENGTH in rollouts and figures is not None and figures.reverse_kl is not None:
            rollouts[PER_ANSWER] = figures.reverse_kl * rollouts[LENGTH]
        waits, limits = self.clock.take(), self.progress.limits
        self.progress.waits = self.progress.waits.plus(waits)
        if (first := self._inbox.snapshot) is not None and first.time_s < batch.snapshot.time_s:
            limits.update(first)
        alarms = self.progress.alarms
        alarms.add(step, rollouts | {f"train/{name}": value for name, value in train.items()})
        self._metrics.step(
            step,
            {**train, "items_nonfinite": len(outcome.masked)},
            staleness=batch.staleness,
            waits=waits,
            snapshot=batch.snapshot,
            weights=weight_figures(self._publisher.stats) | (self._ema.figures if self._ema is not None else {}),
            tasks_dropped=self._stream.dropped,
            tasks_done=account.tasks_done,
            others={
                **(self._mixer.figures if self._mixer is not None else {}),
                **(self._recorder.figures if self._recorder is not None else {}),
                **(self._group_rewards.figures if self._group_rewards is not None else {}),
                **rollouts,
                **(figures.of_pools() if figures is not None else {}),
                **alarms.figures(),
                **self._worker_figures.update(batch.snapshot),
                **limits.update(batch.snapshot),
            },
        )
        if self._decode is not None and (sample := sample_of(step, batch.items, delivered.arrays, self._decode)):
            self.progress.sample = sample
        self._heartbeat()
        if time.monotonic() - self._account_s > ACCOUNT_S:
            self._account_s = time.monotonic()
            self._write_account()

    def _heartbeat(self, *, at_once: bool = False) -> None:
        self._heartbeat_s = time.monotonic()
        gauges = {
            "step": float(self.version.step),
            "steps_total": float(self._steps),
            **self._metrics.gauges(),
            **self.clock.total().gauges(),
            **self.progress.gauges(),
        }
        if self._ema is not None:
            gauges["ema_failures_total"] = float(self._ema.failed_total)
        self._client.set_heartbeat(self.version, gauges, at_once=at_once)
