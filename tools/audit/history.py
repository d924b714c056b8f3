"""The tree of weight versions: finds the branch that was kept, and the number of steps between two versions.

    epoch 0   0 -- 1 -- 2 -- 3 -- 4 -- 5        the learner died at 5
    epoch 1             2 -- 3                  restarted from the checkpoint 0.2, and died
    epoch 2                       4 -- 5 -- 6   restarted from the checkpoint 0.4

The kept branch is found by walking back from the newest version, here 2.6: steps 4 and 5 of epoch 2, then steps 0 to 3
of epoch 0. Epoch 1 is abandoned, and so is step 4 of epoch 0. From 1.3 to 2.5 it is one step down to 0.2, where
the branches meet, and three steps up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stillhouse.tools.audit.record import Version


@dataclass(slots=True)
class _Epoch:
    began: int
    """Its first step."""
    parent: Version | None
    """None: unknown, or the start of the run."""
    reached: int
    """Its newest step."""


class History:
    """All epochs of a run. Call `begin` and `step` for all of them, in any order, before asking for anything."""

    def __init__(self) -> None:
        self._epochs: dict[int, _Epoch] = {}
        self.guessed: list[Version] = []
        """First versions of epochs whose parent was not recorded and had to be inferred from the steps."""

    def begin(self, version: Version, parent: Version | None) -> None:
        """Record that a learner continued under this version with the weights of `parent`. If an epoch begins more than
        once (its first record may be missing), the earliest step counts."""
        epoch = self._epochs.setdefault(version.epoch, _Epoch(version.step, parent, version.step))
        epoch.began = min(epoch.began, version.step)
        epoch.parent = epoch.parent or parent

    def step(self, version: Version) -> None:
        """Record a step from this version to the next one."""
        self.begin(version, None)
        epoch = self._epochs[version.epoch]
        epoch.reached = max(epoch.reached, version.step + 1)

    @property
    def n_epochs(self) -> int:
        return len(self._epochs)

    def knows(self, version: Version) -> bool:
        """Whether this version existed, as far as is known. One more step than recorded is possible: its record may
        have been lost when the learner died. So are the student and its first step, if the first learner died before
        it recorded anything."""
        epoch = self._epochs.get(version.epoch)
        if epoch is None:
            return version.epoch == 0 and 0 <= version.step <= 1
        return epoch.began <= version.step <= epoch.reached + 1

    @property
    def newest(self) -> Version | None:
        """The newest version; None if there is none."""
        if not self._epochs:
            return None
        epoch = max(self._epochs)
        return Version(epoch, self._epochs[epoch].reached)

    def find_parents(self) -> None:
        """Infer unknown parents: the newest earlier version of that step on the branch of the epoch before."""
        for number in sorted(self._epochs)[1:]:
            epoch = self._epochs[number]
            if epoch.parent is None:
                epoch.parent = self._guess(number, epoch.began)
                if epoch.began:
                    self.guessed.append(Version(number, epoch.began))

    def lineage(self, version: Version) -> Iterator[tuple[Version, int]]:
        """Walk from `version` back to the start: (newest version of an epoch on this branch, first step of that
        epoch)."""
        at: Version | None = version
        while at is not None and (epoch := self._epochs.get(at.epoch)) is not None:
            yield at, epoch.began
            at = epoch.parent if epoch.parent is None or epoch.parent.epoch < at.epoch else None

    def kept(self) -> list[Version]:
        """The versions from which the steps of the kept branch started, by step."""
        newest = self.newest
        steps = (
            Version(top.epoch, step)
            for top, began in (self.lineage(newest) if newest else ())
            for step in range(began, top.step)
        )
        return sorted(steps, key=lambda version: version.step)

    def on_branch(self, version: Version, newest: Version) -> bool:
        """Whether `version` is on the way from the start to `newest`."""
        return any(top.epoch == version.epoch and began <= version.step <= top.step
                   for top, began in self.lineage(newest))  # fmt: skip

    def distance(self, a: Version, b: Version) -> int:
        """Optimizer steps from a back to the version where the branches meet, plus those from there to b."""
        tops = {top.epoch: top.step for top, _ in self.lineage(a)}
        meet = next((min(tops[top.epoch], top.step) for top, _ in self.lineage(b) if top.epoch in tops), 0)
        return a.step - meet + b.step - meet

    def _guess(self, number: int, step: int) -> Version:
        before = [epoch for epoch in sorted(self._epochs, reverse=True) if epoch < number]
        for epoch in before:
            for top, began in self.lineage(Version(epoch, self._epochs[epoch].reached)):
                if began <= step <= top.step:
                    return Version(top.epoch, step)
        return Version(before[0], min(step, self._epochs[before[0]].reached))
