"""A slow, independent account of what the buffer may do, kept from the messages alone, and checked against it.

`BufferModel.watch` sees every message the buffer sends. What it knows of versions, tokens and leases it works out for
itself: distances by walking the tree of versions, per-token arrays from the acknowledged segments. `audit` looks
inside the buffer and recounts what it counts incrementally.
"""
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stillhouse.buffer.config import ATTEMPTS_PER_EPOCH, BufferConfig
from stillhouse.buffer.holdings import Ownership, Place, Progress
from stillhouse.buffer.rollouts import RolloutState, SegmentState, Slot
from stillhouse.buffer.state import BufferState, Outgoing
from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import BatchItem, WeightVersion
from tests.sim.buffer.teacher_model import TeacherModel, audit_scoring

Array = npt.NDArray[Any]


class VersionTree:
    """The same weights may have two names: a fork at step c is the older branch's step c."""

    def __init__(self, start: WeightVersion) -> None:
        self.parents = {start.epoch: start}
        self.first_epoch = start.epoch

    def fork(self, version: WeightVersion, parent: WeightVersion) -> None:
        for epoch in range(max(self.parents) + 1, version.epoch + 1):
            self.parents[epoch] = parent

    def canonical(self, version: WeightVersion) -> WeightVersion:
        epoch = version.epoch
        while epoch > self.first_epoch and version.step <= self.parents[epoch].step:
            epoch = self.parents[epoch].epoch
        return WeightVersion(epoch, version.step)

    def distance(self, a: WeightVersion, b: WeightVersion) -> int:
        """Edges on the path between two versions, found by climbing from the deeper one until they meet."""
        a, b, edges = self.canonical(a), self.canonical(b), 0
        while a != b:
            if a.step < b.step or (a.step == b.step and a.epoch < b.epoch):
                a, b = b, a
            a = self.canonical(WeightVersion(a.epoch, a.step - 1))
            edges += 1
        return edges


@dataclass
class ModelRollout:
    """The part of one attempt that the buffer has acknowledged."""

    ticket: m.Ticket
    order: int
    task: m.Task
    ids: list[Array] = field(default_factory=list[Array])
    logprobs: list[Array] = field(default_factory=list[Array])
    sampled: list[Array] = field(default_factory=list[Array])
    versions: list[WeightVersion | None] = field(default_factory=list[WeightVersion | None])
    before: list[int] = field(default_factory=list[int])
    """For each token, the one that it is read behind; -1: none."""
    dropped: set[int] = field(default_factory=set[int])
    trained: set[int] = field(default_factory=set[int])
    segments: int = 0
    final: bool = False
    finish_reason: str | None = None
    reward: float | None = None

    @property
    def length(self) -> int:
        return len(self.versions)

    def column(self, parts: list[Array], end: int) -> Array:
        return np.concatenate(parts)[:end]

    def path(self, end: int) -> list[int]:
        """The tokens that are read up to token `end` - 1, by walking back from it."""
        places: list[int] = []
        at = end - 1
        while at >= 0:
            places.append(at)
            at = self.before[at]
        return places[::-1]


@dataclass
class ModelBatch:
    message: m.Batch
    arrays: tuple[Array, ...]
    tokens: dict[str, list[int]]
    trained: bool = False


def teacher_logprob(pool: str, ids: Array) -> Array:
    """The teacher log-probs that a pool gives these tokens."""
    return (-0.25 - (len(pool) % 3) - 0.01 * ids).astype(np.float32)


