"""Dynamic sampling (DAPO, arXiv 2503.14476): groups whose rewards are all equal are not trained.

An advantage that compares the rollouts of a group is 0 for all of them if their rewards are equal. Such a group is
dropped when its last rollout has ended, before teachers score what they have not scored yet. Its places in the pacing
are then free, so other tasks take them.

Rewards of rollouts that were masked as a whole count as well, as they do in the group's mean. A rollout without a
reward counts for nothing.
"""

from __future__ import annotations

from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.rollouts import RolloutState, TaskRecord


class GroupFilter:
    """Finds groups of equal rewards, and counts them."""

    def __init__(self, config: BufferConfig) -> None:
        self._on = config.dynamic_sampling > 0
        self._batch_rollouts = config.batch_rollouts
        self._groups_total = 0
        self._rollouts_since_batch = 0

    @property
    def counts(self) -> dict[str, int]:
        """Counts for the snapshot's `queues`; none without dynamic sampling."""
        if not self._on:
            return {}
        return {
            "groups_equal_total": self._groups_total,
            "batches_equal_in_a_row": self._rollouts_since_batch // self._batch_rollouts,
        }

    def take(self, task: TaskRecord) -> list[RolloutState]:
        """The rollouts to drop: those of the task that are not settled, if it is a train task of which all rollouts
        have ended and no two rewards differ. They are counted as dropped."""
        if not self._on or task.task.kind != "train" or not task.all_issued:
            return []
        rollouts: list[RolloutState] = []
        rewards: set[float] = set()
        for slot in task.slots:
            rollout = slot.witness if slot.settled else slot.rollout
            if rollout is None and slot.settled:
                continue
            if rollout is None or not rollout.closed or not rollout.untouched:
                return []
            if rollout.reward is not None:
                rewards.add(rollout.reward)
            if not slot.settled:
                rollouts.append(rollout)
        if not rollouts or len(rewards) > 1:
            return []
        self._groups_total += 1
        self._rollouts_since_batch += len(rollouts)
        return rollouts

    def batch_left(self) -> None:
        """A batch was formed, so there are groups to learn from."""
        self._rollouts_since_batch = 0
