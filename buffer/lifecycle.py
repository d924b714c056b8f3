"""The state of segments, rollouts and samples, and the ledger of what happens to them.

Every change of a `SegmentState` happens in `Lifecycle`, together with its ledger entry. Nothing here decides: the
decisions are made in `scoring`, `release` and `evals`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from stillhouse.buffer.blobs import KeptBytes, number_of
from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.history import EndedRollouts
from stillhouse.buffer.holdings import HeldCounts, Holdings, recounted
from stillhouse.buffer.ledger import CONTEXT, RUN_ENDED, STALE, LedgerBook
from stillhouse.buffer.pacing import Pacing
from stillhouse.buffer.rollouts import Fate, HeldSegment, RolloutState, SegmentState, Slot
from stillhouse.buffer.task_book import TaskBook
from stillhouse.buffer.tokens import Array
from stillhouse.buffer.validation import frames_of
from stillhouse.buffer.versions import VersionTable
from stillhouse.protocol.branches import path_to
from stillhouse.protocol.messages import KEPT_IDS, Branch, Dropped, Ledger, TaskKind, Ticket, WeightVersion
from stillhouse.protocol.messages import Segment as SegmentMessage


class Lifecycle:
    """Accepts, scores, leases, trains, masks and drops, and owns the books that this changes."""

    def __init__(self, config: BufferConfig, start: WeightVersion, carried: Ledger | None) -> None:
        """`start`: version of the weights that the run (re)starts from. `carried`: ledger of the run before a
        restart."""
        self.rollouts: dict[str, RolloutState] = {}
        """Rollouts that are not settled, by id."""
        self.held = Holdings()
        """Counts of what they hold."""
        self.changed: dict[int, Slot] = {}
        """Train samples whose part in the next batch may have changed since `BatchDesk` looked, by order."""
        self.unready = 0
        """Train samples with a ticket that are neither settled nor whole, so that more of them may arrive."""
        self._whole_groups = config.release == "rollout"
        """The samples of a task leave in one batch."""
        self._max_staleness = config.max_staleness
        self.book = LedgerBook(carried)
        self.versions = VersionTable(start)
        self.pacing = Pacing(batch_rollouts=config.batch_rollouts, max_staleness=config.max_staleness, start=start)
        self.tasks = TaskBook(
            config.task_queue,
            config.max_attempts,
            whole_groups=self._whole_groups,
            epoch=start.epoch,
        )
        self._ended = EndedRollouts()
        self._finished_rollouts = 0
        self._finished_tokens = 0

    # ------------------------------------------------------------------------------------- tickets and arrival

    def open(self, slot: Slot, ticket: Ticket, actor: str) -> RolloutState:
        """Begin the slot's next attempt: its ticket leaves for an actor."""
        rollout = RolloutState(slot, ticket, actor)
        slot.rollout = rollout
        self.rollouts[ticket.rollout_id] = rollout
        self.held.rollout_changed(rollout)
        return rollout

    def slot_issued(self, slot: Slot) -> None:
        """Note that a sample gets its first ticket."""
        if slot.task.task.kind == "train":
            self.unready += 1

    def accept(self, rollout: RolloutState, message: SegmentMessage, arrays: tuple[Array, ...]) -> HeldSegment:
        """Store a segment that passed `buffer.validation`."""
        (ids_N, logprobs_N, loss_mask_N), top_ids, experts = frames_of(message, arrays)
        n_sampled = int(loss_mask_N.sum())
        sampled_N = np.flatnonzero(loss_mask_N)
        top_range = (message.start, message.start)
        if rollout.kind == "train" and n_sampled:
            top_range = (message.start + int(sampled_N[0]), message.start + int(sampled_N[-1]) + 1)
        other_tokens = 0
        if message.follows is not None:
            rollout.branches.append(Branch(message.start, message.follows))
        if rollout.branches:
            other_tokens = message.end - sum(end - start for start, end in path_to(rollout.branches, message.end))
        n_pools = len(rollout.affinity)
        segment = HeldSegment(message.index, message.start, message.end, message.spans, n_sampled, n_pools, *top_range)
        segment.other_tokens = other_tokens
        blob = number_of(arrays)
        if top_ids:
            payload = KeptBytes.of(top_ids[0].tobytes(), blob, 3)
            if not rollout.ticket.sampling.kept:
                segment.top_ids = payload
            elif rollout.kind == "train":
                segment.top_k[KEPT_IDS] = payload
        if experts:
            segment.experts = KeptBytes.of(experts[0].tobytes(), blob, 3 + len(top_ids))
        counts = self.book.of(rollout.kind)
        counts.segments.accept()
        counts.tokens.accept(n_sampled)
        rollout.tokens.append(ids_N, logprobs_N, loss_mask_N, blob)
        rollout.segments.append(segment)
        if len(rollout.segments) == 1:
            counts.rollouts.accept()
            self.held.rollout_changed(rollout)
        rollout.n_sampled += n_sampled
        rollout.n_turns = message.n_turns
        rollout.n_unsettled += 1
        rollout.n_unscored += 1
        if n_sampled == 0:
            segment.masked_reason = CONTEXT
            self._settle_segment(rollout, segment)
        elif segment.unscored_pools == 0:
            self._make_scored(rollout, segment)
        else:
            self.held.segment_changed(rollout, segment)
        return segment

    def finish(self, rollout: RolloutState, message: SegmentMessage) -> None:
        """Close the rollout: its final segment is stored."""
        rollout.final = True
        rollout.finish_reason = message.finish_reason
        rollout.reward = message.reward
        rollout.turn_rewards = message.turn_rewards
        if rollout.kind == "train":
            self._finished_rollouts += 1
            self._finished_tokens += rollout.n_sampled
        self.close(rollout)

    def close(self, rollout: RolloutState, reason: str = "") -> None:
        """Expect no further segment, because the rollout is whole or for the given reason. Accepted segments stay. A
        rollout with nothing open is settled."""
        rollout.closed = True
        rollout.cut_reason = reason
        self.held.rollout_changed(rollout)
        self._after_change(rollout)

    def ended_segments(self, rollout_id: str) -> int | None:
        """Segments accepted of a rollout that is settled or dropped; None if no such rollout is remembered."""
        return self._ended.get(rollout_id)

    @property
    def mean_sampled_tokens(self) -> float | None:
        """Sampled tokens per finished train rollout so far; None before the first one or while it would be 0."""
        if self._finished_tokens == 0:
            return None
        return self._finished_tokens / self._finished_rollouts

    # ------------------------------------------------------------------------------------------------- scoring

    def pool_scored(self, rollout: RolloutState, segment: HeldSegment) -> None:
        """Note that one more pool has scored the segment."""
        segment.unscored_pools -= 1
        if segment.unscored_pools == 0:
            self._make_scored(rollout, segment)
            self._after_change(rollout)

    def mask_segment(self, rollout: RolloutState, segment: HeldSegment, reason: str) -> None:
        """Mask the sampled tokens of an UNSCORED segment that will never be scored."""
        self._mask_tokens(rollout, segment, segment.start, segment.end, reason)
        self._settle_segment(rollout, segment)
        self._after_change(rollout)

    # ------------------------------------------------------------------------------------------------- release

    def mask_stale(self, rollout: RolloutState, version: WeightVersion) -> None:
        """The hard check: of all that the rollout could release, mask the tokens that are too stale for `version`."""
        if all(self.versions.distance(v, version) <= self._max_staleness for v in rollout.offered_versions):
            return
        for segment in rollout.offered_segments():
            for span in segment.spans:
                if self.versions.distance(span.version, version) > self._max_staleness:
                    self._mask_tokens(rollout, segment, span.start, span.end, STALE)
            if segment.n_open == 0:
                self._settle_segment(rollout, segment)
        self._offer_again(rollout)
        self._after_change(rollout)

    def mask_dropped(
        self, rollout: RolloutState, dropped: Sequence[Dropped], cancel: Callable[[HeldSegment], None]
    ) -> None:
        """Mask the open tokens of responses that are not to be trained. Tokens in a batch stay: the learner has them
        already; should the batch come back, `give_back` masks them. `cancel` is called with each UNSCORED segment
        before it is settled."""
        rollout.dropped = tuple(dropped)
        if not dropped:
            return
        for segment in rollout.segments:
            if segment.state > SegmentState.SCORED:
                continue
            self._mask_ranges(rollout, segment, dropped)
            if segment.n_open == 0:
                if segment.state is SegmentState.UNSCORED:
                    cancel(segment)
                self._settle_segment(rollout, segment)
        self._offer_again(rollout)

    def mask_rollout(self, rollout: RolloutState, reason: str, cancel: Callable[[HeldSegment], None]) -> None:
        """Mask all open tokens of a rollout of which nothing has left. `cancel` as in `mask_dropped`."""
        for segment in rollout.segments:
            if segment.state.settled:
                continue
            self._mask_tokens(rollout, segment, segment.start, segment.end, reason)
            if segment.state is SegmentState.UNSCORED:
                cancel(segment)
            self._settle_segment(rollout, segment)
        self._offer_again(rollout)

    def lease(self, rollout: RolloutState) -> tuple[HeldSegment, ...]:
        """Put everything that the rollout could release into a batch, and return it."""
        segments = tuple(rollout.offered_segments())
        for segment in segments:
            segment.state = SegmentState.IN_BATCH
        rollout.n_in_batch += len(segments)
        rollout.n_offered_tokens = 0
        rollout.offered_versions.clear()
        rollout.offer_from = rollout.front
        for segment in segments:
            self.held.segment_changed(rollout, segment)
        self._weigh_again(rollout.slot)
        return segments

    def give_back(self, rollout: RolloutState, segments: Iterable[HeldSegment]) -> None:
        """Let the segments of a batch that was lost with its learner wait again, but for what has been dropped since
        they left."""
        for segment in segments:
            segment.state = SegmentState.SCORED
            rollout.n_in_batch -= 1
            self.held.segment_changed(rollout, segment)
            self._mask_ranges(rollout, segment, rollout.dropped)
            if segment.n_open:
                self._offer(rollout, segment)
            else:
                self._settle_segment(rollout, segment)
        self._after_change(rollout)

    def train(self, rollout: RolloutState, segments: Iterable[HeldSegment]) -> None:
        """Count the open tokens of these segments as trained (evaluation: delivered)."""
        tokens = self.book.of(rollout.kind).tokens
        for segment in segments:
            n = rollout.tokens.settle(segment.start, segment.end)
            tokens.train(n)
            segment.n_open -= n
            segment.n_trained += n
            rollout.n_trained_tokens += n
            self._settle_segment(rollout, segment)
        self._after_change(rollout)

    def mask_leased(self, rollout: RolloutState, segments: Iterable[HeldSegment], reason: str) -> None:
        """Mask leased segments, e.g. because the learner left the rollout out of its step."""
        for segment in segments:
            self._mask_tokens(rollout, segment, segment.start, segment.end, reason)
            self._settle_segment(rollout, segment)
        self._after_change(rollout)

    def deliver(self, rollout: RolloutState) -> None:
        """Hand a whole evaluation rollout to the learner."""
        self.train(rollout, self.lease(rollout))

    # -------------------------------------------------------------------------------------------------- the end

    def drop(self, rollout: RolloutState, reason: str) -> None:
        """End the attempt and drop whatever is open of it. The slot stays: see `slot_over` and `TaskBook`."""
        rollout.closed = True
        rollout.drop_reason = reason
        tokens = self.book.of(rollout.kind).tokens
        for segment in rollout.segments:
            if not segment.state.settled:
                n = rollout.tokens.settle(segment.start, segment.end)
                tokens.drop(n, reason)
                segment.n_open -= n
                self._settle_segment(rollout, segment)
        self._end(rollout)

    def slot_over(self, slot: Slot) -> None:
        """Settle the sample for good: its place in the pacing is free, and its task may be done."""
        self.slot_freed(slot)
        self.tasks.slot_settled(slot, slot.fate or Fate("dropped", RUN_ENDED))

    def slot_freed(self, slot: Slot) -> None:
        """Expect nothing more from the slot, and free its place in the pacing."""
        self._weigh_again(slot)
        slot.settled = True
        slot.rollout = None
        if slot.task.task.kind == "train":
            if not slot.ready:
                self.unready -= 1
            self.pacing.settle()

    def recount(self) -> dict[TaskKind, HeldCounts]:
        """Count what is stored, segment by segment, independently of the ledger and of `held`."""
        return recounted(self.rollouts.values())

    # ------------------------------------------------------------------------------------------------ internals

    def _make_scored(self, rollout: RolloutState, segment: HeldSegment) -> None:
        segment.state = SegmentState.SCORED
        segment.jobs.clear()
        segment.top_ids = b""
        rollout.n_unscored -= 1
        self.held.segment_changed(rollout, segment)
        self._advance_front(rollout)

    def _advance_front(self, rollout: RolloutState) -> None:
        segments = rollout.segments
        while rollout.front < len(segments) and segments[rollout.front].state is not SegmentState.UNSCORED:
            segment = segments[rollout.front]
            rollout.front += 1
            if segment.state is SegmentState.SCORED:
                self._offer(rollout, segment)

    def _offer_again(self, rollout: RolloutState) -> None:
        """Count anew what the rollout could release, because some of it was masked."""
        rollout.n_offered_tokens = 0
        rollout.offered_versions.clear()
        for segment in rollout.offered_segments():
            self._offer(rollout, segment)

    def _offer(self, rollout: RolloutState, segment: HeldSegment) -> None:
        rollout.n_offered_tokens += segment.n_open
        rollout.offer_from = min(rollout.offer_from, segment.index)
        for span in segment.spans:
            rollout.offered_versions.add(span.version)
        self._weigh_again(rollout.slot)

    def _mask_ranges(self, rollout: RolloutState, segment: HeldSegment, ranges: Iterable[Dropped]) -> None:
        """Mask what a segment has of these ranges."""
        for one in ranges:
            start, end = max(segment.start, one.start), min(segment.end, one.end)
            if start < end:
                self._mask_tokens(rollout, segment, start, end, one.reason)

    def _mask_tokens(self, rollout: RolloutState, segment: HeldSegment, start: int, end: int, reason: str) -> None:
        n = rollout.tokens.settle(start, end)
        if n == 0:
            return
        self.book.of(rollout.kind).tokens.mask(n, reason)
        segment.n_open -= n
        segment.masked_reason = segment.masked_reason or reason
        rollout.masked_reason = rollout.masked_reason or reason
        self.held.segment_changed(rollout, segment)

    def _settle_segment(self, rollout: RolloutState, segment: HeldSegment) -> None:
        """Enter what happened to a segment that has no open token left."""
        counts = self.book.of(rollout.kind).segments
        segment.top_k.clear()
        segment.top_ids = b""
        was = segment.state
        if segment.n_trained > 0:
            segment.state = SegmentState.TRAINED
            counts.train()
        elif rollout.drop_reason is not None:
            segment.state = SegmentState.DROPPED
            counts.drop(1, rollout.drop_reason)
        else:
            segment.state = SegmentState.MASKED
            counts.mask(1, segment.masked_reason or CONTEXT)
        rollout.n_unsettled -= 1
        if was is SegmentState.UNSCORED:
            segment.jobs.clear()
            rollout.n_unscored -= 1
            self._advance_front(rollout)
        elif was is SegmentState.IN_BATCH:
            rollout.n_in_batch -= 1
        self.held.segment_changed(rollout, segment)

    def _weigh_again(self, slot: Slot) -> None:
        if slot.task.task.kind == "train":
            self.changed[slot.order] = slot

    def _after_change(self, rollout: RolloutState) -> None:
        slot = rollout.slot
        self._weigh_again(slot)
        if rollout.whole and not slot.ready:
            slot.ready = True
            if rollout.kind == "train":
                self.unready -= 1
        if rollout.closed and rollout.n_unsettled == 0:
            self._end(rollout)
            self.slot_over(slot)

    def _end(self, rollout: RolloutState) -> None:
        """Enter the rollout's fate, and forget everything but its number of segments."""
        if rollout.segments:
            counts = self.book.of(rollout.kind).rollouts
            if rollout.n_trained_tokens > 0:
                counts.train()
            elif rollout.drop_reason is not None:
                counts.drop(1, rollout.drop_reason)
            else:
                counts.mask(1, rollout.masked_reason or CONTEXT)
        rollout.slot.fate = rollout.fate
        if self._whole_groups and rollout.final and rollout.fate.fate == "masked" and rollout.reward is not None:
            rollout.slot.witness = rollout
        self.held.rollout_gone(rollout)
        self._weigh_again(rollout.slot)
        del self.rollouts[rollout.rollout_id]
        self._ended.put(rollout.rollout_id, len(rollout.segments))
        rollout.slot.rollout = None
