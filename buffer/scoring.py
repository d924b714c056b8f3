"""Score leases: which teacher scores which segment next, and what happens when it does not.

    segment accepted -> one ScoreJob per pool of its task, queued by (evaluation first, ticket order, index)
    credit + queue   -> lease: to the teacher that had the rollout last if it has room, else to the one with most room
    Scores           -> the job is done; after the last pool the segment is SCORED
    ScoreFailed, bad scores, lease over, teacher lost
                     -> queued again; after `max_score_attempts` leases the job is given up (the caller masks)

A job is never leased twice at a time. A teacher that failed a job gets it again only when all teachers of the pool
have failed it, or after `lease_s`. The queue is served strictly in order: a long item that fits nowhere waits for room
and is not overtaken, so that it cannot starve.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from buffer.config import BufferConfig
from buffer.ledger import LedgerBook, RejectReason
from buffer.peers import Lease, TeacherPeer
from buffer.rollouts import Rollout, ScoreJob, Segment
from buffer.runs import Runs
from buffer.tokens import Array
from buffer.validation import score_refusal, top_k_refusal
from protocol.messages import ScoreItem, Scores, ScoreWork

MAX_ANSWER_RUNS = 65_536
"""Of leases in a row that were answered alike, kept so that repeated Scores get the same answer."""
_MAX_PASSED_OVER = 32
"""Jobs that no teacher with room may take (they failed it) looked past in one go."""


ScoreStatus: TypeAlias = Literal["accepted", "expired", "rejected"]


class Answer(NamedTuple):
    """Status and reason for a ScoresAck."""

    status: ScoreStatus
    reason: str | None = None


class Work(NamedTuple):
    """Items for one teacher, and their token ids."""

    teacher: TeacherPeer
    message: ScoreWork
    arrays: tuple[Array, ...]


class Pool:
    """The queue of one pool, and its teachers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: list[tuple[int, int, int, int, ScoreJob]] = []
        self.teachers: dict[str, TeacherPeer] = {}


