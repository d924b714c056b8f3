"""What the buffer holds, in rollouts, segments, tokens and bytes, by where it is.

The counts are kept up to date: whoever changes a segment or a rollout reports it here, and the difference to what was
counted of it before is added. An event therefore costs the same whatever is held, and so does a snapshot.

`recounted` counts everything anew, from the records alone. It shows what the kept counts cannot: a segment that was
lost without a report.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from stillhouse.buffer.ledger import Held, KindHeld
from stillhouse.buffer.rollouts import HeldSegment, RolloutState, SegmentState
from stillhouse.protocol.messages import TaskKind


class Place(enum.IntEnum):
    """Where an unsettled segment is."""

    NOWHERE = 0
    """Settled, or not counted yet."""
    UNSCORED = 1
    SCORING = 2
    """Leased to at least one teacher."""
    SCORED = 3
    IN_BATCH = 4


class Progress(enum.IntEnum):
    """How far a rollout is."""

    GONE = 0
    """Settled, or not counted yet."""
    RUNNING = 1
    """At an actor."""
    FINISHED = 2
    """No longer at an actor, with no segment in a batch."""
    IN_BATCH = 3


class Ownership(enum.IntEnum):
    """Whether a rollout waits for the buffer, or the buffer for somebody else."""

    NOBODY = 0
    """It has no segment."""
    WAITING = 1
    IN_FLIGHT = 2
    """At an actor, or with a segment leased to a teacher or the learner."""


_NOWHERE: Final = int(Place.NOWHERE)
_SCORING: Final = int(Place.SCORING)
_LEASED: Final = (int(Place.SCORING), int(Place.IN_BATCH))
_RUNNING: Final = int(Progress.RUNNING)
_FINISHED: Final = int(Progress.FINISHED)
_LEARNED: Final = int(Progress.IN_BATCH)
_NOBODY: Final = int(Ownership.NOBODY)
_WAITING: Final = int(Ownership.WAITING)
_IN_FLIGHT: Final = int(Ownership.IN_FLIGHT)
_PLACES: Final = (int(Place.UNSCORED), int(Place.SCORED), int(Place.IN_BATCH))
"""Place by state. A segment that is UNSCORED may be leased."""


def _zeros(n: int) -> list[int]:
    return [0] * n


@dataclass(slots=True)
class HeldCounts:
    """Amounts of one task kind. The lists are indexed by the enums above; place 0 of each counts nothing."""

    segments: list[int] = field(default_factory=lambda: _zeros(len(Place)))
    tokens: list[int] = field(default_factory=lambda: _zeros(len(Place)))
    """Open tokens."""
    progress: list[int] = field(default_factory=lambda: _zeros(len(Progress)))
    """Rollouts, as in the next field."""
    ownership: list[int] = field(default_factory=lambda: _zeros(len(Ownership)))
    top_k_bytes: int = 0
    """Size of the teachers' top-k sets, and of the student's likeliest tokens."""

    @property
    def held(self) -> KindHeld:
        """The amounts that the ledger needs."""
        n, tokens = self.segments, self.tokens
        return KindHeld(
            rollouts=Held(self.ownership[Ownership.WAITING], self.ownership[Ownership.IN_FLIGHT]),
            segments=Held(n[Place.UNSCORED] + n[Place.SCORED], n[Place.SCORING] + n[Place.IN_BATCH]),
            tokens=Held(tokens[Place.UNSCORED] + tokens[Place.SCORED], tokens[Place.SCORING] + tokens[Place.IN_BATCH]),
        )

    def only_counted(self) -> HeldCounts:
        """A copy in which place 0 of each list is 0."""
        segments, tokens, progress, ownership = (
            [0, *counts[1:]] for counts in (self.segments, self.tokens, self.progress, self.ownership)
        )
        return HeldCounts(segments, tokens, progress, ownership, self.top_k_bytes)


class Holdings:
    """Counts of what is held, by task kind."""

    def __init__(self) -> None:
        self.counts: dict[TaskKind, HeldCounts] = {"train": HeldCounts(), "eval": HeldCounts()}

    def segment_changed(self, rollout: RolloutState, segment: HeldSegment) -> None:
        """Count a segment again, after its state, its leases, its open tokens or its payloads have changed."""
        counts = self.counts[rollout.kind]
        was, place = segment.counted_place, place_of(segment)
        counts.tokens[was] -= segment.counted_tokens
        counts.tokens[place] += segment.n_open
        segment.counted_tokens = segment.n_open
        if segment.counted_bytes or segment.top_k or segment.top_ids:
            n_bytes = payload_bytes(segment)
            counts.top_k_bytes += n_bytes - segment.counted_bytes
            segment.counted_bytes = n_bytes
        if was == place:
            return
        counts.segments[was] -= 1
        counts.segments[place] += 1
        segment.counted_place = place
        leases = (place in _LEASED) - (was in _LEASED)
        rollout.n_leased += leases
        if leases:
            self.rollout_changed(rollout)

    def rollout_changed(self, rollout: RolloutState) -> None:
        """Count a rollout again, after it was opened or closed, or has got its first segment."""
        progress, ownership = progress_of(rollout), ownership_of(rollout, leased=rollout.n_leased > 0)
        if progress != rollout.counted_progress or ownership != rollout.counted_ownership:
            self._enter(rollout, progress, ownership)

    def rollout_gone(self, rollout: RolloutState) -> None:
        """Count a rollout no longer. Its segments are settled."""
        self._enter(rollout, int(Progress.GONE), _NOBODY)

    def _enter(self, rollout: RolloutState, progress: int, ownership: int) -> None:
        counts = self.counts[rollout.kind]
        counts.progress[rollout.counted_progress] -= 1
        counts.progress[progress] += 1
        counts.ownership[rollout.counted_ownership] -= 1
        counts.ownership[ownership] += 1
        rollout.counted_progress, rollout.counted_ownership = progress, ownership


def place_of(segment: HeldSegment) -> int:
    """The `Place` of a segment, by its own record."""
    state = segment.state
    if state >= SegmentState.TRAINED:
        return _NOWHERE
    if state is SegmentState.UNSCORED and segment.leased_to_teacher:
        return _SCORING
    return _PLACES[state]


def payload_bytes(segment: HeldSegment) -> int:
    """Size of a segment's payloads."""
    return len(segment.top_ids) + sum(map(len, segment.top_k.values()))


