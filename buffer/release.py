"""Batches: which scored tokens leave for the learner and when, and the lease on them until they are trained.

What each sample could release is kept in `buffer.candidates`; an event changes the entry of one sample. The samples are
searched, oldest first, only when the weights of those that may leave add up to a batch.

    weight of a whole rollout of which nothing left before   1
    weight of any other piece                                its open tokens / mean sampled tokens of finished rollouts

A sample could release, depending on `release` (always whole rollouts if max_staleness is 0, as the schedule demands):

    rollout    all of it, when it and every other unsettled sample of its group are whole. Rollouts of the group that
               were masked as a whole go along with nothing to train: advantages are relative to all rewards
    segment    its scored prefix
    deadline   all of it, when it is whole; its scored prefix, when the oldest token of that would be stale in the next
               batch, or when the learner has waited for `idle_release_s`

The learner asks for a batch while it still trains the one before it. `want` names the version that the batch will be
trained against, and everything here goes by that version.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from math import inf

from stillhouse.buffer.batch_size import Room, Size, fits_alone, size_of
from stillhouse.buffer.candidates import PREFIX, WHOLE, Candidates, Key, Offer
from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.departure import Departure
from stillhouse.buffer.history import Runs
from stillhouse.buffer.items import LeasedBatch, Piece, make_item
from stillhouse.buffer.ledger import NON_FINITE, STALE, TOO_LARGE
from stillhouse.buffer.lifecycle import Lifecycle
from stillhouse.buffer.rollouts import Fate, HeldSegment, RolloutState, Slot, TaskRecord
from stillhouse.buffer.tokens import Array
from stillhouse.protocol.messages import BatchItem, Settled, WeightVersion

_ROUNDING = 1e-9
"""Tolerance, as the weights of a rollout's pieces add up to 1 except for rounding."""


