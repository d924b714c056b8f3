"""The book of samples: which samples of the train tasks are settled on the learner's branch of versions. No I/O, no
torch.

A checkpoint holds this book. A learner that resumes from it trains every sample that is not settled here, and no other.
A sample is settled once. Tasks below `next_task_id` that are not open are settled completely. A sample of a later task
may be settled ahead of time, if the buffer still held it from a learner that had advanced further.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from stillhouse.protocol.messages import OpenTask, PartialSample, Settled

NON_FINITE: Final = "non_finite"
"""Reason for masking a sample that could not be trained (`learner.step.finite_step`)."""


class TrainedSample(NamedTuple):
    """Tokens of one rollout that a step trained."""

    task_id: int
    sample_index: int
    rollout_id: str
    n_tokens: int


class Account(NamedTuple):
    """Samples that one step settled, and their fates."""

    settled: tuple[Settled, ...]
    tasks_done: tuple[int, ...]
    """Tasks that this completes."""


class SettledTwice(ValueError):
    """The buffer reports a sample that is already settled: something was counted twice."""


@dataclass(slots=True)
class _Progress:
    settled: set[int] = field(default_factory=set[int])
    partial: dict[int, PartialSample] = field(default_factory=dict[int, PartialSample])


class SampleBook:
    """Group size of each open task below `next_task_id`, and progress of each task that is not settled."""

    def __init__(self) -> None:
        self.next_task_id = 0
        self._open: dict[int, int] = {}
        """Group size by task id, in the order of the ids."""
        self._progress: dict[int, _Progress] = {}
        """Progress of tasks with a sample that is settled or partly trained."""

    @property
    def open(self) -> tuple[int, ...]:
        """Tasks below `next_task_id` that are not settled, ascending."""
        return tuple(self._open)

    def begin(self, group_size: int) -> int | None:
        """Start the next task of the stream. Returns its id, or None if all its samples are already settled."""
        task_id, self.next_task_id = self.next_task_id, self.next_task_id + 1
        if task_id in self._progress and len(self._progress[task_id].settled) == group_size:
            del self._progress[task_id]
            return None
        self._open[task_id] = group_size
        return task_id

    def step(
        self, trained: Iterable[TrainedSample], settled: Sequence[Settled], left_out: Collection[tuple[int, int]] = ()
    ) -> Account:
        """Record the tokens that a step trained and the samples that it settled, as announced by the buffer.
        `left_out`: (task id, sample index) of samples that could not be trained. Raises SettledTwice, changing
        nothing."""
        self._expect_open(settled)
        for one in trained:
            self._add(one)
        account, done = list[Settled](), list[int]()
        for sample in settled:
            account.append(self._fate(sample, left_out))
            progress = self._progress.setdefault(sample.task_id, _Progress())
            progress.settled.add(sample.sample_index)
            progress.partial.pop(sample.sample_index, None)
            if len(progress.settled) == self._open.get(sample.task_id):
                del self._open[sample.task_id], self._progress[sample.task_id]
                done.append(sample.task_id)
        return Account(tuple(account), tuple(done))

    def _fate(self, sample: Settled, left_out: Collection[tuple[int, int]]) -> Settled:
        if sample.fate != "trained" or (sample.task_id, sample.sample_index) not in left_out:
            return sample
        progress = self._progress.get(sample.task_id)
        before = progress is not None and sample.sample_index in progress.partial
        return Settled(sample.task_id, sample.sample_index, "trained" if before else "masked", NON_FINITE)

    @property
    def progress(self) -> tuple[OpenTask, ...]:
        """Unsettled tasks by ascending id: all open ones, and later ones with a settled or partly trained sample."""
        tasks = sorted({*self._open, *self._progress})
        return tuple(_open_task(task_id, self._progress.get(task_id, _Progress())) for task_id in tasks)

    @classmethod
    def restored(cls, next_task_id: int, group_sizes: Mapping[int, int], progress: Iterable[OpenTask]) -> Self:
        """The book with this `next_task_id`, group sizes of open tasks, and `progress`."""
        book = cls()
        book.next_task_id = next_task_id
        book._open = dict(group_sizes)
        for task in progress:
            partial = {sample.sample_index: sample for sample in task.partial}
            book._progress[task.task_id] = _Progress(set(task.settled), partial)
        return book

    def _expect_open(self, settled: Sequence[Settled]) -> None:
        seen = set[tuple[int, int]]()
        for sample in settled:
            key = (sample.task_id, sample.sample_index)
            progress = self._progress.get(sample.task_id)
            known = progress is not None and sample.sample_index in progress.settled
            gone = sample.task_id < self.next_task_id and sample.task_id not in self._open
            if gone or known or key in seen:
                raise SettledTwice(
                    f"sample {sample.sample_index} of task {sample.task_id} is settled twice, now as {sample.fate}; "
                    f"{len(self._open)} tasks are open, the next fresh one is {self.next_task_id}"
                )
            seen.add(key)

    def _add(self, one: TrainedSample) -> None:
        if not one.n_tokens:
            return
        partial = self._progress.setdefault(one.task_id, _Progress()).partial
        before = partial.get(one.sample_index)
        n_before = before.n_trained if before is not None else 0
        partial[one.sample_index] = PartialSample(one.sample_index, one.rollout_id, n_before + one.n_tokens)


def _open_task(task_id: int, progress: _Progress) -> OpenTask:
    partial = tuple(sample for _, sample in sorted(progress.partial.items()))
    return OpenTask(task_id, tuple(sorted(progress.settled)), partial)