class BufferModel:
    """Raises AssertionError on the first thing that the buffer does wrong."""

    def __init__(self, config: BufferConfig, start: WeightVersion) -> None:
        self.config = config
        self.tree = VersionTree(start)
        self.rollouts: dict[str, ModelRollout] = {}
        self.forgotten: dict[str, ModelRollout] = {}
        """Rollouts that the buffer no longer holds, whose samples it may still have to report as settled."""
        self.tasks: dict[tuple[str, int], m.Task] = {}
        self.batches: dict[int, ModelBatch] = {}
        self.teachers = TeacherModel(config)
        self.orders: dict[tuple[str, int, int, int], int] = {}
        """Ticket order, by kind, task id, how often the task was begun, and sample."""
        self.accepted = Counter[str]()
        self.trained = Counter[str]()
        self.masked = Counter[str]()
        self.rejected = Counter[str]()
        self.trained_tokens_hist = Counter[int]()
        self.pending_segments: dict[tuple[str, int], tuple[m.Segment, tuple[Array, ...]]] = {}
        self.delivered: set[str] = set()
        self.newest: dict[tuple[int, int], ModelRollout] = {}
        """The newest attempt at each train sample."""
        self._held: set[str] = set()
        """Train rollouts that the buffer held after the last event."""
        self._dropped_equal = 0
        """Rollouts that it had dropped for equal rewards by then."""

    # --------------------------------------------------------------------------------------- what peers send

    def segment_sent(self, message: m.Segment, arrays: tuple[Array, ...]) -> None:
        self.pending_segments[message.rollout_id, message.index] = (message, arrays)

    def batch_trained(self, batch_id: int, masked: tuple[str, ...]) -> None:
        """The buffer acknowledged it, and had it leased. Tokens left out are settled as well, and not trained."""
        batch = self.batches[batch_id]
        assert not batch.trained, f"batch {batch_id} trained twice"
        batch.trained = True
        for rollout_id, offsets in batch.tokens.items():
            rollout = self.rollouts[rollout_id]
            twice = rollout.trained.intersection(offsets)
            assert not twice, f"{rollout_id}: tokens {sorted(twice)} trained twice"
            rollout.trained.update(offsets)
            if rollout_id in masked:
                self.masked["non_finite"] += len(offsets)
                continue
            self.trained["tokens"] += len(offsets)
            for offset in offsets:
                sampled_under = rollout.versions[offset]
                assert sampled_under is not None
                self.trained_tokens_hist[self.tree.distance(sampled_under, batch.message.version)] += 1

    def learner_restarted(self) -> None:
        """Discard the batches that the previous learner held."""
        for batch_id in [i for i, batch in self.batches.items() if not batch.trained]:
            del self.batches[batch_id]

    # --------------------------------------------------------------------------------------- what the buffer sends

    def watch(self, now_s: float, state: BufferState, out: Outgoing, pool: str) -> None:
        """One message of the buffer. `pool`: of the teacher it goes to."""
        message = out.message
        match message:
            case m.Tickets():
                for ticket in message.tickets:
                    self._ticket(state, ticket)
            case m.SegmentAck():
                self._segment_ack(message)
            case m.ScoreWork():
                self._score_work(out.name, message, out.arrays, pool)
            case m.ScoresAck():
                self.teachers.answered(now_s, message)
            case m.Batch():
                self._batch(state, message, out.arrays)
            case m.EvalResult():
                for i, item in enumerate(message.items):
                    self._eval_item(item, out.arrays[4 * i : 4 * i + 4])
            case _:
                pass

    def _ticket(self, state: BufferState, ticket: m.Ticket) -> None:
        assert ticket.rollout_id not in self.rollouts, f"{ticket.rollout_id} issued twice"
        task = self.tasks[ticket.kind, ticket.task_id]
        attempt = int(ticket.rollout_id.rsplit("-", 1)[1])
        life = attempt // ATTEMPTS_PER_EPOCH
        key = (ticket.kind, ticket.task_id, life, ticket.sample_index)
        order = self.orders.setdefault(key, state._life.rollouts[ticket.rollout_id].slot.order)
        rollout = self.rollouts[ticket.rollout_id] = ModelRollout(ticket, order, task)
        if ticket.kind == "train":
            self.newest[ticket.task_id, ticket.sample_index] = rollout

    def _segment_ack(self, ack: m.SegmentAck) -> None:
        rollout = self.rollouts.get(ack.rollout_id)
        if ack.status == "rejected":
            assert ack.reason is not None
            self.rejected[ack.reason] += 1
            return
        if ack.status == "duplicate":
            assert rollout is None or ack.index < rollout.segments, f"{ack}: never accepted"
            return
        assert rollout is not None and ack.index == rollout.segments, f"{ack}: out of order"
        message, arrays = self.pending_segments[ack.rollout_id, ack.index]
        ids, logprobs, sampled = arrays
        kind = rollout.ticket.kind
        if rollout.segments == 0:
            self.accepted[f"{kind} rollouts"] += 1
        self.accepted[f"{kind} segments"] += 1
        self.accepted[f"{kind} tokens"] += int(sampled.sum())
        rollout.segments += 1
        rollout.final, rollout.finish_reason, rollout.reward = message.final, message.finish_reason, message.reward
        rollout.ids.append(ids)
        rollout.logprobs.append(logprobs)
        rollout.sampled.append(sampled)
        versions: list[WeightVersion | None] = [None] * len(ids)
        for span in message.spans:
            for at in range(span.start - message.start, span.end - message.start):
                versions[at] = span.version if sampled[at] else None
        rollout.versions += versions
        follows = message.start if message.follows is None else message.follows
        rollout.before += [follows - 1, *range(message.start, message.end - 1)][: len(ids)]
        rollout.dropped.update(at for one in message.dropped for at in range(one.start, one.end))

    def _score_work(self, teacher: str, work: m.ScoreWork, arrays: tuple[Array, ...], pool: str) -> None:
        for item, ids in zip(work.items, arrays, strict=True):
            rollout = self.rollouts[item.rollout_id]
            assert pool in rollout.task.teachers
            path = rollout.path(item.end) or list(range(item.end))
            assert np.array_equal(ids, rollout.column(rollout.ids, item.end)[path]), f"{item}: wrong context"
            assert path[item.start + item.shift :] == list(range(item.start, item.end)), f"{item}: wrong place"
            assert item.first == item.start + (rollout.before[item.start] < 0), f"{item}: wrong first token"
            self.teachers.sent(teacher, pool, item)

    def _batch(self, state: BufferState, message: m.Batch, arrays: tuple[Array, ...]) -> None:
        known = self.batches.get(message.batch_id)
        if known is not None:
            assert known.message.items == message.items, "a repeated batch must be the same"
            assert all(np.array_equal(a, b) for a, b in zip(known.arrays, arrays, strict=True))
            return
        if message.batch_id == 0:
            assert not message.items
            return
        self._check_groups(message)
        tokens: dict[str, list[int]] = {}
        hist = Counter[int]()
        for i, item in enumerate(message.items):
            offsets = self._train_offsets(item, arrays[4 * i : 4 * i + 4])
            if not offsets:
                continue
            rollout = self.rollouts[item.rollout_id]
            assert rollout.ticket.kind == "train"
            assert not (self.config.mask_truncated and rollout.finish_reason == "length"), f"{item}: truncated"
            assert item.rollout_id not in tokens, "a rollout twice in one batch"
            for at in offsets:
                version = rollout.versions[at]
                assert version is not None, f"{item.rollout_id}[{at}] was not sampled"
                distance = self.tree.distance(version, message.version)
                assert distance <= self.config.max_staleness, f"{item.rollout_id}[{at}] is {distance} steps old"
                assert at not in rollout.trained, f"{item.rollout_id}[{at}] was trained before"
                assert at not in rollout.dropped, f"{item.rollout_id}[{at}] is of a dropped response"
                for other in self.batches.values():
                    assert other.trained or at not in other.tokens.get(item.rollout_id, ()), "leased twice"
                hist[distance] += 1
            tokens[item.rollout_id] = offsets
        self._check_choice(state, message, tokens)
        assert dict(hist) == message.staleness, f"{dict(hist)} != {message.staleness}"
        self.batches[message.batch_id] = ModelBatch(message, arrays, tokens)

    def _check_groups(self, message: m.Batch) -> None:
        """With dynamic sampling: something can be learnt from each group that left, and nothing from those that are
        settled as dropped for it."""
        if not self.config.dynamic_sampling:
            return
        for task_id in {item.task_id for item in message.items}:
            rewards = {self.rollouts[i.rollout_id].reward for i in message.items if i.task_id == task_id} - {None}
            assert len(rewards) > 1, f"the rewards of task {task_id} are {rewards}, nothing to learn from"
        for task_id in {one.task_id for one in message.settled if one.reason == "equal_rewards"}:
            fates = [one for one in message.settled if one.task_id == task_id]
            assert len(fates) == self.tasks["train", task_id].group_size, f"part of a dropped group: {fates}"
            assert all(one.fate != "trained" for one in fates), fates
            judged = [one for one in fates if one.fate == "masked" or one.reason == "equal_rewards"]
            rewards = {self.newest[task_id, one.sample_index].reward for one in judged} - {None}
            assert len(rewards) < 2, f"task {task_id} was dropped, its rewards are {rewards}"

    def _check_drops(self, ledger: m.Ledger, state: BufferState) -> None:
        """What was dropped for equal rewards in this event is whole, of a group whose rewards are equal, and counted
        once."""
        held = {rollout_id for rollout_id, one in state._life.rollouts.items() if one.kind == "train"}
        gone, self._held = self._held - held, held
        before, self._dropped_equal = self._dropped_equal, ledger.rollouts.dropped.get("equal_rewards", 0)
        n_dropped = self._dropped_equal - before
        if not n_dropped:
            return
        tasks = {self.rollouts[rollout_id].ticket.task_id for rollout_id in gone}
        equal = [task_id for task_id in tasks if self._equal(task_id)]
        fit = [i for i in gone if self.rollouts[i].final and self.rollouts[i].ticket.task_id in equal]
        assert n_dropped <= len(fit), f"{n_dropped} rollouts dropped, of which only {fit} could be"

    def _equal(self, task_id: int) -> bool:
        """No two rewards differ among the newest attempts at the samples of the task. One that failed has none."""
        samples = range(self.tasks["train", task_id].group_size)
        newest = [one for i in samples if (one := self.newest.get((task_id, i))) is not None]
        return len({one.reward for one in newest} - {None}) < 2

    def _check_choice(self, state: BufferState, message: m.Batch, ids: Collection[str]) -> None:
        """The right rollouts left: in order, the oldest, whole groups, and exactly those of the step. `ids`: of those
        with tokens to train, as they stand in the batch."""
        orders = [self.rollouts[rollout_id].order for rollout_id in ids]
        assert orders == sorted(orders), "items must be in ticket order"
        waiting = [r for r in state._life.rollouts.values() if r.kind == "train" and r.rollout_id not in ids]
        if self.config.release == "rollout":
            groups = {item.task_id for item in message.items}
            assert not [r for r in waiting if r.slot.task.task.task_id in groups], "a group was split"
        else:
            passed_over = [r for r in waiting if r.whole and r.n_offered_tokens and r.slot.order < orders[-1]]
            assert not passed_over, f"older and whole: {passed_over}"
            if self.config.max_staleness == 0:
                assert len(orders) == self.config.batch_rollouts, f"not one step: {orders}, {state!r}"
        if self.config.max_staleness == 0 or self.config.release == "rollout":
            assert all(state._life.rollouts[i].whole for i in ids), "not whole"

    def _train_offsets(self, item: BatchItem, arrays: tuple[Array, ...]) -> list[int]:
        ids, logprobs, train_mask, teacher = arrays
        offsets = [int(at) for at in np.flatnonzero(train_mask)]
        witness = self.config.release == "rollout" and item.reward is not None
        assert offsets or witness, f"{item.rollout_id}: nothing to train in it"
        self._check_item(item, ids, logprobs, teacher, offsets)
        return offsets

    def _check_item(self, item: BatchItem, ids: Array, logprobs: Array, teacher: Array, scored: list[int]) -> None:
        rollout = self.rollouts[item.rollout_id]
        assert item.end <= rollout.length
        assert item.final == (rollout.final and item.end == rollout.length) or not item.final
        assert np.array_equal(ids, rollout.column(rollout.ids, item.end))
        assert np.array_equal(logprobs, rollout.column(rollout.logprobs, item.end))
        assert teacher.shape == (len(item.teachers), item.end)
        for row, pool in enumerate(item.teachers):
            assert np.allclose(teacher[row, scored], teacher_logprob(pool, ids[scored])), f"scores of {pool}"
        begins = {branch.start: branch.follows for branch in item.branches}
        assert [begins.get(at, at) - 1 for at in range(item.end)] == rollout.before[: item.end], "branches of the item"
        seen: list[WeightVersion | None] = [None] * item.end
        for span in item.spans:
            seen[span.start : span.end] = [span.version] * (span.end - span.start)
        for at in range(item.end):
            assert rollout.versions[at] is None or rollout.versions[at] == seen[at], "spans of the item"

    def _eval_item(self, item: BatchItem, arrays: tuple[Array, ...]) -> None:
        ids, logprobs, mask, teacher = arrays
        if item.rollout_id in self.delivered:
            return  # sent again
        rollout = self.rollouts[item.rollout_id]
        assert rollout.ticket.kind == "eval" and rollout.final and item.final
        sampled = rollout.column(rollout.sampled, item.end)
        expected = [bool(sampled[at]) and at not in rollout.dropped for at in range(item.end)]
        assert mask.astype(bool).tolist() == expected
        self._check_item(item, ids, logprobs, teacher, [int(at) for at in np.flatnonzero(mask)])
        self.delivered.add(item.rollout_id)
        self.trained["eval tokens"] += int(mask.sum())

    # --------------------------------------------------------------------------------------------------- checks

    def check(self, snapshot: m.Snapshot, state: BufferState) -> None:
        """After every event."""
        ledger = snapshot.ledger
        assert ledger.balanced, f"the ledger does not balance: {ledger}"
        assert ledger.rollouts.accepted == self.accepted["train rollouts"], (ledger, self.accepted)
        assert ledger.segments.accepted == self.accepted["train segments"], (ledger, self.accepted)
        assert ledger.tokens.accepted == self.accepted["train tokens"], (ledger, self.accepted)
        assert ledger.eval_tokens.accepted == self.accepted["eval tokens"], (ledger, self.accepted)
        assert ledger.tokens.trained == self.trained["tokens"], (ledger, self.trained)
        assert ledger.tokens.masked.get("non_finite", 0) == self.masked["non_finite"], (ledger, self.masked)
        assert ledger.eval_tokens.trained == self.trained["eval tokens"], (ledger, self.trained)
        queues = snapshot.queues
        limit = (self.config.max_staleness + 1) * self.config.batch_rollouts
        assert 0 <= queues["rollouts_live"] <= limit, f"pacing: {queues}"
        open_tokens = sum(queues[f"tokens_{where}"] for where in ("unscored", "scoring", "scored", "in_batch"))
        assert open_tokens == ledger.tokens.waiting + ledger.tokens.in_flight
        self.teachers.check(queues, state)
        self._check_drops(ledger, state)
        assert sum(snapshot.staleness_hist.values()) == ledger.tokens.trained
        assert snapshot.staleness_hist == self.trained_tokens_hist
        assert all(distance <= self.config.max_staleness for distance in snapshot.staleness_hist)

    def forget(self, state: BufferState) -> None:
        """Attempts the buffer no longer holds; should it ever name one again, the lookup fails."""
        slots = [slot for record in state._life.tasks.train_records for slot in record.slots]
        witnesses = {slot.witness.rollout_id for slot in slots if slot.witness is not None}
        live = state._life.rollouts.keys() | witnesses
        for rollout_id in [i for i in self.rollouts if i not in live]:
            rollout = self.rollouts[rollout_id]
            undelivered = rollout.ticket.kind == "eval" and rollout.final and rollout_id not in self.delivered
            if not undelivered:
                self.forgotten[rollout_id] = self.rollouts.pop(rollout_id)
        for key in [key for key in self.pending_segments if key[0] not in live]:
            del self.pending_segments[key]
        for batch_id in [i for i, batch in self.batches.items() if batch.trained]:
            del self.batches[batch_id]
        self.teachers.forget(state)


