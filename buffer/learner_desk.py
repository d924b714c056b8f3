"""Handles the learner's messages: where it starts, tasks, batch requests, trained batches, versions and evaluations.

The learner is the run's only clock. Its first message, LearnerStarted, names the weights that it starts from: the
version table forks there, and the buffer's state is brought in line with that checkpoint (`buffer.go_back`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stillhouse.buffer.arrivals import Arrivals
from stillhouse.buffer.blobs import number_of
from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.evals import EvalDesk
from stillhouse.buffer.go_back import go_back
from stillhouse.buffer.groups import GroupFilter
from stillhouse.buffer.items import LeasedBatch
from stillhouse.buffer.ledger import RejectReason
from stillhouse.buffer.lifecycle import Lifecycle
from stillhouse.buffer.peers import Outbox, Peer
from stillhouse.buffer.release import BatchDesk
from stillhouse.buffer.tickets import TicketDesk
from stillhouse.buffer.tokens import Array
from stillhouse.buffer.validation import task_fault
from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import TaskKind, WeightVersion


class LearnerDesk:
    """Serves the learner, of which there is one at a time."""

    def __init__(
        self,
        config: BufferConfig,
        life: Lifecycle,
        tickets: TicketDesk,
        batches: BatchDesk,
        evals: EvalDesk,
        groups: GroupFilter,
        arrivals: Arrivals,
        out: Outbox,
        vocab_size: int | None,
        snapshot: Callable[[float], m.Snapshot],
    ) -> None:
        self.staleness_hist: dict[int, int] = {}
        """Trained tokens by staleness."""
        self._config = config
        self._life = life
        self._book = life.book
        self._versions = life.versions
        self._pacing = life.pacing
        self._tasks = life.tasks
        self._tickets = tickets
        self._batches = batches
        self._evals = evals
        self._groups = groups
        self._arrivals = arrivals
        self._out = out
        self._vocab_size = vocab_size
        self._snapshot = snapshot
        self._started = ""
        """Incarnation of the learner that sent the last LearnerStarted."""
        self._reported_wanted = 0
        """`tasks_wanted` as last sent to the learner."""
        self._on_the_way: set[int] = set()
        """Leased batches sent since the learner last joined. The link delivers these, however slow it is."""

    # ---------------------------------------------------------------------------------------------- connection

    def joined(self, peer: Peer, *, is_new: bool) -> None:
        """The learner said Hello. If it is a new process, the batches that its predecessor held wait again. The same
        process, back after it was lost, may not have received what was on its way."""
        self._out.learner = peer.name
        self._on_the_way.clear()
        if is_new:
            self._batches.give_back_all()
            for rollout in [r for r in self._life.rollouts.values() if r.kind == "eval"]:
                self._arrivals.abandon(rollout, "learner_lost")
            self._tasks.abandon_evaluations()
            self._evals.clear()
            self._tasks.new_learner()
        self._acknowledge_tasks((), "train")

    def lost(self, peer: Peer, *, for_good: bool) -> None:
        """The learner fell silent, or said Goodbye (`for_good`). Only after a Goodbye no BatchTrained can follow."""
        if self._out.learner != peer.name:
            return
        self._out.learner = None
        self._evals.learner_away()
        self._batches.forget_request()
        if for_good:
            self._batches.give_back_all()

    def started(self, now_s: float, peer: Peer, message: m.LearnerStarted, arrays: Sequence[Array]) -> None:
        """Start from the weights that a new learner process names. A repeated message changes nothing."""
        before, version = self._versions.newest, message.version
        if peer.incarnation == self._started:
            return
        self._started = peer.incarnation
        if version == before:
            return  # the beginning of the run
        if version.epoch <= before.epoch:
            self._refuse(peer, "a learner has begun this epoch", f"version {version}", f"an epoch above {before.epoch}")
            return
        try:
            self._versions.fork(version, message.parent)
        except ValueError as error:
            self._refuse(peer, "no checkpoint of this run", f"version {version} from {message.parent}", str(error))
            return
        self._pacing.restart(version)
        self._batches.give_back_all()
        self._versions.published = version
        go_back(message, self._life, self._arrivals, self._config, engines=before)
        self._batches.start_anew()
        self._acknowledge_tasks((), "train")

    # --------------------------------------------------------------------------------------------------- tasks

    def tasks_offered(self, now_s: float, peer: Peer, message: m.TasksOffered, arrays: Sequence[Array]) -> None:
        if len(arrays) != len(message.tasks):
            self._refuse(peer, "a prompt is missing", f"{len(arrays)} frames", f"{len(message.tasks)} frames")
            return
        for task, prompts_T in zip(message.tasks, arrays, strict=True):
            fault = task_fault(task, prompts_T, self._vocab_size) or self._group_fault(task)
            if fault is not None:
                self._refuse(peer, f"{task.kind} task {task.task_id} cannot be run", *fault)
                return
        for i, (task, prompts_T) in enumerate(zip(message.tasks, arrays, strict=True)):
            record = self._tasks.offer(task, prompts_T, self._versions.published, number_of(arrays, i))
            if record is not None and task.kind == "eval":
                self._evals.task_added(task.eval_id, task.group_size)
        if message.last:
            self._tasks.stream_ended = True
        kinds: list[TaskKind] = list(dict.fromkeys(task.kind for task in message.tasks)) or ["train"]
        for kind in kinds:
            self._acknowledge_tasks(tuple(t.task_id for t in message.tasks if t.kind == kind), kind)

    def ask_for_tasks(self) -> None:
        """Ask for tasks when the queue runs low and the learner does not know it yet."""
        if self._tasks.runs_low and self._tasks.tasks_wanted != self._reported_wanted:
            self._acknowledge_tasks((), "train")

    def _acknowledge_tasks(self, task_ids: tuple[int, ...], kind: TaskKind) -> None:
        self._reported_wanted = self._tasks.tasks_wanted
        self._out.send("learner", self._out.learner, m.TasksAck(task_ids, kind, self._reported_wanted))

    def _group_fault(self, task: m.Task) -> tuple[str, str] | None:
        limit = self._pacing.limit
        if self._config.release == "rollout" and task.kind == "train" and task.group_size > limit:
            return (
                f"group_size {task.group_size}",
                f"at most (max_staleness + 1) * batch_rollouts = {limit}, or a whole group could never be out",
            )
        return None

    # ------------------------------------------------------------------------------------------------- batches

    def batch_wanted(self, now_s: float, peer: Peer, message: m.BatchWanted, arrays: Sequence[Array]) -> None:
        version = message.version
        if not self._same_branch(peer, version):
            return
        leased = self._batches.leased_for(version)
        if leased is not None:
            self._batches.awaited(leased)
            if leased.batch_id not in self._on_the_way:
                self._send_batch(now_s, leased)
            return
        if version < self._pacing.trained_version:
            return  # a late repeat: its batch is trained
        if not self._batches.leased:  # otherwise it asks ahead: the version is made from a batch that it holds
            self._versions.reach(version)
            self._pacing.trained(version)
        self._batches.want(now_s, version)
        if self._tasks.runs_low:
            self._acknowledge_tasks((), "train")

    def form_batch(self, now_s: float) -> None:
        """Send a batch if the learner waits for one and it can be filled, or if nothing more can arrive to fill it."""
        version = self._batches.wanted
        if version is None or self._out.learner is None:
            return
        batch = self._batches.form(now_s, self._nothing_follows)
        if batch is not None:
            self._groups.batch_left()
            self._send_batch(now_s, batch)
        elif self._pacing.live == 0 and self._tasks.stream_ended and self._nothing_follows():
            self._batches.forget_request()
            settled = tuple(self._tasks.to_report())
            self._tasks.reported(settled)
            self._out.send("learner", self._out.learner, m.Batch(0, version, (), {}, settled, self._snapshot(now_s)))

    def _nothing_follows(self) -> bool:
        """True when everything that was out is back and scored, and no ticket can be issued before a batch is
        trained."""
        return self._life.unready == 0 and not self._batches.leased and not self._tickets.may_grow()

    def batch_trained(self, now_s: float, peer: Peer, message: m.BatchTrained, arrays: Sequence[Array]) -> None:
        batch = self._batches.leased.get(message.batch_id)
        if batch is not None:
            expected = WeightVersion(batch.version.epoch, batch.version.step + 1)
            if message.version != expected:
                self._book.reject(RejectReason.WRONG_VERSION)
                self._refuse(peer, f"batch {batch.batch_id} was for another step", f"{message.version}", f"{expected}")
                return
            unknown = set(message.masked) - {item.rollout_id for item in batch.items}
            if unknown:
                self._book.reject(RejectReason.NOT_IN_BATCH)
                self._refuse(peer, f"left out of batch {batch.batch_id}", f"{sorted(unknown)}", "rollouts of the batch")
                return
            self._versions.reach(message.version)
            self._pacing.trained(message.version)
            trained = self._batches.settle(now_s, batch, message.version, message.masked)
            self._on_the_way.discard(batch.batch_id)
            for distance, n in trained.items():
                self.staleness_hist[distance] = self.staleness_hist.get(distance, 0) + n
            peer.done_total += 1
            peer.tokens_total += sum(trained.values())
        elif message.batch_id not in self._batches.trained:
            self._book.reject(RejectReason.UNKNOWN_BATCH)
        self._out.send(peer.role, peer.name, m.BatchTrainedAck(message.batch_id, message.version))

    def _send_batch(self, now_s: float, batch: LeasedBatch) -> None:
        self._on_the_way.add(batch.batch_id)
        message = m.Batch(
            batch_id=batch.batch_id,
            version=batch.version,
            items=batch.items,
            staleness=dict(batch.staleness),
            settled=batch.settled,
            snapshot=self._snapshot(now_s),
        )
        self._out.send("learner", self._out.learner, message, batch.arrays)

    # ---------------------------------------------------------------------------------- versions and evaluation

    def version_published(self, now_s: float, peer: Peer, message: m.VersionPublished, arrays: Sequence[Array]) -> None:
        if not self._same_branch(peer, message.version):
            return
        self._versions.reach(message.version)
        self._versions.published = max(self._versions.published, message.version)

    def _same_branch(self, peer: Peer, version: WeightVersion) -> bool:
        """Return True if the version is on the surviving branch. Otherwise the sender is sent a Refused."""
        epoch = self._versions.newest.epoch
        if version.epoch != epoch:
            self._refuse(peer, "this is not the epoch of the run", f"version {version}", f"epoch {epoch}")
        return version.epoch == epoch

    def _refuse(self, peer: Peer, text: str, got: str, expected: str) -> None:
        self._out.send(peer.role, peer.name, m.Refused("malformed", text, got, expected))
