"""Flow control of train tickets: how many may be out, and which weights each one must wait for."""

# Why it is so: docs/decisions/batches-and-pacing.md

from __future__ import annotations

from typing import Final

from stillhouse.protocol.messages import WeightVersion

LEAST_BOUND: Final = 2
"""Bounds from which on fewer rollouts may be out than the bound allows. Below, tokens become stale however few there
are (`buffer.departure`)."""
STALE_SHARE: Final = 0.01
"""Share of a batch's tokens masked as stale on the way to it. With more, fewer rollouts may be out."""
LARGEST_CUT: Final = 0.5
WAITED_SHARE: Final = 0.01
"""Share of a step in which the learner waited for a batch. With more, more rollouts may be out."""
GROWTH: Final = 0.25
"""Part of the share of a step that the learner waited, by which what may be out grows: slowly, since the next batches
come too late as well until more rollouts have been written."""
LEAST_BATCHES: Final = 2
"""At least as many batches of rollouts may be out: one that the learner trains, and one that is written."""


class Pacing:
    """Limits sampling to what can be trained within `max_staleness` steps, so that almost nothing is thrown away.

    S = max_staleness, B = batch_rollouts, t = optimizer steps the learner has trained on the surviving branch.

    live    rollouts with a ticket that are not settled: queued or running at an actor (first try or a later one),
            finished and waiting, or leased to the learner until it says that the batch is trained.

    room    A ticket may be issued only while   live < allowed <= (S + 1) * B.

    allowed Where the learner is slower than the actors, the room is always full, and what is in it waits for S + 1
            steps on average. Then tokens become stale although everything is scored in time. So each time that more
            than 1 % of the tokens for a batch are stale, and the learner has not waited for one of S batches, what is
            allowed falls by that share, but not below 2 B; the next time after S batches at the earliest, since what
            was out before must have left. When the learner has waited for a batch, it grows again, by a quarter of the
            share of the step that was waited. With fewer rollouts out, each is written in fewer steps, so that the
            learner reads less context again.

    weights The n-th ticket will be trained in about step n // B (n counts from the start, without rollouts that are
            dropped for good), so its actor must have at least the weights of step

                start + n // B - S      but never below t - S, nor above t.

            (Below t - S the rollout would be stale in the next batch. Above t no actor could start.) For S = 0 this
            is t itself: the synchronous schedule.

            n is taken as  B * (t - start) + live  when the ticket is issued. This is the number of tickets issued
            before, as long as each batch holds exactly B rollouts and none is dropped. Because n is recomputed each
            time, dropped or masked rollouts and batches of another size cannot push the version out of reach.

    A ticket that is issued again keeps its place in `live` and its n.
    """

    def __init__(self, *, batch_rollouts: int, max_staleness: int, start: WeightVersion) -> None:
        self._batch_rollouts = batch_rollouts
        self._max_staleness = max_staleness
        self._start = start
        self._trained_step = start.step
        self._live = 0
        self._allowed = float(self.limit)
        self._batches_until_cut = 0

    def __repr__(self) -> str:
        return f"Pacing(live={self._live}, allowed={self.allowed}, start={self._start}, trained={self._trained_step})"

    @property
    def limit(self) -> int:
        """The most rollouts that may be out."""
        return (self._max_staleness + 1) * self._batch_rollouts

    @property
    def allowed(self) -> int:
        """Rollouts that may be out now. All that the bound allows while there are none: a group may be larger than a
        batch."""
        return int(self._allowed) if self._live else self.limit

    @property
    def live(self) -> int:
        return self._live

    @property
    def free(self) -> int:
        """Tickets that may be issued now."""
        return max(0, self.allowed - self._live)

    @property
    def places(self) -> int:
        """Tickets that the bound leaves room for, whatever is allowed now."""
        return self.limit - self._live

    @property
    def trained_version(self) -> WeightVersion:
        """The newest version that a batch of the surviving branch was trained into."""
        return WeightVersion(self._start.epoch, self._trained_step)

    def issue(self) -> int:
        """Take one place and return n. Raises RuntimeError if there is none: check `free` first."""
        if self.places <= 0:
            raise RuntimeError(f"no ticket may be issued: {self!r}; expected the caller to ask `free` first")
        n = self._batch_rollouts * (self._trained_step - self._start.step) + self._live
        self._live += 1
        return n

    def settle(self) -> None:
        """Free the place of a rollout that was trained, masked or dropped for good."""
        if self._live <= 0:
            raise RuntimeError(f"more rollouts settled than issued: {self!r}")
        self._live -= 1

    def batch_left(self, stale_share: float, waited_share: float) -> None:
        """Adapt what is allowed. `stale_share`: of the tokens for the batch, those masked as stale since the batch
        before left. `waited_share`: of the time since then, what the learner waited."""
        if self._max_staleness < LEAST_BOUND:
            return
        self._batches_until_cut -= self._batches_until_cut > 0
        if waited_share > WAITED_SHARE:  # whatever else has made tokens stale, fewer rollouts would not help
            self._allowed = min(self._allowed * (1.0 + GROWTH * waited_share), float(self.limit))
        elif stale_share > STALE_SHARE and not self._batches_until_cut:
            kept = min(self._allowed, self._live) * (1.0 - min(stale_share, LARGEST_CUT))
            self._allowed = max(kept, float(LEAST_BATCHES * self._batch_rollouts))
        else:
            return
        self._batches_until_cut = self._max_staleness

    def trained(self, version: WeightVersion) -> None:
        """Note that the learner trained a batch into `version`."""
        if version.epoch == self._start.epoch:
            self._trained_step = max(self._trained_step, version.step)

    def restart(self, version: WeightVersion) -> None:
        """Continue from `version`, with a learner of a higher epoch. Live rollouts keep their places."""
        self._start = version
        self._trained_step = version.step

    def min_version(self, n: int) -> WeightVersion:
        """Version of the weights that the n-th ticket must wait for."""
        step = self._start.step + n // self._batch_rollouts - self._max_staleness
        lowest = max(self._start.step, self._trained_step - self._max_staleness)
        return WeightVersion(self._start.epoch, min(max(step, lowest), self._trained_step))