def progress_of(rollout: RolloutState) -> int:
    """The `Progress` of an unsettled rollout."""
    if not rollout.closed:
        return _RUNNING
    return _LEARNED if rollout.n_in_batch else _FINISHED


def ownership_of(rollout: RolloutState, *, leased: bool) -> int:
    """The `Ownership` of an unsettled rollout. `leased`: a segment of it is leased to a teacher or the learner."""
    if not rollout.segments:
        return _NOBODY
    return _IN_FLIGHT if leased or not rollout.closed else _WAITING


def recounted(rollouts: Iterable[RolloutState]) -> dict[TaskKind, HeldCounts]:
    """Count all segments of these rollouts, from their records alone: nothing that `Holdings` has noted is read."""
    counts: dict[TaskKind, HeldCounts] = {"train": HeldCounts(), "eval": HeldCounts()}
    for rollout in rollouts:
        count = counts[rollout.kind]
        leased = False
        for segment in rollout.segments:
            place = place_of(segment)
            if place != _NOWHERE:
                count.segments[place] += 1
                count.tokens[place] += segment.n_open
                count.top_k_bytes += payload_bytes(segment)
                leased = leased or place in _LEASED
        count.progress[progress_of(rollout)] += 1
        count.ownership[ownership_of(rollout, leased=leased)] += 1
    for count in counts.values():
        count.ownership[Ownership.NOBODY] = 0
    return counts