def audit(state: BufferState) -> None:
    """Recount from scratch what the buffer counts incrementally, and check what must hold among its records."""
    slots = [slot for (kind, _), task in state._life.tasks._active.items() if kind == "train" for slot in task.slots]
    live = [slot for slot in slots if not slot.settled]
    assert state._life.pacing.live == len(live), f"{state._life.pacing} but {len(live)} live samples"
    unready = [slot for slot in live if slot.rollout is None or not slot.rollout.whole]
    assert state._life.unready == len(unready), f"unready {state._life.unready}, recounted {len(unready)}"
    for rollout in state._life.rollouts.values():
        segments, tokens = rollout.segments, rollout.tokens
        assert rollout.slot.rollout is rollout
        assert rollout.n_unsettled == sum(not s.state.settled for s in segments), rollout
        assert rollout.n_unscored == sum(s.state is SegmentState.UNSCORED for s in segments), rollout
        assert rollout.n_in_batch == sum(s.state is SegmentState.IN_BATCH for s in segments), rollout
        assert not (rollout.closed and rollout.n_unsettled == 0), f"{rollout} should be settled"
        front = next((i for i, s in enumerate(segments) if s.state is SegmentState.UNSCORED), len(segments))
        assert rollout.front == front, rollout
        offered = [s for s in segments[:front] if s.state is SegmentState.SCORED]
        assert rollout.offered_segments() == offered, rollout
        assert rollout.n_offered_tokens == sum(s.n_open for s in offered), rollout
        for segment in segments:
            assert segment.n_open == tokens.n_open(segment.start, segment.end), rollout
            assert (segment.n_open == 0) == segment.state.settled, rollout
            unscored = segment.state is SegmentState.UNSCORED
            assert (segment.unscored_pools > 0) == unscored or segment.state >= SegmentState.MASKED, rollout
        for segment in offered:
            for span in segment.spans:
                known = span.version in rollout.offered_versions
                assert known or tokens.n_open(span.start, span.end) == 0, rollout
    audit_scoring(state)
    audit_holdings(state)
    _audit_batches(state)
    if state._config.dynamic_sampling:
        _audit_groups(state)


