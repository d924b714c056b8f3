"""Which versions are on the branch that a run went on with, as its files tell it: the way from the first epoch to the
newest one, over the checkpoint that each began from."""

from __future__ import annotations

import math

from protocol.messages import WeightVersion


class Branches:
    """Forks are entered in the order of the file. A learner's first epoch has none."""

    def __init__(self) -> None:
        self._newest = 0
        self._parents: dict[int, WeightVersion] = {}

    def fork(self, version: WeightVersion, parent: WeightVersion | None) -> None:
        """A learner began with `version`, of a new epoch, from the checkpoint `parent`; None: of the epoch before."""
        self._parents[version.epoch] = parent or WeightVersion(self._newest, version.step)
        self._newest = version.epoch

    def keeps(self, version: WeightVersion, *, made: int = 0) -> bool:
        """Are the weights of so many steps after `version`, in its epoch, those of the branch that was gone on with?"""
        epoch, last_step = self._newest, math.inf
        while epoch != version.epoch:
            parent = self._parents.get(epoch)
            if parent is None or parent.epoch >= epoch:
                return False
            epoch, last_step = parent.epoch, min(last_step, parent.step)
        return version.step + made <= last_step
