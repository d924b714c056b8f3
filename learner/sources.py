"""Where a learner's batches come from (learner.steps): the buffer, with a file of offline rollouts mixed in, or a
recording."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stillhouse.learner.batch import train_items
from stillhouse.learner.feed import BatchFeed, LearnerStalled, ReadyBatch
from stillhouse.learner.group_rewards import GroupRewards
from stillhouse.learner.offline import OfflineMixer, offline_item
from stillhouse.learner.prompts.tasks import TaskStream
from stillhouse.learner.reports.wait_clock import WaitClock
from stillhouse.learner.steps import SourceBatch
from stillhouse.protocol.messages import WeightVersion
from stillhouse.recording.reader import KeptBatch, Recording


class BufferBatches:
    """Batches of the buffer, judged by `learner.tasks.group_reward` and mixed with offline rollouts."""

    def __init__(
        self,
        feed: BatchFeed,
        stream: TaskStream,
        clock: WaitClock,
        *,
        ahead_until: int,
        group_rewards: GroupRewards | None = None,
        mixer: OfflineMixer | None = None,
    ) -> None:
        """The batch of the next step is asked for while one trains, before step `ahead_until`; 0: never."""
        self._feed = feed
        self._stream = stream
        self._clock = clock
        self._ahead_until = ahead_until
        self._group_rewards = group_rewards
        self._mixer = mixer

    def next(self, version: WeightVersion) -> SourceBatch:
        """Raises LearnerStalled, GroupRewardsFailed, and what is wrong with the batch."""
        ready = self._feed.next(version)
        if not ready.items:
            self._stream.step((), ready.delivered.batch.settled)
            raise LearnerStalled(f"nothing is left to train at step {version.step}")
        if version.step + 1 < self._ahead_until:
            self._feed.ask_ahead(WeightVersion(version.epoch, version.step + 1))
        delivered, items = self._judged(ready)
        mixed = self._mixer.take(sum(item.n_trained for item in items)) if self._mixer is not None else []
        return SourceBatch(
            items=items,
            offline=[item for _, item in mixed],
            staleness=delivered.batch.staleness,
            delivered=delivered,
            mixed=[rollout for rollout, _ in mixed],
        )

    def _judged(self, ready: ReadyBatch) -> ReadyBatch:
        if self._group_rewards is None:
            return ready
        delivered = ready.delivered
        with self._clock.waiting("data"):
            batch = self._group_rewards.apply(delivered.batch, delivered.arrays)
        items = [replace(one, item=item) for one, item in zip(ready.items, batch.items, strict=True)]
        return ReadyBatch(replace(delivered, batch=batch), items)


class RecordedBatches:
    """Batches of a recording, with the offline rollouts that were mixed in then."""

    def __init__(self, recording: Recording, turns: Iterator[tuple[int, int]], clock: WaitClock) -> None:
        """`turns`: (epoch, index of a batch) of each step."""
        self._recording = recording
        self._turns = turns
        self._clock = clock
        self.epoch = 0

    def next(self, version: WeightVersion) -> SourceBatch | None:
        """Raises RecordError, or BatchError for a batch that a run would refuse too."""
        if (turn := next(self._turns, None)) is None:
            return None
        self.epoch, kept = turn[0], self._recording.batches[turn[1]]
        with self._clock.waiting("data"):
            batch = recorded_batch(self._recording, kept)
        places = {"replay/epoch": self.epoch, "replay/recorded_step": kept.record.version.step + 1}
        return replace(batch, figures=places)


def recorded_batch(recording: Recording, kept: KeptBatch) -> SourceBatch:
    """Read one batch. Raises as `RecordedBatches.next`."""
    rollouts = recording.rollouts(kept)
    own = [rollout for rollout in rollouts if not rollout.offline]
    return SourceBatch(
        items=train_items([one.item for one in own], [array for one in own for array in one.arrays]),
        offline=[offline_item(rollout) for rollout in rollouts if rollout.offline],
        staleness=kept.record.staleness,
        tasks_done=kept.record.tasks_done,
    )
