"""Score leases: which teacher scores which segment next, and what happens if it fails to.

    segment accepted -> one ScoreJob per pool of its task, queued by (evaluation first, ticket order, index)
    credit + queue   -> lease: to the teacher that had the rollout last if it has room for what is new of it, else to
                        the one with most room for all of it
    lease overdue    -> hedge: once per job, a second lease to another teacher (`buffer.pools`); the first answer counts
    Scores           -> the job is done; after the last pool the segment is SCORED
    ScoreFailed, bad scores, lease over, teacher lost
                     -> queued again, unless it is out at another teacher; after `max_score_attempts` leases the job is
                        given up, and the caller masks its tokens

A job is leased to at most two teachers at a time. A teacher that failed a job gets it again only when all teachers of
the pool have failed it, or after `lease_s`. One that fails job after job receives no work for a while
(`buffer.breaker`). The queue is served strictly in order: a long item waits for a teacher with enough room and is not
overtaken, so that it cannot starve.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from stillhouse.buffer.batch_size import in_messages
from stillhouse.buffer.blobs import KeptBytes, number_of
from stillhouse.buffer.breaker import Breaker
from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.history import Runs
from stillhouse.buffer.holdings import Holdings
from stillhouse.buffer.ledger import LedgerBook, RejectReason
from stillhouse.buffer.peers import Lease, Outbox, TeacherPeer
from stillhouse.buffer.pools import MAX_PASSED_OVER, HedgeCounts, Pool, TeacherHealth, Waste
from stillhouse.buffer.rollouts import HeldSegment, RolloutState, ScoreJob
from stillhouse.buffer.tokens import Array
from stillhouse.buffer.validation import score_refusal, top_k_refusal
from stillhouse.protocol.messages import Scores, ScoreWork

MAX_ANSWER_RUNS = 65_536
"""Limit on runs of leases with equal answers, which are kept so that repeated Scores get the same answer."""


ScoreStatus: TypeAlias = Literal["accepted", "expired", "rejected"]


class LeaseAnswer(NamedTuple):
    """Status and reason of one lease in a ScoresAck."""

    status: ScoreStatus
    reason: str | None = None


class ScoreDesk:
    """Owner of score jobs and leases."""

    def __init__(self, config: BufferConfig, book: LedgerBook, held: Holdings, outbox: Outbox) -> None:
        self._config = config
        self._book = book
        self._held = held
        self._outbox = outbox
        self._pools: dict[str, Pool] = {}
        self._leases: dict[int, Lease] = {}
        self._by_deadline: deque[tuple[float, int]] = deque()
        """(deadline, lease id), ascending. Leases that ended are removed when they reach the front."""
        self._answers: Runs[LeaseAnswer] = Runs()
        """Answers by lease id."""
        self._dirty: dict[str, None] = {}
        """Names of pools in which a lease may have become possible."""
        self._unpardoned: dict[str, None] = {}
        """Names of pools with jobs that wait for a teacher that has not failed them; tried again as time passes."""
        self._next_lease_id = 1
        self._n_queued = 0
        self._health = TeacherHealth(config)
        self._hedges = HedgeCounts()

    def __repr__(self) -> str:
        queued = {name: len(pool.queue) for name, pool in self._pools.items()}
        return f"ScoreDesk(leases={len(self._leases)}, queued={queued}, hedges={self._hedges.sent})"

    @property
    def counts(self) -> dict[str, int]:
        """Counts for the snapshot's `queues`."""
        return {
            "hedges_sent_total": self._hedges.sent,
            "hedges_won_total": self._hedges.won,
            **{f"leases_wasted_{reason}_total": n for reason, n in self._hedges.wasted.items()},
            "breakers_open": len(self.held_back),
            "breakers_opened_total": self._health.opened_total,
            "breaker_probes_total": self._health.probes_total,
        }

    @property
    def usual_s(self) -> float | None:
        """Lease time that is usual in the slowest pool. None: not known yet."""
        times = [pool.usual_s for pool in self._pools.values() if len(pool.times)]
        return max((time_s for time_s in times if time_s is not None), default=None)

    @property
    def held_back(self) -> dict[str, str]:
        """Teachers whose breaker is open, and the items that they failed."""
        return {
            name: t.breaker.against for p in self._pools.values() for name, t in p.teachers.items() if t.breaker.is_open
        }

    def new_breaker(self, name: str) -> Breaker:
        """Make the breaker for a new process of this teacher."""
        return self._health.new_breaker(name)

    # ------------------------------------------------------------------------------------------------ teachers

    def teacher_joined(self, teacher: TeacherPeer) -> None:
        self._pool(teacher.pool).joined(teacher)
        self._dirty[teacher.pool] = None

    def teacher_lost(self, now_s: float, teacher: TeacherPeer) -> list[ScoreJob]:
        """Queue the teacher's leases again. Returns the jobs given up."""
        self._pool(teacher.pool).left(teacher.name)
        self._health.lost(teacher)
        return [job for lease in list(teacher.leases.values()) for job in self._fail(now_s, lease, blame=False)]

    def teacher_forgotten(self, teacher: TeacherPeer) -> None:
        """Forget a teacher that was lost long ago."""
        self._health.forgotten(teacher.name)

    def credit_changed(self, teacher: TeacherPeer) -> None:
        self._dirty[teacher.pool] = None

    # ---------------------------------------------------------------------------------------------------- jobs

    def offer(self, rollout: RolloutState, segment: HeldSegment) -> None:
        """Queue a new segment for every pool of its task."""
        for pool_index in range(len(rollout.affinity)):
            job = ScoreJob(rollout, segment, pool_index)
            segment.jobs.append(job)
            self._queue(job)

    def cancel(self, segment: HeldSegment) -> None:
        """End the leases of a segment whose scores are no longer wanted. Its queued jobs are skipped."""
        for job in segment.jobs:
            job.cancelled = True
            for lease in self._out(job):
                lease.teacher.breaker.inconclusive(lease.lease_id)
                self._end(lease, "hedge_unwanted" if lease.hedge else None)

    def dispatch(self, now_s: float) -> None:
        """Grant all leases that are possible."""
        for pool_name in self._dirty:
            pool = self._pools[pool_name]
            if pool.any_free:
                self._dispatch_pool(now_s, pool)
        self._dirty.clear()

    # -------------------------------------------------------------------------------------------------- answers

    def scores(
        self, now_s: float, teacher: TeacherPeer, message: Scores, arrays: tuple[Array, ...]
    ) -> tuple[list[LeaseAnswer], list[ScoreJob], list[ScoreJob]]:
        """Take in scores. Returns the answers, the jobs done and the jobs given up."""
        answers: list[LeaseAnswer] = []
        done: list[ScoreJob] = []
        given_up: list[ScoreJob] = []
        n_each = 2 if message.top_k else 1
        for i, lease_id in enumerate(message.leases):
            lease = self._lease_of(teacher, lease_id)
            if lease is None:
                self._health.answered_late(teacher, lease_id)
                answers.append(self._answers.get(lease_id) or LeaseAnswer("expired"))
                continue
            refusal = self._keep_scores(lease, arrays[n_each * i : n_each * (i + 1)], n_each, number_of(arrays, i))
            if refusal is not None:
                self._book.reject(refusal)
                answers.append(self._answered(lease_id, LeaseAnswer("rejected", refusal.value)))
                given_up += self._fail(now_s, lease, blame=True)
                continue
            answers.append(self._answered(lease_id, LeaseAnswer("accepted")))
            self._scored(now_s, lease)
            done.append(lease.job)
        return answers, done, given_up

    def failed(
        self, now_s: float, teacher: TeacherPeer, lease_ids: tuple[int, ...]
    ) -> tuple[list[LeaseAnswer], list[ScoreJob]]:
        """Handle leases that the teacher could not score. Returns the answers and the jobs given up."""
        answers: list[LeaseAnswer] = []
        given_up: list[ScoreJob] = []
        for lease_id in lease_ids:
            lease = self._lease_of(teacher, lease_id)
            if lease is None:
                self._health.failed_late(now_s, teacher, lease_id)
                answers.append(self._answers.get(lease_id) or LeaseAnswer("expired"))
                continue
            answers.append(self._answered(lease_id, LeaseAnswer("accepted")))
            given_up += self._fail(now_s, lease, blame=True)
        return answers, given_up

    def expire(self, now_s: float) -> list[ScoreJob]:
        """End leases past their deadline. Returns the jobs given up. The next `dispatch` grants what the passing of
        time has made possible."""
        given_up: list[ScoreJob] = []
        while self._by_deadline:
            deadline_s, lease_id = self._by_deadline[0]
            lease = self._leases.get(lease_id)
            watched = self._health.watches(lease_id)
            if (lease is not None or watched) and deadline_s > now_s:
                break
            self._by_deadline.popleft()
            if lease is not None:
                given_up += self._fail(now_s, lease, blame=True)
            elif watched:
                self._health.ran_out(now_s, lease_id)
        self._dirty.update(self._unpardoned)
        self._unpardoned.clear()
        for pool in self._pools.values():
            if pool.something_is_due(now_s, self._config):
                self._dirty[pool.name] = None
        return given_up

    # ------------------------------------------------------------------------------------------------ internals

    def _pool(self, name: str) -> Pool:
        if name not in self._pools:
            self._pools[name] = Pool(name)
        return self._pools[name]

    def _queue(self, job: ScoreJob) -> None:
        slot = job.rollout.slot
        first = 0 if slot.task.task.kind == "eval" else 1
        self._n_queued += 1
        heapq.heappush(self._pool(job.pool).queue, (first, slot.order, job.segment.index, self._n_queued, job))
        self._dirty[job.pool] = None

    def _dispatch_pool(self, now_s: float, pool: Pool) -> None:
        leases: dict[str, list[Lease]] = {}
        for lease in pool.overdue(now_s, self._config):
            teacher = self._choose(now_s, pool, lease.job)
            if teacher is not None:
                leases.setdefault(teacher.name, []).append(self._lease(now_s, lease.job, teacher))
        passed_over: list[tuple[int, int, int, int, ScoreJob]] = []
        while pool.queue and len(passed_over) < MAX_PASSED_OVER:
            job = pool.queue[0][-1]
            if job.cancelled:
                heapq.heappop(pool.queue)
                continue
            teacher = self._choose(now_s, pool, job)
            if teacher is None and not job.failed_by:
                break
            entry = heapq.heappop(pool.queue)
            if teacher is None:
                passed_over.append(entry)
                continue
            leases.setdefault(teacher.name, []).append(self._lease(now_s, job, teacher))
        for entry in passed_over:
            heapq.heappush(pool.queue, entry)
            self._unpardoned[pool.name] = None
        for name, granted in leases.items():
            pairs = [
                lease.job.rollout.score_item(lease.lease_id, lease.job.segment, lease.known_tokens) for lease in granted
            ]
            for part, frames in in_messages(pairs):
                self._outbox.send("teacher", name, ScoreWork(part), frames)

    def _choose(self, now_s: float, pool: Pool, job: ScoreJob) -> TeacherPeer | None:
        """The teacher for this job, other than one that already has it; None while no teacher that may take it has
        room."""
        teachers = pool.teachers
        holder = self._leases[job.lease_id].teacher if job.lease_id is not None else None
        context_tokens = job.rollout.context_tokens(job.segment)
        forgiven = not job.failed_by or now_s - job.failed_at_s > self._config.lease_s
        if not forgiven and all(name in job.failed_by for name in teachers):
            forgiven = True

        def may_take(teacher: TeacherPeer) -> bool:
            if teacher is holder or (not forgiven and teacher.name in job.failed_by):
                return False
            return teacher.breaker.allows(now_s)

        favourite_name = job.rollout.affinity[job.pool_index]
        favourite = None if favourite_name is None else teachers.get(favourite_name)
        if favourite is not None:
            known_tokens = job.rollout.known_tokens(job.segment, job.pool_index, favourite.name)
            if favourite.has_room(context_tokens - known_tokens) and may_take(favourite):
                return favourite
        return pool.roomiest(context_tokens, lambda teacher: teacher is not favourite and may_take(teacher))

    def _lease(self, now_s: float, job: ScoreJob, teacher: TeacherPeer) -> Lease:
        known_tokens = job.rollout.known_tokens(job.segment, job.pool_index, teacher.name)
        lease = Lease(self._next_lease_id, job, teacher, now_s, job.lease_id is not None, known_tokens)
        self._next_lease_id += 1
        self._leases[lease.lease_id] = lease
        self._by_deadline.append((now_s + self._config.lease_s, lease.lease_id))
        pool = self._pools[teacher.pool]
        if job.lease_id is not None:
            job.hedge_id, job.hedged = lease.lease_id, True
            del pool.unhedged[job.lease_id]
            self._hedges.sent += 1
        else:
            job.lease_id = lease.lease_id
            job.attempts += 1
            job.rollout.affinity[job.pool_index] = teacher.name
            self._held.segment_changed(job.rollout, job.segment)
        pool.granted(lease)
        self._health.sent(lease)
        teacher.item_sent(lease, job.rollout.context_tokens(job.segment) - known_tokens)
        return lease

    def _lease_of(self, teacher: TeacherPeer, lease_id: int) -> Lease | None:
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.teacher is teacher else None

    def _keep_scores(self, lease: Lease, arrays: tuple[Array, ...], n_expected: int, blob: int) -> RejectReason | None:
        """Store scores, or return why they are refused. `arrays`: the log-probs, then the top-k payload if there is
        one. `blob`: the number of the blob in which they came."""
        if len(arrays) != n_expected:
            return RejectReason.SCORE_LENGTH
        segment, tokens, pool_index = lease.job.segment, lease.job.rollout.tokens, lease.job.pool_index
        refusal = score_refusal(segment, tokens.sampled_mask(segment.start, segment.end), arrays[0])
        payloads = [KeptBytes.of(array.tobytes(), blob, 1) for array in arrays[1:]]
        for payload in payloads:
            refusal = refusal or top_k_refusal(segment, payload, self._config.max_top_k_bytes)
        if refusal is None:
            scores_N = arrays[0].astype(np.float32, copy=False)
            tokens.set_scores(pool_index, segment.start, segment.end, scores_N, blob)
            if segment.top_start < segment.top_end:
                segment.top_k.update((pool_index, payload) for payload in payloads)
        return refusal  # the payloads are counted when the lease ends

    def _answered(self, lease_id: int, answer: LeaseAnswer) -> LeaseAnswer:
        self._answers.put(lease_id, answer)
        if self._answers.n_runs > MAX_ANSWER_RUNS:
            self._answers.forget_lowest()
        return answer

    def _scored(self, now_s: float, lease: Lease) -> None:
        """End a lease whose scores were stored. A second lease of the same job was wasted."""
        job, pool = lease.job, self._pools[lease.teacher.pool]
        pool.times.add(now_s - lease.granted_s)
        lease.teacher.breaker.succeeded()
        for other in self._out(job):
            if other is not lease:
                pool.times.add(now_s - other.granted_s)  # a lower bound
                self._health.superseded(other)
                self._end(other, "hedge_late" if other.hedge else "original_late")
        self._end(lease)
        if lease.hedge:
            self._hedges.won += 1
            job.rollout.affinity[job.pool_index] = lease.teacher.name

    def _fail(self, now_s: float, lease: Lease, *, blame: bool) -> list[ScoreJob]:
        """End a lease without scores. Unless another one is out, queue its job again or return it as given up.
        `blame`: the teacher failed, so try another one."""
        self._end(lease, "hedge_failed" if lease.hedge else None)
        job = lease.job
        if blame:
            self._health.failed(now_s, lease)
        else:
            lease.teacher.breaker.inconclusive(lease.lease_id)
        if job.lease_id is not None:
            return []
        if job.attempts >= self._config.max_score_attempts:
            return [job]
        self._queue(job)
        return []

    def _out(self, job: ScoreJob) -> list[Lease]:
        """Leases of the job that are out, the older one first."""
        return [self._leases[lease_id] for lease_id in (job.lease_id, job.hedge_id) if lease_id is not None]

    def _end(self, lease: Lease, waste: Waste | None = None) -> None:
        """Remove a lease. If there were two, the other one remains."""
        job = lease.job
        del self._leases[lease.lease_id]
        del lease.teacher.leases[lease.lease_id]
        if job.lease_id == lease.lease_id:
            job.lease_id = job.hedge_id
        job.hedge_id = None
        self._held.segment_changed(job.rollout, job.segment)
        pool = self._pools[lease.teacher.pool]
        pool.unhedged.pop(lease.lease_id, None)
        self._dirty[pool.name] = None
        if waste is not None:
            self._hedges.wasted[waste] += 1
