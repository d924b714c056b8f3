"""Brings the buffer's state in line with the checkpoint from which a restarted learner resumes.

The checkpoint decides which samples are settled, and how many tokens of the others are trained. Whatever happened to a
sample later belongs to the abandoned branch of versions. So each sample that has a slot
 - stays settled, if the checkpoint says so;
 - continues, if exactly the tokens that the checkpoint counts as trained are trained, and its open tokens can be
   trained in time after the older samples that continue as well;
 - ends where it is, if some of its tokens are trained in the checkpoint but it cannot continue: the rest is dropped;
 - otherwise starts again from its beginning, under a new rollout id.

A group that must be trained in one batch starts again as a whole: half a group would hold places in the pacing that its
other half waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stillhouse.buffer.arrivals import Arrivals
from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.ledger import LEARNER_RESTART
from stillhouse.buffer.lifecycle import Lifecycle
from stillhouse.buffer.rollouts import Slot, TaskRecord
from stillhouse.buffer.versions import VersionTable
from stillhouse.protocol.messages import LearnerStarted, OpenTask, WeightVersion


def go_back(
    message: LearnerStarted, life: Lifecycle, arrivals: Arrivals, config: BufferConfig, *, engines: WeightVersion
) -> None:
    """Call it after the fork was entered into `life.versions`, while no batch is leased. `engines`: the version that
    the actors may be sampling with."""
    tasks = life.tasks
    in_checkpoint = {task.task_id: task for task in message.open}
    tasks.go_back(message.version.epoch, message.next_task_id, message.open)
    records = tasks.train_records
    known = {record.task.task_id: _known(record, in_checkpoint, message.next_task_id) for record in records}

    n_kept = 0
    for slot in sorted(slot for record in records for slot in record.slots):
        steps_until = n_kept // config.batch_rollouts
        in_time = _InTime(life.versions, message.version, config.max_staleness - steps_until)
        if _stays(slot, known[slot.task.task.task_id], in_time, engines):
            n_kept += not slot.settled
        else:
            _end(slot, life, arrivals)
    for record in records:
        task = known[record.task.task_id]
        slots = {*task.settled, *(slot.sample_index for slot in record.slots)}
        if config.release == "rollout" and len(slots) < record.task.group_size:
            for slot in list(record.slots):
                _end(slot, life, arrivals)
        tasks.fit(record, task)


def _known(record: TaskRecord, in_checkpoint: Mapping[int, OpenTask], next_task_id: int) -> OpenTask:
    """State of a task according to the checkpoint, which lists open tasks only."""
    task_id = record.task.task_id
    if task_id not in in_checkpoint and task_id < next_task_id:
        return OpenTask(task_id, tuple(range(record.task.group_size)))
    return in_checkpoint.get(task_id, OpenTask(task_id))


class _InTime(NamedTuple):
    """Tells whether a token can be trained before it is stale: its version is at most `room` steps away from `now`."""

    versions: VersionTable
    now: WeightVersion
    room: int

    def __call__(self, sampled: WeightVersion) -> bool:
        return self.versions.distance(sampled, self.now) <= self.room


def _stays(slot: Slot, known: OpenTask, in_time: _InTime, engines: WeightVersion) -> bool:
    """Return True if the slot may stay as it is. Otherwise it is removed, and `TaskBook.fit` handles the sample."""
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


def _end(slot: Slot, life: Lifecycle, arrivals: Arrivals) -> None:
    """Drop whatever is open of the slot, free its place in the pacing, and remove it from its record."""
    slot.task.slots.remove(slot)
    if slot.settled:
        return
    if slot.rollout is not None:
        arrivals.end_attempt(slot.rollout, LEARNER_RESTART, tell_actor=not slot.rollout.closed)
    else:
        life.tasks.forget_attempt(slot)
    life.slot_freed(slot)
