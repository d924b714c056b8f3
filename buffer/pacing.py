"""Flow control of train tickets: how many may be out, and which weights each one must wait for."""

from __future__ import annotations

from protocol.messages import WeightVersion


class Pacing:
    """Limits sampling to what can be trained within `max_staleness` steps, so that almost nothing is thrown away.

    S = max_staleness, B = batch_rollouts, t = optimizer steps the learner has trained on the surviving branch.

    live    rollouts with a ticket that are not settled: queued or running at an actor (first try or a later one),
            finished and waiting, or leased to the learner until it says that the batch is trained.

    room    A ticket may be issued only while   live < (S + 1) * B.

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

    def __repr__(self) -> str:
        return f"Pacing(live={self._live}, limit={self.limit}, start={self._start}, trained={self._trained_step})"

    @property
    def limit(self) -> int:
        return (self._max_staleness + 1) * self._batch_rollouts

    @property
    def live(self) -> int:
        return self._live

    @property
    def free(self) -> int:
        """Tickets that may be issued now."""
        return self.limit - self._live

    @property
    def trained_version(self) -> WeightVersion:
        """The newest version that a batch of the surviving branch was trained into."""
        return WeightVersion(self._start.epoch, self._trained_step)

    def issue(self) -> int:
        """Take one place and return n. Raises RuntimeError if there is none: check `free` first."""
        if self.free <= 0:
            raise RuntimeError(f"no ticket may be issued: {self!r}; expected the caller to ask `free` first")
        n = self._batch_rollouts * (self._trained_step - self._start.step) + self._live
        self._live += 1
        return n

    def settle(self) -> None:
        """Free the place of a rollout that was trained, masked or dropped for good."""
        if self._live <= 0:
            raise RuntimeError(f"more rollouts settled than issued: {self!r}")
        self._live -= 1

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