class BatchDesk:
    """Owner of the learner's request and of its batch leases."""

    def __init__(self, config: BufferConfig, life: Lifecycle) -> None:
        self._config = config
        self._life = life
        self._tasks = life.tasks
        self._versions = life.versions
        self.wanted: WeightVersion | None = None
        """Version for which the learner has asked for a batch."""
        self.leased: dict[int, LeasedBatch] = {}
        self.trained: Runs[int] = Runs()
        """Epoch in which each trained batch was trained, by batch id."""
        self._departure = Departure()
        self._left_s: float | None = None
        """When the newest batch left."""
        self._n_stale = self._stale_total
        """Tokens that were masked as stale by then."""
        self._idle_since_s: float | None = None
        """When the learner asked for this batch without holding another; None before that."""
        self._idle = False
        self._candidates = Candidates()
        self._mean_tokens: float | None = None
        """Mean length of a rollout by which pieces are weighed: as it was when the batch was asked for, or at the last
        tick."""
        self._next_batch_id = 1

    def __repr__(self) -> str:
        return f"BatchDesk(wanted={self.wanted}, {self._candidates!r}, leased={list(self.leased)}, {self._departure!r})"

    # ------------------------------------------------------------------------------------------------- request

    def want(self, now_s: float, version: WeightVersion) -> None:
        """Note that the learner wants the batch of `version.step`: it waits, or still trains the one before it."""
        if self.wanted != version:
            for batch in self.leased.values():
                self._departure.step_began(now_s, batch.n_tokens)
            self.wanted = version
            self._idle_since_s = None
            self._idle = False
            self._mean_tokens = self._life.mean_sampled_tokens
            self._candidates.open_where(self._is_open)
        if self._idle_since_s is None and not self.leased:
            self._idle_since_s = now_s

    def forget_request(self) -> None:
        self.wanted = None

    def awaited(self, batch: LeasedBatch) -> None:
        """Note that the learner does nothing but wait for a batch that has left."""
        if batch.batch_id == self._next_batch_id - 1:
            self._departure.awaited()

    def leased_for(self, version: WeightVersion) -> LeasedBatch | None:
        return next((batch for batch in self.leased.values() if batch.version == version), None)

    def tick(self, now_s: float) -> None:
        """Let scored prefixes leave after `idle_release_s` of waiting."""
        self._look_again()
        self._mean_tokens = self._life.mean_sampled_tokens
        if self.wanted is None:
            return
        may_idle = self._config.release == "deadline" and self._config.max_staleness > 0
        since_s = self._idle_since_s
        idle = may_idle and since_s is not None and now_s - since_s >= self._config.idle_release_s
        if idle != self._idle:
            self._idle = idle
            self._candidates.open_where(self._is_open)

    def start_anew(self) -> None:
        """Look at all rollouts again, after samples were removed from their tasks (`buffer.go_back`)."""
        self._candidates.clear()
        self._life.changed.clear()
        for rollout in self._life.rollouts.values():
            if rollout.kind == "train":
                self._life.changed[rollout.slot.order] = rollout.slot

    # ------------------------------------------------------------------------------------------------- forming

    def form(self, now_s: float, nothing_follows: Callable[[], bool]) -> LeasedBatch | None:
        """Lease a batch to the learner if one is due. `nothing_follows()`: nothing more can arrive, so that a smaller
        batch is enough. It is called again after the hard check, which may settle rollouts and make room for others."""
        version = self.wanted
        if version is None:
            return None
        self._look_again()
        if not self._candidates.any_open:
            return None
        enough = self._config.batch_rollouts - _ROUNDING
        if self._candidates.weight(self._mean_tokens) < enough and not nothing_follows():
            return None
        runs_out = self._runs_out(version)
        if runs_out and self.leased and self._life.unready and not self._departure.due(now_s):
            return None  # more may come in time
        chosen, weight = self._choose(version, inf if runs_out else enough)
        if not chosen or (weight < enough and not nothing_follows()):
            return None
        batch = self._lease(version, sorted(chosen, key=lambda rollout: rollout.slot.order))
        self._adapt_pacing(now_s, batch.n_tokens)
        self.forget_request()
        self._departure.batch_left(now_s, awaited=self._idle_since_s is not None)
        return batch

    def actors_to_ask(self, now_s: float, round_s: float, scoring_s: float | None) -> float:
        """Share of the actors that are to be asked for what they hold, because a batch is about to leave without it
        (`Departure.turns`)."""
        if self.wanted is None or not self._runs_out(self.wanted):
            return 0.0
        return self._departure.turns(now_s, round_s, scoring_s)

    def settle(
        self, now_s: float, batch: LeasedBatch, version: WeightVersion, masked: Collection[str]
    ) -> dict[int, int]:
        """Count a batch as trained into `version`, except for the rollouts `masked`. Returns trained tokens by
        staleness."""
        del self.leased[batch.batch_id]
        self._departure.step_ended(now_s)
        self.trained.put(batch.batch_id, version.epoch)
        left_out: dict[int, int] = {}
        for rollout, segments in batch.pieces:
            if rollout.rollout_id in masked:
                self._count_staleness(batch.version, rollout, segments, left_out)
                self._life.mask_leased(rollout, segments, NON_FINITE)
            else:
                self._life.train(rollout, segments)
        self._tasks.reported(batch.settled)
        return {d: n - left_out.get(d, 0) for d, n in batch.staleness.items() if n > left_out.get(d, 0)}

    def give_back_all(self) -> None:
        """Let everything that a lost learner held wait again, and forget its request."""
        for batch in self.leased.values():
            for piece in batch.pieces:
                self._life.give_back(piece.rollout, piece.segments)
        self.leased.clear()
        self.forget_request()
        self._departure = Departure()

    # ----------------------------------------------------------------------------------------------- internals

    @property
    def _stale_total(self) -> int:
        return self._life.book.of("train").tokens.masked.get(STALE, 0)

    def _adapt_pacing(self, now_s: float, n_tokens: int) -> None:
        """Tell the pacing how much of what could have been in the batch was stale, and how long the learner waited."""
        n_stale = self._stale_total - self._n_stale
        step_s = now_s - self._left_s if self._left_s is not None else 0.0
        waited_s = min(now_s - self._idle_since_s, step_s) if self._idle_since_s is not None else 0.0
        self._life.pacing.batch_left(n_stale / max(1, n_stale + n_tokens), waited_s / step_s if step_s > 0.0 else 0.0)
        self._n_stale += n_stale
        self._left_s = now_s

    def _runs_out(self, version: WeightVersion) -> bool:
        """Return True if what is sampled now will be too old for the batch after that of `version` (`departure`)."""
        if self._config.max_staleness != 1 or self._config.release == "rollout":
            return False
        after = WeightVersion(version.epoch, version.step + 1)
        return self._versions.distance(self._versions.published, after) > 1

    def _look_again(self) -> None:
        """Enter what has changed of what samples could release."""
        changed = self._life.changed
        for slot in changed.values():
            if self._config.release != "rollout":
                self._candidates.put(slot.order, slot, self._offer(slot), self._is_open)
            else:
                self._candidates.put(slot.task.order, slot, self._group_offer(slot.task), self._is_open)
        changed.clear()

    def _offer(self, slot: Slot) -> Offer | None:
        """What a sample could release once its bin is open."""
        rollout = slot.rollout
        if rollout is None or rollout.n_offered_tokens == 0:
            return None
        key: Key = WHOLE
        if not rollout.whole:
            if self._config.max_staleness == 0:
                return None
            key = PREFIX if self._config.release == "segment" else tuple(sorted(rollout.offered_versions))
        n, limit = rollout.n_offered_tokens, rollout.ticket.sampling.max_new_tokens
        return Offer(key, 1, 0, limit) if rollout.whole and rollout.untouched else Offer(key, 0, n, limit)

    def _group_offer(self, task: TaskRecord) -> Offer | None:
        """The same for a whole group."""
        offering = [rollout for rollout in _whole_group(task) if rollout.n_offered_tokens]
        if not offering:
            return None
        tokens = [rollout.n_offered_tokens for rollout in offering if not rollout.untouched]
        return Offer(WHOLE, len(offering) - len(tokens), sum(tokens), task.task.sampling.max_new_tokens)

    def _is_open(self, key: Key) -> bool:
        """Return True if samples of this bin may leave in the batch that is wanted."""
        return self.wanted is not None and (isinstance(key, str) or self._is_due(key, self.wanted))

    def _is_due(self, versions: Iterable[WeightVersion], version: WeightVersion) -> bool:
        """Return True if a scored prefix may leave (release `deadline`)."""
        oldest = max(self._versions.distance(sampled, version) for sampled in versions)
        return self._idle or oldest >= self._config.max_staleness

    def _rollout_weight(self, rollout: RolloutState) -> float:
        if rollout.n_offered_tokens == 0:
            return 0.0
        if rollout.whole and rollout.untouched:
            return 1.0
        mean = self._life.mean_sampled_tokens or rollout.ticket.sampling.max_new_tokens
        return rollout.n_offered_tokens / mean

    def _may_leave(self, rollout: RolloutState, version: WeightVersion) -> bool:
        if rollout.n_offered_tokens == 0:
            return False
        if rollout.whole or self._config.max_staleness == 0:
            return rollout.whole
        return self._config.release == "segment" or self._is_due(rollout.offered_versions, version)

    def _choose(self, version: WeightVersion, enough: float) -> tuple[list[RolloutState], float]:
        """Choose rollouts, oldest first, until they are enough or no more fits into one message. Tokens that are too
        stale for `version` are masked on the way."""
        chosen: list[RolloutState] = []
        total, room = 0.0, Room()
        with closing(self._candidates.oldest_first()) as slots:
            for slot in slots:
                leaving = self._sendable(slot.task, self._leaving(slot, version))
                if not room.take(_sizes(slot.task, leaving)):
                    return chosen, max(total, enough)
                chosen += leaving
                total += sum(map(self._rollout_weight, leaving))
                if total >= enough:
                    break
        return chosen, total

    def _leaving(self, slot: Slot, version: WeightVersion) -> list[RolloutState]:
        """The sample's rollout, or those of its group, that may leave once stale tokens are masked."""
        by_group = self._config.release == "rollout"
        rollouts = _whole_group(slot.task) if by_group else [slot.rollout] if slot.rollout else []
        leaving: list[RolloutState] = []
        for rollout in rollouts:
            self._life.mask_stale(rollout, version)
            if rollout.n_offered_tokens > 0 and (by_group or self._may_leave(rollout, version)):
                leaving.append(rollout)
        return leaving

    def _sendable(self, task: TaskRecord, leaving: list[RolloutState]) -> list[RolloutState]:
        """The rollouts that can leave together. Those that no message could hold are masked, or they would block all
        others forever."""
        kept = [rollout for rollout in leaving if fits_alone([size_of(rollout)])]
        self._mask_too_large(rollout for rollout in leaving if rollout not in kept)
        if fits_alone(_sizes(task, kept)):
            return kept
        self._mask_too_large(kept)
        return []

    def _mask_too_large(self, rollouts: Iterable[RolloutState]) -> None:
        for rollout in rollouts:
            self._life.mask_leased(rollout, self._life.lease(rollout), TOO_LARGE)

    def _lease(self, version: WeightVersion, rollouts: Iterable[RolloutState]) -> LeasedBatch:
        pieces: list[Piece] = []
        items: list[BatchItem] = []
        arrays: list[Array] = []
        staleness: dict[int, int] = {}
        for rollout in rollouts:
            segments = self._life.lease(rollout)
            pieces.append(Piece(rollout, segments))
            item, item_arrays = make_item(rollout, segments)
            items.append(item)
            arrays += item_arrays
            self._count_staleness(version, rollout, segments, staleness)
        for witness in self._witnesses(pieces):
            item, item_arrays = make_item(witness, ())
            items.append(item)
            arrays += item_arrays
        batch = LeasedBatch(
            batch_id=self._next_batch_id,
            version=version,
            pieces=tuple(pieces),
            items=tuple(items),
            arrays=tuple(arrays),
            staleness=dict(sorted(staleness.items())),
            settled=self._settled_with(pieces),
            n_tokens=sum(staleness.values()),
        )
        self._next_batch_id += 1
        self.leased[batch.batch_id] = batch
        self._versions.may_leave(version)
        return batch

    def _count_staleness(
        self, version: WeightVersion, rollout: RolloutState, segments: Iterable[HeldSegment], staleness: dict[int, int]
    ) -> None:
        """Add the open tokens of `segments` to the histogram. None may be too stale."""
        for segment in segments:
            for span in segment.spans:
                n = rollout.tokens.n_open(span.start, span.end)
                if n == 0:
                    continue
                distance = self._versions.distance(span.version, version)
                if distance > self._config.max_staleness:
                    raise AssertionError(f"{n} tokens of {rollout!r} at distance {distance} from {version}")
                staleness[distance] = staleness.get(distance, 0) + n

    def _witnesses(self, pieces: Iterable[Piece]) -> list[RolloutState]:
        """Rollouts of the groups in `pieces` that have a reward but nothing to train."""
        groups = {piece.rollout.slot.task.task.task_id: piece.rollout.slot.task for piece in pieces}
        return [witness for task in groups.values() for witness in _witnesses_of(task)]

    def _settled_with(self, pieces: Iterable[Piece]) -> tuple[Settled, ...]:
        """Samples settled since the last trained batch, and those that this batch will settle."""
        settled = {(sample.task_id, sample.sample_index): sample for sample in self._tasks.to_report()}
        for rollout, _ in pieces:
            task = rollout.slot.task
            group = task.slots if self._config.release == "rollout" else [rollout.slot]
            for slot in filter(_leaves_nothing, group):
                fate = slot.fate if slot.settled else _fate_if_trained(slot)
                if fate is not None:
                    key = (task.task.task_id, slot.sample_index)
                    settled[key] = Settled(*key, *fate)
        reported = {(one.task_id, one.sample_index) for batch in self.leased.values() for one in batch.settled}
        return tuple(sample for key, sample in settled.items() if key not in reported)