def _audit_groups(state: BufferState) -> None:
    """No group is kept from which nothing can be learnt: it would hold places that others could use."""
    for record in state._life.tasks.train_records:
        kept = [slot for slot in record.slots if not slot.settled]
        rollouts = [slot.rollout for slot in kept if slot.rollout is not None and slot.rollout.closed]
        leased = any(rollout.n_in_batch or rollout.n_trained_tokens for rollout in rollouts)
        if not kept or record.to_issue or len(rollouts) < len(kept) or leased:
            continue
        gone = [slot.witness for slot in record.slots if slot.witness is not None]
        rewards = {rollout.reward for rollout in (*rollouts, *gone)} - {None}
        assert len(rewards) > 1, f"task {record.task.task_id} is kept, with rewards {rewards}"


def _audit_batches(state: BufferState) -> None:
    desk = state._batches
    in_batch = {id(s) for r in state._life.rollouts.values() for s in r.segments if s.state is SegmentState.IN_BATCH}
    leased = [id(s) for batch in desk.leased.values() for piece in batch.pieces for s in piece.segments]
    assert sorted(in_batch) == sorted(leased)
    _audit_candidates(state)


def _audit_candidates(state: BufferState) -> None:
    """A slow search through all that is held finds the same samples that may leave, and the same weight, but for those
    that have changed since the desk looked. Nothing is changed here: images of the state are compared."""
    life, desk = state._life, state._batches
    groups = desk._config.release == "rollout"

    def order_of(slot: Slot) -> int:
        return slot.task.slots[0].order if groups and slot.task.slots else slot.order

    changed = {order_of(slot) for slot in life.changed.values()} | life.changed.keys()
    found: dict[int, float] = {}
    for rollout in life.rollouts.values():
        if rollout.kind != "train" or rollout.n_offered_tokens == 0 or desk.wanted is None:
            continue
        order = order_of(rollout.slot)
        if order in changed or not (_leaves_together(rollout) if groups else _leaves_alone(rollout, state)):
            continue
        fresh = rollout.whole and rollout.untouched
        mean = desk._mean_tokens or rollout.ticket.sampling.max_new_tokens
        found[order] = found.get(order, 0.0) + (1.0 if fresh else rollout.n_offered_tokens / mean)
    candidates = desk._candidates
    filed = [order for key in candidates._open for order in candidates._bins[key].slots]
    if desk.wanted is not None:
        assert sorted(set(filed) - changed) == sorted(found), f"may leave: {sorted(found)}, filed: {sorted(filed)}"
    for key, one in candidates._bins.items():
        assert set(one.slots) <= set(one._orders), f"{key}: never found by its order"
        assert all(one._orders[(i - 1) // 2] <= order for i, order in enumerate(one._orders) if i), "a heap"
        offers = [candidates._offers[order] for order in one.slots]
        assert all(offer.key == key for offer in offers)
        assert sum(o.tokens for o in offers) == sum(one.sums.tokens_by_limit.values()) == one.sums.tokens
        assert sum(o.rollouts for o in offers) == one.sums.rollouts
    if desk.wanted is not None and not set(filed) & changed:
        weight = candidates.weight(desk._mean_tokens)
        assert abs(weight - sum(found.values())) < 1e-6, f"weight {weight}, of {found}"


def _leaves_alone(rollout: RolloutState, state: BufferState) -> bool:
    desk, segments = state._batches, rollout.segments
    assert desk.wanted is not None
    config = desk._config
    if rollout.closed and all(s.state is not SegmentState.UNSCORED for s in segments):
        return True
    if config.max_staleness == 0 or config.release == "segment":
        return config.max_staleness > 0
    tree = state._life.versions
    ages = [tree.distance(version, desk.wanted) for version in rollout.offered_versions]
    return desk._idle or max(ages) >= config.max_staleness


def _leaves_together(rollout: RolloutState) -> bool:
    task = rollout.slot.task
    others = [slot.rollout for slot in task.slots if not slot.settled]
    return not task.to_issue and all(
        one is not None
        and one.closed
        and all(s.state not in (SegmentState.UNSCORED, SegmentState.IN_BATCH) for s in one.segments)
        for one in others
    )


def audit_holdings(state: BufferState) -> None:
    """What is counted as it changes is what a pass over everything finds, written here once more."""
    for kind in ("train", "eval"):
        expected: Counter[str] = Counter()
        for rollout in state._life.rollouts.values():
            if rollout.kind != kind:
                continue
            leased = False
            for s in rollout.segments:
                if s.state.settled:
                    continue
                at_teacher = s.state is SegmentState.UNSCORED and any(job.lease_id is not None for job in s.jobs)
                place = "SCORING" if at_teacher else s.state.name
                expected[f"segments {place}"] += 1
                expected[f"tokens {place}"] += rollout.tokens.n_open(s.start, s.end)
                expected["bytes"] += len(s.top_ids) + sum(len(payload) for payload in s.top_k.values())
                leased = leased or place in ("SCORING", "IN_BATCH")
            done = "IN_BATCH" if any(s.state is SegmentState.IN_BATCH for s in rollout.segments) else "FINISHED"
            expected[f"rollouts {done if rollout.closed else 'RUNNING'}"] += 1
            if rollout.segments:
                expected["IN_FLIGHT" if leased or not rollout.closed else "WAITING"] += 1
        counts, got = state._life.held.counts[kind], Counter[str]()
        for place in list(Place)[1:]:
            got[f"segments {place.name}"] = counts.segments[place]
            got[f"tokens {place.name}"] = counts.tokens[place]
        for progress in list(Progress)[1:]:
            got[f"rollouts {progress.name}"] = counts.progress[progress]
        for ownership in list(Ownership)[1:]:
            got[ownership.name] = counts.ownership[ownership]
        got["bytes"] = counts.top_k_bytes
        assert +got == +expected and min(got.values()) >= 0, f"{kind}: counted {got}, held {expected}"
        assert state._life.recount()[kind].only_counted() == counts.only_counted(), kind
