"""What the buffer holds, made to fit the checkpoint that another learner goes on from.

The checkpoint decides which samples are settled, and how many tokens of the others are trained. What became of a
sample later belongs to the branch of versions that is left. So each sample that has a slot here
 - stays settled, if the checkpoint says so;
 - goes on, if exactly the tokens that the checkpoint knows as trained are, and what is open can still be trained;
 - ends where it is, if some of its tokens are trained by the checkpoint and it cannot go on: the rest is dropped;
 - is run again from its beginning otherwise, under another rollout id.

Groups that are trained in one batch are run again as a whole: half a group would hold places that its other half waits
for.
"""

from __future__ import annotations

from collections.abc import Callable

from buffer.arrivals import Arrivals
from buffer.ledger import LEARNER_RESTART
from buffer.lifecycle import Lifecycle
from buffer.rollouts import Rollout, Slot
from buffer.task_book import TaskBook
from protocol.messages import LearnerStarted, OpenTask, WeightVersion


def go_back(
    message: LearnerStarted,
    *,
    tasks: TaskBook,
    life: Lifecycle,
    arrivals: Arrivals,
    trainable: Callable[[WeightVersion], bool],
    engines: WeightVersion,
    whole_groups: bool,
) -> None:
    """`trainable`: could a token of this version be trained in the learner's next step? `engines`: what the actors may
    be sampling with. No batch is leased."""
    known = {task.task_id: task for task in message.open}
    tasks.go_back(message.version.epoch, message.next_task_id, message.open)
    for record in tasks.train_records:
        task_id, group = record.task.task_id, record.task.group_size
        done = OpenTask(task_id, tuple(range(group))) if task_id < message.next_task_id else OpenTask(task_id)
        told = known.get(task_id, done)
        trained = {sample.sample_index: sample for sample in told.partial}
        for slot in list(record.slots):
            partial = trained.get(slot.sample_index)
            if slot.sample_index in told.settled:
                _end(slot, tasks, life, arrivals)
            elif partial is not None:
                if slot.settled or not _stands(slot, partial.rollout_id, partial.n_trained):
                    _end(slot, tasks, life, arrivals)
                    record.slots.remove(slot)  # `tasks.fit` reports it
            elif slot.settled or (slot.rollout is not None and not _may_go_on(slot.rollout, trainable, engines)):
                _end(slot, tasks, life, arrivals)
                record.slots.remove(slot)  # `tasks.fit` has it issued again
        if whole_groups and len({*told.settled, *(slot.sample_index for slot in record.slots)}) < group:
            for slot in list(record.slots):
                _end(slot, tasks, life, arrivals)
                record.slots.remove(slot)
        tasks.fit(record, told)


def _stands(slot: Slot, rollout_id: str, n_trained: int) -> bool:
    """Is the sample as the checkpoint knows it?"""
    rollout = slot.rollout
    return rollout is not None and (rollout.rollout_id, rollout.n_trained_tokens) == (rollout_id, n_trained)


def _may_go_on(rollout: Rollout, trainable: Callable[[WeightVersion], bool], engines: WeightVersion) -> bool:
    """Is nothing of it trained, and could all of it be?"""
    if rollout.n_trained_tokens or not (rollout.closed or trainable(engines)):
        return False
    return all(trainable(span.version) for segment in rollout.segments for span in segment.spans)


def _end(slot: Slot, tasks: TaskBook, life: Lifecycle, arrivals: Arrivals) -> None:
    """What is open of the slot is dropped, and its place in the pacing is free."""
    if slot.settled:
        return
    if slot.rollout is not None:
        arrivals.end_attempt(slot.rollout, LEARNER_RESTART, tell_actor=not slot.rollout.closed)
    else:
        tasks.forget_attempt(slot)
    life.slot_freed(slot)
