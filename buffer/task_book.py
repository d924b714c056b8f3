"""The task queue: which tasks were offered, which sample gets the next ticket, which samples are settled."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from stillhouse.buffer.history import Runs
from stillhouse.buffer.ledger import LEARNER_RESTART
from stillhouse.buffer.rollouts import Fate, Slot, TaskRecord
from stillhouse.buffer.tokens import Int32s
from stillhouse.protocol.messages import OpenTask, Settled, Task, TaskKind, WeightVersion

TaskKey: TypeAlias = tuple[TaskKind, int]


class TaskBook:
    """Tickets go to evaluation samples first, then to samples to be tried again, then to the rest by task id.

    A task that is offered again is a duplicate, unless a learner went back to a checkpoint in which it is not done
    (`go_back`). Each settled train sample is reported to the learner once.
    """

    def __init__(self, capacity: int, max_attempts: int, *, whole_groups: bool, epoch: int = 0) -> None:
        """`whole_groups`: a task's samples are trained in one batch, and so they are reported together."""
        self.stream_ended = False
        """True once the learner said that no train task follows."""
        self._epoch = epoch
        """Epoch of the learner."""
        self._capacity = capacity
        self._max_attempts = max_attempts
        self._whole_groups = whole_groups
        self._active: dict[TaskKey, TaskRecord] = {}
        self._done: dict[TaskKind, Runs[bool]] = {"train": Runs(), "eval": Runs()}
        """Ids of done tasks. The learner numbers train tasks in order, and those of an evaluation too."""
        self._known: dict[int, OpenTask] = {}
        """State, from a checkpoint, of train tasks that have not been offered since."""
        self._unreported: dict[tuple[int, int], Settled] = {}
        """Settled train samples that no trained batch has reported, oldest first, by task id and sample index."""
        self._queues: dict[TaskKind, list[TaskRecord]] = {"train": [], "eval": []}
        """Tasks with samples that never had a ticket, sorted by task id."""
        self._again: dict[TaskKind, list[Slot]] = {"train": [], "eval": []}
        self._next_order = 0

    def __repr__(self) -> str:
        queued = {kind: len(queue) for kind, queue in self._queues.items()}
        return f"TaskBook(active={len(self._active)}, queued={queued}, done={self._done})"

    @property
    def n_queued(self) -> int:
        """Tasks with samples that never had a ticket."""
        return len(self._queues["train"]) + len(self._queues["eval"])

    @property
    def tasks_wanted(self) -> int:
        """Number of train tasks that the queue has room for; 0 once the stream ended."""
        return 0 if self.stream_ended else max(0, self._capacity - len(self._queues["train"]))

    @property
    def runs_low(self) -> bool:
        return not self.stream_ended and 2 * len(self._queues["train"]) < self._capacity

    @property
    def next_train_group(self) -> tuple[int, bool] | None:
        """Number of samples without a ticket in the next train task, and True if others of it have one; None if no task
        is queued."""
        queue = self._queues["train"]
        return (len(queue[0].to_issue), bool(queue[0].slots)) if queue else None

    @property
    def train_records(self) -> list[TaskRecord]:
        """Train tasks that were offered and are not settled."""
        return [record for (kind, _), record in self._active.items() if kind == "train"]

    def new_learner(self) -> None:
        """Prepare for a new learner process, which will say again when the stream ends."""
        self.stream_ended = False

    def offer(self, task: Task, prompts_T: Int32s, min_version: WeightVersion, blob: int = 0) -> TaskRecord | None:
        """Queue a task with its frame, which came in the blob of this number. Returns its record, or None if the task
        is known."""
        key: TaskKey = (task.kind, task.task_id)
        if task.task_id in self._done[task.kind]:
            return None
        former = self._active.get(key)
        record = former or TaskRecord(task, prompts_T, min_version=min_version, blob=blob)
        self._active[key] = record
        known = self._known.pop(task.task_id, None) if task.kind == "train" else None
        if known is not None:
            self.fit(record, known)
        if record.to_issue and record not in self._queues[task.kind]:
            insort(self._queues[task.kind], record, key=_task_id)
        return None if former is not None else record

    def next_slot(self, may_start: Callable[[int, bool], bool], issue: Callable[[], int]) -> tuple[Slot, bool] | None:
        """The sample that gets the next ticket, and True if it is its first one; None if there is no sample.

        `may_start(n, begun)`: True if the next train task, with n samples to go, may get a ticket; `begun`: other
        samples of it have one. `issue()` takes a place in the pacing and returns its n."""
        for kind in ("eval", "train"):
            if self._again[kind]:
                return heapq.heappop(self._again[kind]), False
            queue = self._queues[kind]
            if not queue:
                continue
            record = queue[0]
            n = 0
            if kind == "train":
                if not may_start(len(record.to_issue), bool(record.slots)):
                    return None
                n = issue()
            slot = Slot(record, record.to_issue.popleft(), self._next_order, n, self._epoch)
            self._next_order += 1
            record.slots.append(slot)
            if record.all_issued:
                queue.pop(0)
            return slot, True
        return None

    def try_again(self, slot: Slot) -> bool:
        """Queue the slot's next attempt. Returns False if none is left."""
        if slot.attempt + 1 >= self._max_attempts:
            return False
        slot.attempt += 1
        heapq.heappush(self._again[slot.task.task.kind], slot)
        return True

    def slot_settled(self, slot: Slot, fate: Fate) -> None:
        record = slot.task
        slot.fate = fate
        record.n_settled += 1
        if record.task.kind == "train" and (record.settled or not self._whole_groups):
            for one in record.slots if self._whole_groups else [slot]:
                self._report(record.task.task_id, one.sample_index, one.fate or fate)
        if record.settled:
            self._finish(record)

    def to_report(self) -> list[Settled]:
        """Settled train samples that no trained batch has reported, oldest first."""
        return list(self._unreported.values())

    def reported(self, samples: Iterable[Settled]) -> None:
        """Note that the learner knows these to be settled."""
        for sample in samples:
            self._unreported.pop((sample.task_id, sample.sample_index), None)

    # ------------------------------------------------------------------------------------------ back to a checkpoint

    def go_back(self, epoch: int, next_task_id: int, known: Sequence[OpenTask]) -> None:
        """Return to a checkpoint: `known` are its open tasks, and all others below `next_task_id` are done. What was
        settled since then, or was not reported, is no longer done. The caller calls `fit` for each active record.
        Samples get no first ticket before the learner has offered their task again, so that the order is that of its
        stream."""
        self._epoch = epoch
        self._queues["train"].clear()
        self._unreported.clear()
        self._known = {task.task_id: task for task in known if ("train", task.task_id) not in self._active}
        done = self._done["train"] = Runs()
        first = 0
        for task_id in sorted(task.task_id for task in known if task.task_id < next_task_id):
            done.append_range(first, task_id - 1, True)
            first = task_id + 1
        done.append_range(first, next_task_id - 1, True)

    def fit(self, record: TaskRecord, known: OpenTask) -> None:
        """Settle or issue again the samples without a slot, as `known` says. Partly trained samples of which nothing is
        held here end as they are."""
        slots = {slot.sample_index: slot for slot in record.slots}
        partial = {sample.sample_index for sample in known.partial}
        for index in partial - slots.keys():
            self._report(record.task.task_id, index, Fate("trained", LEARNER_RESTART))
        gone = partial.union(known.settled, slots)
        record.to_issue.clear()
        record.to_issue.extend(i for i in range(record.task.group_size) if i not in gone)
        unsettled = sum(not slot.settled for slot in record.slots)
        record.n_settled = record.task.group_size - len(record.to_issue) - unsettled
        if record.settled:
            self._finish(record)

    def forget_attempt(self, slot: Slot) -> None:
        """Remove the slot from those that wait for another attempt."""
        again = self._again["train"]
        if slot in again:
            again.remove(slot)
            heapq.heapify(again)

    # -------------------------------------------------------------------------------------------------------- the end

    def abandon_evaluations(self) -> None:
        """Forget all evaluation tasks: the learner that asked for them is gone, and their rollouts have been
        dropped."""
        self._queues["eval"].clear()
        self._again["eval"].clear()
        for key in [key for key in self._active if key[0] == "eval"]:
            self._active.pop(key).let_go()
        self._done["eval"] = Runs()

    def clear(self) -> list[Slot]:
        """End the run: no further tickets. Returns the samples that waited for another attempt."""
        waiting = [slot for slots in self._again.values() for slot in slots]
        for slots in self._again.values():
            slots.clear()
        for queue in self._queues.values():
            queue.clear()
        self.stream_ended = True
        return waiting

    def _report(self, task_id: int, sample_index: int, fate: Fate) -> None:
        self._unreported[task_id, sample_index] = Settled(task_id, sample_index, *fate)

    def _finish(self, record: TaskRecord) -> None:
        del self._active[record.task.kind, record.task.task_id]
        self._done[record.task.kind].put(record.task.task_id, True)
        record.let_go()


def _task_id(record: TaskRecord) -> int:
    return record.task.task_id