class ScoreDesk:
    """Owner of score jobs and leases."""

    def __init__(self, config: BufferConfig, book: LedgerBook) -> None:
        self._config = config
        self._book = book
        self._pools: dict[str, Pool] = {}
        self._leases: dict[int, Lease] = {}
        self._by_deadline: deque[tuple[float, int]] = deque()
        """Begins with a lease that is out, or was when time was last looked at."""
        self._answers: Runs[Answer] = Runs()
        """By lease."""
        self._dirty: dict[str, None] = {}
        """Pools in which something may be leased."""
        self._unpardoned: dict[str, None] = {}
        """Pools with jobs that wait for a teacher that has not failed them; looked at again as time goes by."""
        self._next_lease_id = 1
        self._n_queued = 0

    def __repr__(self) -> str:
        return f"ScoreDesk(leases={len(self._leases)}, queued={ {k: len(p.queue) for k, p in self._pools.items()} })"

    @property
    def n_leases(self) -> int:
        return len(self._leases)

    # ------------------------------------------------------------------------------------------------ teachers

    def teacher_joined(self, teacher: TeacherPeer) -> None:
        self._pool(teacher.pool).teachers[teacher.name] = teacher
        self._dirty[teacher.pool] = None

    def teacher_lost(self, now_s: float, teacher: TeacherPeer) -> list[ScoreJob]:
        """Its leases go back to the queue; returns the jobs given up."""
        self._pool(teacher.pool).teachers.pop(teacher.name, None)
        return [job for lease in list(teacher.leases.values()) for job in self._fail(now_s, lease, blame=False)]

    def credit_changed(self, teacher: TeacherPeer) -> None:
        self._dirty[teacher.pool] = None

    # ---------------------------------------------------------------------------------------------------- jobs

    def offer(self, rollout: Rollout, segment: Segment) -> None:
        """Queue a new segment for every pool of its task."""
        for pool_index in range(len(rollout.affinity)):
            job = ScoreJob(rollout, segment, pool_index)
            segment.jobs.append(job)
            self._queue(job)

    def cancel(self, segment: Segment) -> None:
        """Its scores are no longer wanted: leases end, queued jobs are skipped."""
        for job in segment.jobs:
            job.cancelled = True
            if job.lease_id is not None:
                self._end(self._leases[job.lease_id])

    def dispatch(self, now_s: float) -> list[Work]:
        """Lease what can be leased."""
        work: list[Work] = []
        for pool_name in self._dirty:
            pool = self._pools[pool_name]
            if pool.queue and any(teacher.free_tokens > 0 for teacher in pool.teachers.values()):
                work += self._dispatch_pool(now_s, pool)
        self._dirty.clear()
        return work

    # -------------------------------------------------------------------------------------------------- answers

    def scores(
        self, now_s: float, teacher: TeacherPeer, message: Scores, arrays: tuple[Array, ...]
    ) -> tuple[list[Answer], list[ScoreJob], list[ScoreJob]]:
        """Scores came. Returns the answers, the jobs done and the jobs given up."""
        answers: list[Answer] = []
        done: list[ScoreJob] = []
        given_up: list[ScoreJob] = []
        n_each = 2 if message.top_k else 1
        for i, lease_id in enumerate(message.leases):
            lease = self._lease_of(teacher, lease_id)
            if lease is None:
                answers.append(self._answers.get(lease_id) or Answer("expired"))
                continue
            refusal = self._keep_scores(lease, arrays[n_each * i : n_each * (i + 1)], n_each)
            if refusal is not None:
                self._book.reject(refusal)
                answers.append(self._answered(lease_id, Answer("rejected", refusal.value)))
                given_up += self._fail(now_s, lease, blame=True)
                continue
            answers.append(self._answered(lease_id, Answer("accepted")))
            self._end(lease)
            done.append(lease.job)
        return answers, done, given_up

    def failed(
        self, now_s: float, teacher: TeacherPeer, lease_ids: tuple[int, ...]
    ) -> tuple[list[Answer], list[ScoreJob]]:
        """The teacher could not score these. Returns the answers and the jobs given up."""
        answers: list[Answer] = []
        given_up: list[ScoreJob] = []
        for lease_id in lease_ids:
            lease = self._lease_of(teacher, lease_id)
            if lease is None:
                answers.append(self._answers.get(lease_id) or Answer("expired"))
                continue
            answers.append(self._answered(lease_id, Answer("accepted")))
            given_up += self._fail(now_s, lease, blame=True)
        return answers, given_up

    def expire(self, now_s: float) -> list[ScoreJob]:
        """Leases past their deadline end; returns the jobs given up."""
        given_up: list[ScoreJob] = []
        while self._by_deadline:
            deadline_s, lease_id = self._by_deadline[0]
            lease = self._leases.get(lease_id)
            if lease is not None and deadline_s > now_s:
                break
            self._by_deadline.popleft()
            if lease is not None:
                given_up += self._fail(now_s, lease, blame=True)
        self._dirty.update(self._unpardoned)
        self._unpardoned.clear()
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
        name = slot.task.task.teachers[job.pool_index]
        heapq.heappush(self._pool(name).queue, (first, slot.order, job.segment.index, self._n_queued, job))
        self._dirty[name] = None

    def _dispatch_pool(self, now_s: float, pool: Pool) -> list[Work]:
        items: dict[str, list[tuple[ScoreItem, Array]]] = {}
        passed_over: list[tuple[int, int, int, int, ScoreJob]] = []
        while pool.queue and len(passed_over) < _MAX_PASSED_OVER:
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
            items.setdefault(teacher.name, []).append(self._lease(now_s, job, teacher))
        for entry in passed_over:
            heapq.heappush(pool.queue, entry)
            self._unpardoned[pool.name] = None
        return [
            Work(pool.teachers[name], ScoreWork(tuple(i for i, _ in pairs)), tuple(ids for _, ids in pairs))
            for name, pairs in items.items()
        ]

    def _choose(self, now_s: float, pool: Pool, job: ScoreJob) -> TeacherPeer | None:
        """The teacher for this job, or None while none that may take it has room."""
        teachers = pool.teachers
        context_tokens = job.segment.end
        forgiven = not job.failed_by or now_s - job.failed_at_s > self._config.lease_s
        if not forgiven and all(name in job.failed_by for name in teachers):
            forgiven = True
        favourite = job.rollout.affinity[job.pool_index]
        best: TeacherPeer | None = None
        for name, teacher in teachers.items():
            if (not forgiven and name in job.failed_by) or not teacher.has_room(context_tokens):
                continue
            if name == favourite:
                return teacher
            if best is None or teacher.free_tokens > best.free_tokens:
                best = teacher
        return best

    def _lease(self, now_s: float, job: ScoreJob, teacher: TeacherPeer) -> tuple[ScoreItem, Array]:
        lease = Lease(self._next_lease_id, job, teacher)
        self._next_lease_id += 1
        self._leases[lease.lease_id] = lease
        self._by_deadline.append((now_s + self._config.lease_s, lease.lease_id))
        job.lease_id = lease.lease_id
        job.attempts += 1
        job.rollout.affinity[job.pool_index] = teacher.name
        segment = job.segment
        teacher.item_sent(lease, segment.end)
        item = ScoreItem(
            lease.lease_id, job.rollout.rollout_id, segment.start, segment.end, segment.top_start, segment.top_end
        )
        return item, job.rollout.tokens.ids(segment.end)

    def _lease_of(self, teacher: TeacherPeer, lease_id: int) -> Lease | None:
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.teacher is teacher else None

    def _keep_scores(self, lease: Lease, arrays: tuple[Array, ...], n_expected: int) -> RejectReason | None:
        """`arrays`: the log-probs, and behind them the top-k payload where there is one."""
        if len(arrays) != n_expected:
            return RejectReason.SCORE_LENGTH
        segment, tokens, pool_index = lease.job.segment, lease.job.rollout.tokens, lease.job.pool_index
        refusal = score_refusal(segment, tokens.sampled_mask(segment.start, segment.end), arrays[0])
        payloads = [array.tobytes() for array in arrays[1:]]
        for payload in payloads:
            refusal = refusal or top_k_refusal(segment, payload, self._config.max_top_k_bytes)
        if refusal is None:
            scores_N = arrays[0].astype(np.float32, copy=False)
            tokens.set_scores(pool_index, segment.start, segment.end, scores_N)
            if segment.top_start < segment.top_end:
                segment.top_k.update((pool_index, payload) for payload in payloads)
        return refusal

    def _answered(self, lease_id: int, answer: Answer) -> Answer:
        self._answers.put(lease_id, answer)
        if self._answers.n_runs > MAX_ANSWER_RUNS:
            self._answers.forget_lowest()
        return answer

    def _fail(self, now_s: float, lease: Lease, *, blame: bool) -> list[ScoreJob]:
        """End a lease without scores: queue its job again, or return it as given up. `blame`: try another teacher."""
        self._end(lease)
        job = lease.job
        if job.attempts >= self._config.max_score_attempts:
            return [job]
        if blame:
            job.failed_by.add(lease.teacher.name)
            job.failed_at_s = now_s
        self._queue(job)
        return []

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        del lease.teacher.leases[lease.lease_id]
        lease.job.lease_id = None
        self._dirty[lease.teacher.pool] = None
