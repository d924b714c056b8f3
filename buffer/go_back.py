"""What the buffer holds, made to fit the checkpoint that another learner goes on from.

The checkpoint decides which samples are settled, and how many tokens of the others are trained. What became of a
sample later belongs to the branch of versions that is left. So each sample that has a slot here
 - stays settled, if the checkpoint says so;
 - goes on, if exactly the tokens that the checkpoint knows as trained are, and what is open can be trained in time,
   behind the older ones that go on as well;
 - ends where it is, if some of its tokens are trained by the checkpoint and it cannot go on: the rest is dropped;
 - is run again from its beginning otherwise, under another rollout id.

Groups that are trained in one batch are run again as a whole: half a group would hold places that its other half waits
for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from buffer.arrivals import Arrivals
from buffer.config import BufferConfig
from buffer.ledger import LEARNER_RESTART
from buffer.lifecycle import Lifecycle
from buffer.rollouts import Slot, TaskRecord
from buffer.task_book import TaskBook
from buffer.versions import VersionTable
from protocol.messages import LearnerStarted, OpenTask, WeightVersion


def go_back(
    message: LearnerStarted,
    *,
    tasks: TaskBook,
    life: Lifecycle,
    arrivals: Arrivals,
    versions: VersionTable,
    engines: WeightVersion,
    config: BufferConfig,
) -> None:
    """`versions` has the fork already. `engines`: what the actors may be sampling with. No batch is leased."""
    told = {task.task_id: task for task in message.open}
    tasks.go_back(message.version.epoch, message.next_task_id, message.open)
    records = tasks.train_records
    known = {record.task.task_id: _known(record, told, message.next_task_id) for record in records}

    n_kept = 0
    for slot in sorted(slot for record in records for slot in record.slots):
        steps_until = n_kept // config.batch_rollouts
        in_time = _InTime(versions, message.version, config.max_staleness - steps_until)
        if _stays(slot, known[slot.task.task.task_id], in_time, engines):
            n_kept += not slot.settled
        else:
            _end(slot, tasks, life, arrivals)
    for record in records:
        told_of = known[record.task.task_id]
        slots = {*told_of.settled, *(slot.sample_index for slot in record.slots)}
        if config.release == "rollout" and len(slots) < record.task.group_size:
            for slot in list(record.slots):
                _end(slot, tasks, life, arrivals)
        tasks.fit(record, told_of)


def _known(record: TaskRecord, told: Mapping[int, OpenTask], next_task_id: int) -> OpenTask:
    """What the checkpoint knows of a task."""
    task_id = record.task.task_id
    if task_id not in told and task_id < next_task_id:
        return OpenTask(task_id, tuple(range(record.task.group_size)))
    return told.get(task_id, OpenTask(task_id))


class _InTime(NamedTuple):
    """Can a token be trained before it is stale? `room`: steps between its version and `now` that leave time for it."""

    versions: VersionTable
    now: WeightVersion
    room: int

    def __call__(self, sampled: WeightVersion) -> bool:
        return self.versions.distance(sampled, self.now) <= self.room


def _stays(slot: Slot, known: OpenTask, in_time: _InTime, engines: WeightVersion) -> bool:
    """False: the slot is no longer one of its record, and `TaskBook.fit` sees to the sample."""
    if slot.sample_index in known.settled:
        return slot.settled
    if slot.settled:
        return False
    rollout = slot.rollout
    for partial in known.partial:
        if partial.sample_index == slot.sample_index:
            now = (rollout.rollout_id, rollout.n_trained_tokens) if rollout is not None else None
            return now == (partial.rollout_id, partial.n_trained)
    if rollout is None:
        return True
    if rollout.n_trained_tokens or not (rollout.closed or in_time(engines)):
        return False
    return all(in_time(span.version) for segment in rollout.segments for span in segment.spans)


def _end(slot: Slot, tasks: TaskBook, life: Lifecycle, arrivals: Arrivals) -> None:
    """What is open of the slot is dropped, its place in the pacing is free, and its record forgets it."""
    slot.task.slots.remove(slot)
    if slot.settled:
        return
    if slot.rollout is not None:
        arrivals.end_attempt(slot.rollout, LEARNER_RESTART, tell_actor=not slot.rollout.closed)
    else:
        tasks.forget_attempt(slot)
    life.slot_freed(slot)
