"""A slow, independent account of leases and teachers: who may be given what, and when a second teacher may be asked.

Part of `tests.sim.buffer.model`. Kept from the messages alone, but for one thing: that a lease was cancelled is seen in
the buffer, and then its scores must really not be wanted any more.
"""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.pools import MIN_TIMES, WINDOW
from stillhouse.buffer.rollouts import SegmentState
from stillhouse.buffer.state import BufferState
from stillhouse.protocol import messages as m

Key = tuple[str, int, str]
"""Rollout, start, pool: what is scored."""


@dataclass
class ModelLease:
    lease_id: int
    key: Key
    teacher: str
    granted_s: float
    deadline_s: float
    hedge: bool
    superseded: bool = False
    """Answered elsewhere; still at its teacher."""


@dataclass
class ModelTeacher:
    """Items that one teacher process has failed since its last success."""

    failed: list[Key] = field(default_factory=list[Key])
    failed_late: list[Key] = field(default_factory=list[Key])
    """Those of them that another teacher had already scored."""
    opened_s: float | None = None
    opened_at_lease: int = 0


class TeacherModel:
    """Raises AssertionError when a lease goes where it may not."""

    def __init__(self, config: BufferConfig) -> None:
        self.config = config
        self.out: dict[int, ModelLease] = {}
        self.teachers: defaultdict[str, ModelTeacher] = defaultdict(ModelTeacher)
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        """Durations by pool, of answered leases and of leases whose item another teacher answered meanwhile."""
        self.grants: defaultdict[str, list[bool]] = defaultdict(list)
        """Was it a hedge? By pool."""
        self.hedged: set[Key] = set()
        self.failed_by: defaultdict[Key, set[str]] = defaultdict(set)
        self.counts = Counter[str]()
        self.last_lease = 0
        self._sent: list[tuple[int, str, str, m.ScoreItem]] = []

    # --------------------------------------------------------------------------------------------------- grants

    def sent(self, teacher: str, pool: str, item: m.ScoreItem) -> None:
        """Work as one message after the other brings it; looked at when all of an event's are there."""
        self._sent.append((item.lease_id, teacher, pool, item))

    def event_over(self, now_s: float, state: BufferState) -> None:
        """The leases of this event, in the order in which they were granted."""
        for _, teacher, pool, item in sorted(self._sent, key=lambda sent: sent[0]):
            self._granted(now_s, state, teacher, pool, item)
        self._sent.clear()
        for name in [name for name in self.teachers if state._peers.find("teacher", name) is None]:
            self.teachers[name] = ModelTeacher()  # gone for so long that the buffer has forgotten what it did

    def _granted(self, now_s: float, state: BufferState, teacher: str, pool: str, item: m.ScoreItem) -> None:
        self._see_cancelled(state)
        assert item.lease_id > self.last_lease, "lease ids rise"
        key = (item.rollout_id, item.start, pool)
        others = [lease for lease in self.out.values() if lease.key == key and not lease.superseded]
        assert len(others) <= 1, f"{key} leased a third time: {others}"
        for other in others:
            self._check_hedge(now_s, other, teacher, pool)
            self.hedged.add(key)
            self.counts["hedges"] += 1
        self._check_breaker(now_s, teacher)
        self.grants[pool].append(bool(others))
        deadline_s = now_s + self.config.lease_s
        self.out[item.lease_id] = ModelLease(item.lease_id, key, teacher, now_s, deadline_s, bool(others))
        self.last_lease = item.lease_id

    def _check_hedge(self, now_s: float, other: ModelLease, teacher: str, pool: str) -> None:
        assert self.config.hedge_multiple > 0, "hedges are off"
        assert other.teacher != teacher, f"{other} hedged at the same teacher"
        assert other.key not in self.hedged, f"{other.key} hedged twice"
        times = sorted(self.times[pool][-WINDOW:])
        assert len(times) >= MIN_TIMES, "too few times to say what is usual"
        usual_s = next(t for n, t in enumerate(times, 1) if n >= 0.95 * len(times))
        age_s = now_s - other.granted_s
        assert age_s >= self.config.hedge_floor_s and age_s >= self.config.hedge_multiple * usual_s, f"{other}: {age_s}"
        recent = self.grants[pool][-WINDOW:]
        assert sum(recent) + 1 <= self.config.hedge_budget * len(recent), "over the budget"

    def _check_breaker(self, now_s: float, name: str) -> None:
        teacher = self.teachers[name]
        if teacher.opened_s is None:
            return
        assert now_s >= teacher.opened_s + self.config.breaker_backoff_s, f"{name} was given work at once: {teacher}"
        probes = [i for i, lease in self.out.items() if lease.teacher == name and i > teacher.opened_at_lease]
        assert not probes, f"{name} was given a second probe"
        self.counts["probes"] += 1

    def _see_cancelled(self, state: BufferState) -> None:
        """Leases that the buffer has ended although nothing came of them."""
        for lease_id in [i for i, one in self.out.items() if not one.superseded and i not in state._scoring._leases]:
            rollout_id, start, _ = self.out.pop(lease_id).key
            rollout = state._life.rollouts.get(rollout_id)
            segments = [] if rollout is None else [s for s in rollout.segments if s.start == start]
            assert all(s.state is not SegmentState.UNSCORED for s in segments), f"lease {lease_id} was forgotten"
            self.counts["cancelled"] += 1

    # -------------------------------------------------------------------------------------------------- answers

    def _scored(self, now_s: float, lease: ModelLease) -> None:
        del self.out[lease.lease_id]
        assert not lease.superseded, f"{lease} was accepted, and another one before it"
        pool = lease.key[2]
        self.times[pool].append(now_s - lease.granted_s)
        self.counts["hedges_won"] += lease.hedge
        for other in self.out.values():
            if other.key == lease.key:
                other.superseded = True
                self.times[pool].append(now_s - other.granted_s)
                self.counts["hedge_late" if other.hedge else "original_late"] += 1
        teacher = self.teachers[lease.teacher]
        teacher.failed.clear()
        teacher.failed_late.clear()
        teacher.opened_s = None

    def answered(self, now_s: float, ack: m.ScoresAck) -> None:
        """The buffer's word on scores; on failures `failed` knows already."""
        for lease_id, status in zip(ack.leases, ack.statuses, strict=True):
            lease = self.out.get(lease_id)
            if lease is None:
                continue
            if status == "accepted":
                self._scored(now_s, lease)
            elif status == "rejected":
                del self.out[lease_id]
                self._failed(now_s, lease)
            elif lease.superseded:
                del self.out[lease_id]

    def failed(self, now_s: float, lease_id: int, state: BufferState) -> None:
        """The teacher reported a failure, or the deadline passed. Call this before the buffer learns of it."""
        lease = self.out.pop(lease_id, None)
        if lease is None:
            return
        if lease.superseded or lease_id in state._scoring._leases:
            self._failed(now_s, lease)
        else:
            self.counts["cancelled"] += 1

    def _failed(self, now_s: float, lease: ModelLease) -> None:
        teacher = self.teachers[lease.teacher]
        if lease.superseded:
            teacher.failed_late.append(lease.key)
        else:
            self.failed_by[lease.key].add(lease.teacher)
            teacher.failed.append(lease.key)
        self._look_at_breakers(now_s)

    def ticked(self, now_s: float, state: BufferState) -> None:
        """Before the buffer hears of it."""
        for lease_id in [i for i, lease in self.out.items() if lease.deadline_s <= now_s]:
            self.failed(now_s, lease_id, state)

    def lost(self, name: str, *, new_process: bool = False) -> None:
        for lease_id in [i for i, lease in self.out.items() if lease.teacher == name]:
            del self.out[lease_id]
        if new_process:
            self.teachers[name] = ModelTeacher()

    def _look_at_breakers(self, now_s: float) -> None:
        """Open the breaker of a teacher that failed enough items that no other teacher failed."""
        for name, teacher in self.teachers.items():
            against = {key for key in teacher.failed if self.failed_by[key] == {name}} | set(teacher.failed_late)
            if not self.config.breaker_failures or len(against) < self.config.breaker_failures:
                teacher.opened_s = None
            elif teacher.opened_s is None:
                teacher.opened_s, teacher.opened_at_lease = now_s, self.last_lease
                self.counts["opened"] += 1

    def check(self, queues: dict[str, int], state: BufferState) -> None:
        """Hedges are all accounted for; those teachers are held back that should be, for no probe that is over."""
        leases = state._scoring._leases
        for pool in state._scoring._pools.values():
            for name, peer in pool.teachers.items():
                assert peer.breaker.is_open == (self.teachers[name].opened_s is not None), f"{name}: {peer.breaker}"
                probe = peer.breaker._probe
                assert probe is None or probe in leases or self.out[probe].superseded, f"{name}: {peer.breaker}"
        sent, won = queues["hedges_sent_total"], queues["hedges_won_total"]
        assert sent == self.counts["hedges"] and won == self.counts["hedges_won"], (queues, self.counts)
        assert queues["leases_wasted_hedge_late_total"] == self.counts["hedge_late"], (queues, self.counts)
        assert queues["leases_wasted_original_late_total"] == self.counts["original_late"], (queues, self.counts)
        wasted = sum(queues[f"leases_wasted_hedge_{why}_total"] for why in ("late", "failed", "unwanted"))
        open_hedges = sum(lease.hedge for lease in leases.values())
        assert sent == won + wasted + open_hedges, queues

    def forget(self, state: BufferState) -> None:
        """Drop the scores of rollouts that are over, and times and grants that are no longer recent."""
        live = state._life.rollouts
        self.hedged = {key for key in self.hedged if key[0] in live}
        remembered = {key for t in self.teachers.values() for key in t.failed}
        for key in [key for key in self.failed_by if key[0] not in live and key not in remembered]:
            del self.failed_by[key]
        for pool in self.times:
            del self.times[pool][:-WINDOW]
        for pool in self.grants:
            del self.grants[pool][:-WINDOW]


