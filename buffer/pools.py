"""One pool of teachers: its queue, who is there, and which of its leases have been out for too long."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from buffer.config import BufferConfig
from buffer.hedging import HedgeBudget, LeaseTimes
from buffer.peers import Lease, TeacherPeer
from buffer.rollouts import ScoreJob

MAX_PASSED_OVER = 32
"""Jobs that no teacher with room may take looked past in one go."""


class Pool:
    """The queue of one pool, and its teachers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: list[tuple[int, int, int, int, ScoreJob]] = []
        self.teachers: dict[str, TeacherPeer] = {}
        self.times = LeaseTimes()
        self.budget = HedgeBudget()
        self.unhedged: dict[int, Lease] = {}
        """Leases that are out, of jobs that were not hedged; oldest first."""

    def granted(self, lease: Lease) -> None:
        self.budget.granted(hedge=lease.hedge)
        if not lease.job.hedged:
            self.unhedged[lease.lease_id] = lease

    def overdue(self, now_s: float, config: BufferConfig) -> Iterator[Lease]:
        """Leases that may be hedged now, oldest first. The caller may hedge each before it asks for the next."""
        if not config.hedge_multiple or len(self.teachers) < 2 or not self.unhedged:
            return
        usual_s = self.times.quantile(config.hedge_quantile)
        if usual_s is None:
            return
        overdue_s = max(config.hedge_floor_s, config.hedge_multiple * usual_s)
        for lease in list(islice(self.unhedged.values(), MAX_PASSED_OVER)):
            if now_s - lease.granted_s < overdue_s or not self.budget.allows(config.hedge_budget):
                return
            yield lease

    def something_is_due(self, now_s: float, config: BufferConfig) -> bool:
        """May time alone have made something possible: a hedge, or a probe?"""
        probes = any(t.breaker.is_open and t.breaker.lets(now_s) for t in self.teachers.values())
        return probes or next(self.overdue(now_s, config), None) is not None
