"""The weight versions that exist, and the number of optimizer steps between two of them.

Versions form a tree. Each epoch is a line of steps that branches off an older line at its parent, the version of the
checkpoint from which its learner started:

    epoch 0   0 -- 1 -- 2 -- 3 -- 4 -- 5        (the learner died at 5)
    epoch 1             2 -- 3 -- 4             (its parent is (0, 2))
    epoch 2                            5 -- 6   (its parent is (0, 5): that checkpoint could be read again)

The distance of two versions is the way down the one branch and up the other: (0, 5) to (1, 4) is 3 + 2.
"""

from __future__ import annotations

from stillhouse.buffer.ledger import RejectReason
from stillhouse.protocol.messages import WeightVersion


class VersionTable:
    """The parent of each epoch, and the highest step of it that weights can have."""

    def __init__(self, start: WeightVersion) -> None:
        self._first_epoch = start.epoch
        self._newest = start
        self.published = start
        """Newest version that the learner has published."""
        self._parents: dict[int, WeightVersion] = {start.epoch: start}
        """Parent by epoch. For the first epoch it is the version that the buffer began with."""
        self._highest: dict[int, int] = {start.epoch: start.step + 1}

    def __repr__(self) -> str:
        return f"VersionTable(newest={self._newest}, parents={self._parents}, highest={self._highest})"

    @property
    def newest(self) -> WeightVersion:
        """The newest version named in a learner's message."""
        return self._newest

    def fork(self, version: WeightVersion, parent: WeightVersion) -> None:
        """Start a new epoch at `version`, with the same weights as `parent`. Skipped epochs, which produced no tokens,
        count as started there too. Raises ValueError if the epoch does not rise, or if the two are not the same step of
        this run."""
        if version.epoch <= self._newest.epoch:
            raise ValueError(f"fork at {version}: expected an epoch above {self._newest.epoch}")
        if parent.step != version.step or not self._first_epoch <= parent.epoch <= self._newest.epoch:
            raise ValueError(
                f"fork at {version} from {parent}: expected step {version.step} of an epoch from {self._first_epoch} "
                f"to {self._newest.epoch}"
            )
        if parent.step < self._parents[parent.epoch].step:
            raise ValueError(f"fork from {parent}: that epoch began at step {self._parents[parent.epoch].step}")
        for epoch in range(self._newest.epoch + 1, version.epoch + 1):
            self._parents[epoch] = parent
            self._highest[epoch] = version.step + 1
        self.may_leave(parent)
        self._newest = version

    def reach(self, version: WeightVersion) -> None:
        """Note that a learner's message named `version`, of a known epoch."""
        self.may_leave(version)
        if version > self._newest:
            self._newest = version

    def may_leave(self, version: WeightVersion) -> None:
        """Note that the learner can make the step from `version` on without another word: it broadcasts new weights
        before it reports them. If it holds the next batch too, it may be two steps further than it has said."""
        self._highest[version.epoch] = max(self._highest[version.epoch], version.step + 1)

    def refusal(self, version: WeightVersion) -> RejectReason | None:
        """Reason why no engine can have sampled under `version`, or None."""
        if version.epoch > self._newest.epoch:
            return RejectReason.FUTURE_VERSION
        if version.epoch < self._first_epoch or version.step < self._parents[version.epoch].step:
            return RejectReason.UNKNOWN_VERSION
        if version.step > self._highest[version.epoch]:
            return RejectReason.FUTURE_VERSION
        return None

    def distance(self, sampled: WeightVersion, now: WeightVersion) -> int:
        """Optimizer steps between two versions of this run: up to the version where their branches meet, and down
        again.

        An epoch is younger than its parent's, so the search climbs from the version with the higher epoch."""
        a, b = sampled, now
        while a.epoch != b.epoch:
            if a.epoch > b.epoch:
                a = self._parents[a.epoch]
            else:
                b = self._parents[b.epoch]
        meet = min(a.step, b.step)
        return sampled.step - meet + now.step - meet