def audit_scoring(state: BufferState) -> None:
    """Leases, as they are held by the desk, by teachers, by jobs and by pools."""
    desk = state._scoring
    leases = desk._leases
    teachers = [t for pool in desk._pools.values() for t in pool.teachers.values()]
    assert {i: lease for t in teachers for i, lease in t.leases.items()} == leases
    for lease_id, lease in leases.items():
        job = lease.job
        assert lease_id in (job.lease_id, job.hedge_id) and not job.cancelled
        assert job.hedge_id is None or leases[job.hedge_id].teacher is not leases[job.lease_id or 0].teacher
        assert job.segment.state is SegmentState.UNSCORED
        assert job.rollout.rollout_id in state._life.rollouts
    for name, pool in desk._pools.items():
        unhedged = [i for i, lease in leases.items() if lease.job.pool == name and not lease.job.hedged]
        assert list(pool.unhedged) == sorted(unhedged)
        assert pool.times._sorted == sorted(pool.times._in_order) and len(pool.times) <= WINDOW
        assert pool.budget._n_hedges == sum(pool.budget._recent)
        usual_s = pool.times.quantile(0.95)
        assert usual_s is None or math.isfinite(usual_s)
    assert state._scoring.counts["breakers_open"] == sum(t.breaker.is_open for t in teachers)