def _whole_group(task: TaskRecord) -> list[RolloutState]:
    """The unsettled rollouts of a task if all of them are whole and none is leased, otherwise none."""
    if not task.all_issued:
        return []
    rollouts: list[RolloutState] = []
    for slot in task.slots:
        if slot.settled:
            continue
        if slot.rollout is None or not slot.rollout.whole or slot.rollout.n_in_batch:
            return []
        rollouts.append(slot.rollout)
    return rollouts


def _witnesses_of(task: TaskRecord) -> list[RolloutState]:
    return [slot.witness for slot in task.slots if slot.witness is not None]


def _sizes(task: TaskRecord, leaving: list[RolloutState]) -> list[Size]:
    """Sizes of these rollouts of a task, and of what goes along with them."""
    return [size_of(rollout) for rollout in (*leaving, *_witnesses_of(task))] if leaving else []


def _fate_if_trained(slot: Slot) -> Fate | None:
    rollout = slot.rollout
    return None if rollout is None else Fate("trained", rollout.masked_reason or rollout.cut_reason)


def _leaves_nothing(slot: Slot) -> bool:
    """Return True if the slot is settled, or will be when the leased batches are trained."""
    rollout = slot.rollout
    return slot.settled or (rollout is not None and rollout.closed and rollout.n_unsettled == rollout.n_in_batch)
