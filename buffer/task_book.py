"""The task queue: what was offered, whose sample gets the next ticket, which tasks are done."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from buffer.rollouts import Slot, TaskRecord
from buffer.runs import Runs
from buffer.tokens import Int32s
from protocol.messages import Task, TaskKind, WeightVersion

TaskKey: TypeAlias = tuple[TaskKind, int]


class Done(NamedTuple):
    """What is remembered of a settled task."""

    generation: int
    """The learner process that offered it last."""
    next_attempt: int
    """Attempts of a later life are numbered from here, so that rollout ids stay unique."""


class TaskBook:
    """Evaluation samples go first, then samples to be tried again, then the next of the stream.

    A task offered again is a duplicate, with one exception: a learner that lost training to a crash offers the tasks
    its checkpoint does not know as done. Those that were settled and reported to the former learner are run again.
    A learner is told of a settled task once, and only after it has offered the task itself.
    """

    def __init__(self, capacity: int, max_attempts: int) -> None:
        self.generation = 0
        """Learner processes seen."""
        self.stream_ended = False
        """The learner said that no train task follows."""
        self._capacity = capacity
        self._max_attempts = max_attempts
        self._active: dict[TaskKey, TaskRecord] = {}
        self._done: dict[TaskKind, Runs[Done]] = {"train": Runs(), "eval": Runs()}
        """By task id: the learner numbers train tasks in order, and those of an evaluation too."""
        self._unreported: dict[int, None] = {}
        """Settled train tasks that no trained batch has told of, oldest first."""
        self._queues: dict[TaskKind, deque[TaskRecord]] = {"train": deque(), "eval": deque()}
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
        """Train tasks the queue has room for; 0 once the stream ended."""
        return 0 if self.stream_ended else max(0, self._capacity - len(self._queues["train"]))

    @property
    def runs_low(self) -> bool:
        return not self.stream_ended and 2 * len(self._queues["train"]) < self._capacity

    @property
    def next_train_group(self) -> int | None:
        """Samples of the next train task that never had a ticket; None when no task is queued."""
        queue = self._queues["train"]
        return queue[0].task.group_size - len(queue[0].slots) if queue else None

    def new_learner(self) -> None:
        """Another learner process takes over; it will say again when the stream ends."""
        self.generation += 1
        self.stream_ended = False

    def offer(self, task: Task, prompts_T: Int32s, min_version: WeightVersion) -> TaskRecord | None:
        """Queue a task with its frame; None for one that is known."""
        key: TaskKey = (task.kind, task.task_id)
        if key in self._active:
            self._active[key].generation = self.generation
            return None
        finished = self._done[task.kind]
        done = finished.get(task.task_id)
        if done is not None:
            if done.generation == self.generation:
                return None
            if task.kind == "train" and task.task_id in self._unreported:
                finished.put(task.task_id, Done(self.generation, done.next_attempt))
                return None
            finished.discard(task.task_id)
        record = TaskRecord(
            task,
            prompts_T,
            generation=self.generation,
            first_attempt=0 if done is None else done.next_attempt,
            min_version=min_version,
        )
        self._active[key] = record
        self._queues[task.kind].append(record)
        return record

    def next_slot(self, may_start: Callable[[int], bool], issue: Callable[[], int]) -> tuple[Slot, bool] | None:
        """The sample that gets the next ticket, and whether it is its first; None if there is none.

        `may_start(n)`: may the next train task, with n samples to go, get a ticket? `issue()`: take a place in the
        pacing and return its n."""
        for kind in ("eval", "train"):
            if self._again[kind]:
                return heapq.heappop(self._again[kind]), False
            queue = self._queues[kind]
            if not queue:
                continue
            record = queue[0]
            n = 0
            if kind == "train":
                if not may_start(record.task.group_size - len(record.slots)):
                    return None
                n = issue()
            slot = Slot(record, len(record.slots), self._next_order, n)
            self._next_order += 1
            record.slots.append(slot)
            if record.all_issued:
                queue.popleft()
            return slot, True
        return None

    def try_again(self, slot: Slot) -> bool:
        """Queue the slot's next attempt; False when it has none left."""
        if slot.attempt + 1 >= slot.task.first_attempt + self._max_attempts:
            return False
        slot.attempt += 1
        heapq.heappush(self._again[slot.task.task.kind], slot)
        return True

    def slot_settled(self, slot: Slot) -> None:
        record = slot.task
        record.n_settled += 1
        if not record.settled:
            return
        key: TaskKey = (record.task.kind, record.task.task_id)
        del self._active[key]
        self._finish(record)
        if record.task.kind == "train":
            self._unreported[record.task.task_id] = None

    def to_report(self) -> list[int]:
        """Settled train tasks that this learner has offered and no trained batch has told of, oldest first."""
        done = self._done["train"]
        return [i for i in self._unreported if (known := done.get(i)) and known.generation == self.generation]

    def may_report(self, record: TaskRecord) -> bool:
        """Has this learner offered it?"""
        return record.generation == self.generation

    def reported(self, task_ids: Iterable[int]) -> None:
        """The learner knows that these are done."""
        for task_id in task_ids:
            self._unreported.pop(task_id, None)

    def abandon_evaluations(self) -> None:
        """The learner process that asked for them is gone; what ran of them has been dropped."""
        self._queues["eval"].clear()
        self._again["eval"].clear()
        for key, record in [(key, record) for key, record in self._active.items() if key[0] == "eval"]:
            del self._active[key]
            self._finish(record)

    def clear(self) -> list[Slot]:
        """The run is over: no further ticket. Returns the samples that waited for another attempt."""
        waiting = [slot for slots in self._again.values() for slot in slots]
        for slots in self._again.values():
            slots.clear()
        for queue in self._queues.values():
            queue.clear()
        self.stream_ended = True
        return waiting

    def _finish(self, record: TaskRecord) -> None:
        done = Done(record.generation, record.first_attempt + self._max_attempts)
        self._done[record.task.kind].put(record.task.task_id, done)
