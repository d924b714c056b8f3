"""Rollouts that the teacher writes after a text that the student will not read (`learner.tasks.privileged`), recorded
after the prompt that the student will read.

    sampled and scored    <|user|>Answer in five words. What is glass?<|assistant|>    Glass is ...
    recorded              <|user|>What is glass?<|assistant|>                          Glass is ...

In a run of `stillhouse write` the student is the teacher's checkpoint. Its tasks get the teachers' prompt in
place of their own here, and the recording gets the student's back. The log-probs stay those of the teacher after its
own prompt, as in a run where it only scores. Whoever trains on the recording computes the student's anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec
import numpy as np

from stillhouse.engines.base import Int32s
from stillhouse.learner.prompts.rendering import NONE
from stillhouse.learner.prompts.sample_book import Account, TrainedSample
from stillhouse.learner.prompts.tasks import TaskOffer, TaskStream
from stillhouse.protocol.messages import BatchItem, Settled
from stillhouse.recording.format import Array, RecordedRollout


class WrittenStream(TaskStream):
    """Tasks whose student reads the teachers' prompt. Its state is that of a TaskStream."""

    _latest: Mapping[int, TaskOffer | None] = MappingProxyType({})
    """The tasks of the latest step; replaced as a whole by each."""

    def next(self, n: int) -> list[TaskOffer]:
        """As `TaskStream.next`."""
        return [_for_the_writer(offer) for offer in super().next(n)]

    def step(
        self, trained: Iterable[TrainedSample], settled: Sequence[Settled], left_out: Collection[tuple[int, int]] = ()
    ) -> Account:
        """As `TaskStream.step`. The prompts of the step's rollouts are kept for `as_read`, until the next one."""
        trained = list(trained)
        ids = {one.task_id for one in trained} | {task_id for task_id, _ in left_out}
        self._latest = {task_id: self.offer(task_id) for task_id in ids}
        return super().step(trained, settled, left_out)

    def as_read(self, rollout: RecordedRollout) -> RecordedRollout | None:
        """A rollout of the latest step, after the prompt that the student will read. None: it is unknown, or not known
        from where on the rollout is the teacher's answer."""
        offer = self._latest.get(rollout.item.task_id)
        if offer is None or not len(offer.teacher_prompt_ids):
            return None if offer is None else rollout  # a tag without a text for teachers: both read the same
        return with_prompt(rollout, offer.teacher_prompt_ids, offer.prompt_ids)


def _for_the_writer(offer: TaskOffer) -> TaskOffer:
    if not len(offer.teacher_prompt_ids):
        return offer
    return TaskOffer(msgspec.structs.replace(offer.task, teacher_prompt_tokens=0), offer.teacher_prompt_ids, NONE)


def with_prompt(rollout: RecordedRollout, old: Int32s, new: Int32s) -> RecordedRollout | None:
    """The rollout with the prompt `new` in place of `old`; tokens after the prompt keep their numbers.

    None where that is impossible: it begins otherwise, trains a token of the prompt, or has a branch that goes on from
    inside the prompt or from nothing, as agents with prompts of their own have."""
    item, n_old = rollout.item, len(old)
    ids, behaviour, mask, teacher, *payloads = rollout.arrays
    own_prompt = any(branch.follows < n_old for branch in item.branches)
    if own_prompt or not np.array_equal(ids[:n_old], old) or mask[:n_old].any():
        return None
    context = np.zeros(len(new), np.float32)

    def joined(prompt: Array, array: Array) -> Array:
        return np.concatenate([prompt.astype(array.dtype), array[n_old:]])

    arrays = (
        joined(new, ids),
        joined(context, behaviour),
        joined(context, mask),
        np.concatenate([np.zeros((len(teacher), len(new)), teacher.dtype), teacher[:, n_old:]], axis=1),
        *payloads,
    )
    return rollout._replace(item=_shifted(item, n_old, len(new)), arrays=arrays)


def _shifted(item: BatchItem, n_old: int, n_new: int) -> BatchItem:
    """The item with all offsets counted from the start of the new prompt; ranges that began inside the old prompt
    begin with the new one."""
    by, replace = n_new - n_old, msgspec.structs.replace

    def start(offset: int) -> int:
        return offset + by if offset >= n_old else 0

    return replace(
        item,
        end=item.end + by,
        spans=tuple(replace(one, start=start(one.start), end=one.end + by) for one in item.spans),
        branches=tuple(replace(one, start=one.start + by, follows=one.follows + by) for one in item.branches),
        top_k=tuple(replace(one, start=one.start + by, end=one.end + by) for one in item.top_k),
        turn_rewards=tuple(replace(one, end=one.end + by) for one in item.turn_rewards),
    )
