"""Which weight versions exist, and how many optimizer steps lie between two of them.

Versions form a tree. Each epoch is a line of steps; the line of epoch e+1 leaves the older ones at the step of the
checkpoint it started from, its fork:

    epoch 0   0 -- 1 -- 2 -- 3 -- 4 -- 5        (the learner died at 5)
    epoch 1             2 -- 3 -- 4             (it started again from its checkpoint of step 2)

The distance of two versions is the way down the one branch and up the other: (0, 5) to (1, 4) is 3 + 2.
"""

from __future__ import annotations

from buffer.ledger import RejectReason
from protocol.messages import WeightVersion


class VersionTable:
    """Forks of all epochs, and how far the learner has shown that each came."""

    def __init__(self, start: WeightVersion) -> None:
        self._first_epoch = start.epoch
        self._newest = start
        self._forks: dict[int, int] = {start.epoch: start.step}
        self._reached: dict[int, int] = {start.epoch: start.step}

    def __repr__(self) -> str:
        return f"VersionTable(newest={self._newest}, forks={self._forks}, reached={self._reached})"

    @property
    def newest(self) -> WeightVersion:
        """The newest version that a learner's message has named."""
        return self._newest

    def fork(self, version: WeightVersion) -> None:
        """A learner of a higher epoch goes on from `version`. Epochs between, of which nothing was heard, made no
        tokens; they count as started at the same step. Raises ValueError when the epoch does not rise."""
        if version.epoch <= self._newest.epoch:
            raise ValueError(f"fork at {version}: expected an epoch above {self._newest.epoch}")
        for epoch in range(self._newest.epoch + 1, version.epoch + 1):
            self._forks[epoch] = version.step
            self._reached[epoch] = version.step
        self._newest = version

    def reach(self, version: WeightVersion) -> None:
        """A learner's message named `version`, of an epoch that is known."""
        if version.step > self._reached[version.epoch]:
            self._reached[version.epoch] = version.step
        if version > self._newest:
            self._newest = version

    def refusal(self, version: WeightVersion) -> RejectReason | None:
        """Why no engine can honestly have sampled under `version`; None if one can.

        One step past what is known is possible: the learner broadcasts new weights before it tells the buffer."""
        if version.epoch > self._newest.epoch:
            return RejectReason.FUTURE_VERSION
        if version.epoch < self._first_epoch or version.step < self._forks[version.epoch]:
            return RejectReason.UNKNOWN_VERSION
        if version.step > self._reached[version.epoch] + 1:
            return RejectReason.FUTURE_VERSION
        return None

    def distance(self, sampled: WeightVersion, now: WeightVersion) -> int:
        """Optimizer steps between two versions of this run.

        With a = min(both steps, every fork after `sampled`'s epoch up to `now`'s): (sampled - a) + (now - a)."""
        meet = min(sampled.step, now.step)
        if sampled.epoch != now.epoch:
            low, high = sorted((sampled.epoch, now.epoch))
            for epoch in range(low + 1, high + 1):
                meet = min(meet, self._forks[epoch])
        return sampled.step - meet + now.step - meet
