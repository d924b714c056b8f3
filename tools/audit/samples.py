"""Follows tasks and samples, and checks that each is settled once and none is skipped.

Task ids are unique in a run, whichever pass over the prompts a task belongs to, so (task, sample) names a sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from stillhouse.tools.audit.record import RecordedBatch, Settled, Version
from stillhouse.tools.audit.report import SETTLED_TWICE, SETTLED_WRONG, SKIPPED_SAMPLES, SKIPPED_TASKS, Faults, Where
from stillhouse.tools.audit.tokens import TokenCount

EQUAL_REWARDS: Final = "equal_rewards"
"""Reason of samples whose whole group was dropped before anything of it was trained."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """The state of the task stream in a checkpoint."""

    version: Version
    next_task_id: int
    group_sizes: Mapping[int, int]
    """Group sizes of the open tasks before that one, which are not completely settled."""
    settled: frozenset[tuple[int, int]]
    """Settled (task, sample) of open and of later tasks."""
    partial: Mapping[tuple[int, int], int]
    """Number of trained tokens of samples that are not settled, if above 0."""


@dataclass(slots=True)
class SampleCount:
    """Collects what all steps settled: `add` takes kept steps in order, `leave` the abandoned ones."""

    group_size: int
    """Assumed for a task of which nothing was ever trained."""
    faults: Faults
    settled: dict[tuple[int, int], tuple[Version, Settled]] = field(
        default_factory=dict[tuple[int, int], tuple[Version, Settled]]
    )
    """(task, sample) -> the step in which it was settled."""
    abandoned: dict[tuple[int, int], Version] = field(default_factory=dict[tuple[int, int], Version])
    """Samples that an abandoned step trained."""
    group_sizes: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def fates(self) -> dict[str, int]:
        """Samples settled by kept steps, by fate and reason."""
        return dict(Counter(_fate(settled) for _, settled in self.settled.values()))

    def leave(self, batch: RecordedBatch) -> None:
        """Record a step that is not on the kept branch."""
        for item in batch.items:
            if not item.offline:
                self.abandoned.setdefault(item.item.sample, batch.version)
                self.group_sizes[item.item.task_id] = item.item.group_size

    def add(self, batch: RecordedBatch) -> None:
        """Record a step of the kept branch."""
        for item in batch.items:
            if not item.offline:
                self.group_sizes[item.item.task_id] = item.item.group_size
        for settled in batch.settled:
            key = (settled.task_id, settled.sample_index)
            if key in self.settled:
                step, before = self.settled[key]
                detail = f"{_fate(settled)}, before at step {step.step} {_fate(before)}"
                self._twice(batch.version, *key, detail)
            else:
                self.settled[key] = (batch.version, settled)

    def judge(self, tokens: TokenCount, frontier: Frontier | None) -> None:
        """Find the faults, after the last step. `frontier`: that of a checkpoint on the kept branch."""
        for key, (version, settled) in self.settled.items():
            last = tokens.last_step(key)
            if last is not None and last > version.step:
                self._wrong(version, key, f"settled as {_fate(settled)}, and trained at step {last} again")
            if last is not None and settled.reason == EQUAL_REWARDS:
                self._wrong(version, key, f"settled as {_fate(settled)}, and trained at step {last}")
            if last is None and settled.fate == "trained":
                self._wrong(version, key, "settled as trained, and no kept step trained a token of it")
        if frontier is None:
            return
        for task_id in range(frontier.next_task_id):
            size = frontier.group_sizes.get(task_id, self.group_sizes.get(task_id, self.group_size))
            self._expect_samples(frontier, task_id, size)
        self._expect_nothing_behind(frontier)
        self._expect_parts(frontier, tokens)

    def _expect_samples(self, frontier: Frontier, task_id: int, size: int) -> None:
        """Check that each sample is either settled by a kept step before the checkpoint or open in it."""
        missing: list[int] = []
        for sample in range(size):
            step = self._settled_before(frontier, (task_id, sample))
            is_open = task_id in frontier.group_sizes and (task_id, sample) not in frontier.settled
            if step is not None and is_open:
                detail = f"settled at step {step.step}, and open in the checkpoint of step {frontier.version.step}"
                self._twice(step, task_id, sample, detail)
            if step is None and not is_open:
                missing.append(sample)
        if len(missing) == size:
            self._skipped_task(task_id, missing)
        else:
            self._skipped_samples(task_id, missing)

    def _expect_nothing_behind(self, frontier: Frontier) -> None:
        """Check that the checkpoint knows all settled samples of later tasks, which an earlier learner offered."""
        for (task_id, sample), (version, settled) in self.settled.items():
            late = task_id >= frontier.next_task_id and version.step < frontier.version.step
            if late and (task_id, sample) not in frontier.settled:
                detail = f"{_fate(settled)}, and the checkpoint of step {frontier.version.step} does not know of it"
                self._wrong(version, (task_id, sample), detail)

    def _expect_parts(self, frontier: Frontier, tokens: TokenCount) -> None:
        """Check the checkpoint's numbers of trained tokens of samples that are not settled."""
        counted = tokens.trained_before(frontier.version.step)
        parts = {key: n for key, n in counted.items() if self._settled_before(frontier, key) is None}
        for key in sorted(parts.keys() | frontier.partial.keys()):
            n, expected = parts.get(key, 0), frontier.partial.get(key, 0)
            if n != expected:
                step = frontier.version.step
                self._wrong(
                    frontier.version, key, f"{n} tokens are trained, the checkpoint of step {step} says {expected}"
                )

    def _settled_before(self, frontier: Frontier, sample: tuple[int, int]) -> Version | None:
        found = self.settled.get(sample)
        return found[0] if found is not None and found[0].step < frontier.version.step else None

    def _skipped_task(self, task_id: int, samples: Iterable[int]) -> None:
        self.faults.add(SKIPPED_TASKS, Where(task=task_id, detail=self._left_behind(task_id, samples)))

    def _skipped_samples(self, task_id: int, samples: Iterable[int]) -> None:
        for sample in samples:
            detail = self._left_behind(task_id, [sample])
            self.faults.add(SKIPPED_SAMPLES, Where(task=task_id, sample=sample, detail=detail))

    def _left_behind(self, task_id: int, samples: Iterable[int]) -> str:
        steps = [self.abandoned[task_id, sample] for sample in samples if (task_id, sample) in self.abandoned]
        return f"trained at the abandoned step {min(steps)} only" if steps else "in no recorded step"

    def _twice(self, version: Version, task_id: int, sample: int, detail: str) -> None:
        self.faults.add(SETTLED_TWICE, Where(step=version, task=task_id, sample=sample, detail=detail))

    def _wrong(self, version: Version, sample: tuple[int, int], detail: str) -> None:
        self.faults.add(SETTLED_WRONG, Where(step=version, task=sample[0], sample=sample[1], detail=detail))


def _fate(settled: Settled) -> str:
    return f"{settled.fate} ({settled.reason})" if settled.reason else settled.fate
