"""A pool of teachers: its queue, the hedging of overdue leases, and which of its teachers are failing.

Hedging gives a lease to a second teacher as well, when it has been out for much longer than is usual in its pool:

    overdue   after max(hedge_floor_s, hedge_multiple * q), q = the USUAL_QUANTILE of the pool's last WINDOW lease times
    budget    at most hedge_budget of the pool's last WINDOW leases are hedges, so that a pool that is slow as a whole
              is not asked for twice the work

After Dean and Barroso, The Tail at Scale (2013). The counts: `hedges_sent = won + wasted + still out`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, Literal, TypeAlias

from stillhouse.buffer.breaker import Breaker
from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.peers import Lease, TeacherPeer
from stillhouse.buffer.rollouts import ScoreJob

WINDOW: Final = 256
"""Leases of a pool that count as recent."""
USUAL_QUANTILE: Final = 0.95
"""Quantile of a pool's recent lease times that counts as usual."""
LONGEST_BACKOFF: Final = 60.0
"""Longest time without work after a breaker opened, in units of breaker_backoff_s."""
MIN_TIMES: Final = 16
"""Lease times that are needed to say what is usual."""

Waste: TypeAlias = Literal["original_late", "hedge_late", "hedge_failed", "hedge_unwanted"]
"""Reason why a lease was wasted. `original_late`: the hedge answered first. `hedge_late`: the original did.
`hedge_failed`: the hedge failed, ran out, or its teacher was lost. `hedge_unwanted`: its scores were no longer
wanted."""


class LeaseTimes:
    """The last WINDOW lease times of a pool, in seconds."""

    __slots__ = ("_in_order", "_sorted")

    def __init__(self) -> None:
        self._in_order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._in_order)

    def add(self, seconds: float) -> None:
        self._in_order.append(seconds)
        insort(self._sorted, seconds)
        if len(self._in_order) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._in_order.popleft())]

    def quantile(self, q: float) -> float | None:
        """Smallest time that at least the share `q` of the times does not exceed; None if there are fewer than
        MIN_TIMES."""
        n = len(self._sorted)
        return None if n < MIN_TIMES else self._sorted[max(0, math.ceil(q * n) - 1)]


class HedgeBudget:
    """Limits the share of hedges among a pool's last WINDOW leases."""

    __slots__ = ("_n_hedges", "_recent")

    def __init__(self) -> None:
        self._recent: deque[bool] = deque()
        self._n_hedges = 0

    def granted(self, *, hedge: bool) -> None:
        self._recent.append(hedge)
        self._n_hedges += hedge
        if len(self._recent) > WINDOW:
            self._n_hedges -= self._recent.popleft()

    def allows(self, share: float) -> bool:
        """Return True if one more hedge keeps within this share."""
        return self._n_hedges + 1 <= share * len(self._recent)


class HedgeCounts:
    """Hedges since the start, over all pools."""

    def __init__(self) -> None:
        self.sent = 0
        self.won = 0
        """Hedges whose scores arrived first."""
        self.wasted: dict[Waste, int] = {"original_late": 0, "hedge_late": 0, "hedge_failed": 0, "hedge_unwanted": 0}


MAX_PASSED_OVER = 32
"""Limit on the jobs passed over in one go because no teacher with room may take them."""


class Pool:
    """Queue and teachers of one pool."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: list[tuple[int, int, int, int, ScoreJob]] = []
        self.teachers: dict[str, TeacherPeer] = {}
        self.times = LeaseTimes()
        self.budget = HedgeBudget()
        self.unhedged: dict[int, Lease] = {}
        """Leases out for jobs that were not hedged, oldest first."""

    def joined(self, teacher: TeacherPeer) -> None:
        self.left(teacher.name)
        self.teachers[teacher.name] = teacher

    def left(self, name: str) -> None:
        self.teachers.pop(name, None)

    @property
    def any_free(self) -> bool:
        """Return True if a teacher has free tokens."""
        return any(teacher.free_tokens > 0 for teacher in self.teachers.values())

    def roomiest(self, new_tokens: int, may_take: Callable[[TeacherPeer], bool]) -> TeacherPeer | None:
        """The teacher with most free tokens, of those for which `may_take` is true and that have room for an item of so
        many new tokens (`TeacherPeer.has_room`). An idle one goes first: until its speed is known it asks for few. Of
        several, the one that joined first."""
        able = (one for one in self.teachers.values() if one.has_room(new_tokens) and may_take(one))
        return max(able, key=lambda teacher: (not teacher.leases, teacher.free_tokens), default=None)

    def granted(self, lease: Lease) -> None:
        self.budget.granted(hedge=lease.hedge)
        if not lease.job.hedged:
            self.unhedged[lease.lease_id] = lease

    @property
    def usual_s(self) -> float | None:
        """Lease time that counts as usual. None: not known yet."""
        return self.times.quantile(USUAL_QUANTILE)

    def overdue(self, now_s: float, config: BufferConfig) -> Iterator[Lease]:
        """Leases that may be hedged now, oldest first. The caller may hedge each before it asks for the next."""
        if not config.hedge_multiple or len(self.teachers) < 2 or not self.unhedged:
            return
        usual_s = self.usual_s
        if usual_s is None:
            return
        overdue_s = max(config.hedge_floor_s, config.hedge_multiple * usual_s)
        for lease in list(islice(self.unhedged.values(), MAX_PASSED_OVER)):
            if now_s - lease.granted_s < overdue_s or not self.budget.allows(config.hedge_budget):
                return
            yield lease

    def something_is_due(self, now_s: float, config: BufferConfig) -> bool:
        """Return True if the passing of time has made a hedge or a probe possible."""
        probes = any(t.breaker.is_open and t.breaker.allows(now_s) for t in self.teachers.values())
        return probes or next(self.overdue(now_s, config), None) is not None


class TeacherHealth:
    """Decides whether a failed lease is the fault of its teacher or of the item, and informs the circuit breakers.

    A lease that another teacher answered first (`superseded`) is watched until its deadline: late scores mean that the
    teacher is slow, no scores that it is failing."""

    def __init__(self, config: BufferConfig) -> None:
        self._config = config
        self._superseded: dict[int, tuple[TeacherPeer, str]] = {}
        """Lease id -> its teacher and item."""
        self._breakers: dict[str, Breaker] = {}
        """Breaker of the newest process of each teacher, connected or not."""
        self.opened_total = 0
        self.probes_total = 0

    def new_breaker(self, name: str) -> Breaker:
        """Make the breaker for a new process of this teacher."""
        config = self._config
        breaker = self._breakers[name] = Breaker(
            failures=config.breaker_failures,
            backoff_s=config.breaker_backoff_s,
            backoff_max_s=LONGEST_BACKOFF * config.breaker_backoff_s,
        )
        return breaker

    def sent(self, lease: Lease) -> None:
        self.probes_total += lease.teacher.breaker.sent(lease.lease_id)

    def failed(self, now_s: float, lease: Lease) -> None:
        """Handle a lease that failed or whose deadline passed."""
        job = lease.job
        others = job.failed_by - {lease.teacher.name}
        job.failed_by.add(lease.teacher.name)
        job.failed_at_s = now_s
        if not others:
            self._against(now_s, lease.teacher, lease.lease_id, job.item)
            return
        lease.teacher.breaker.inconclusive(lease.lease_id)
        for name in sorted(job.failed_by & self._breakers.keys()):
            self._breakers[name].pardon(job.item)

    def superseded(self, lease: Lease) -> None:
        """Watch a lease that another teacher answered first."""
        self._superseded[lease.lease_id] = (lease.teacher, lease.job.item)

    def watches(self, lease_id: int) -> bool:
        return lease_id in self._superseded

    def answered_late(self, teacher: TeacherPeer, lease_id: int) -> None:
        """Handle scores for a lease that is over."""
        if self._superseded.get(lease_id, (None, ""))[0] is teacher:
            del self._superseded[lease_id]
            teacher.breaker.inconclusive(lease_id)

    def failed_late(self, now_s: float, teacher: TeacherPeer, lease_id: int) -> None:
        """Handle a failure for a lease that is over: another teacher could score the item."""
        watched, item = self._superseded.get(lease_id, (None, ""))
        if watched is teacher:
            del self._superseded[lease_id]
            self._against(now_s, teacher, lease_id, item)

    def ran_out(self, now_s: float, lease_id: int) -> None:
        """Handle a superseded lease whose deadline passed without an answer."""
        teacher, item = self._superseded.pop(lease_id)
        self._against(now_s, teacher, lease_id, item)

    def lost(self, teacher: TeacherPeer) -> None:
        """Stop watching a lost teacher's leases: it may never have received them."""
        for lease_id in [i for i, (watched, _) in self._superseded.items() if watched is teacher]:
            del self._superseded[lease_id]
            teacher.breaker.inconclusive(lease_id)

    def forgotten(self, name: str) -> None:
        """Forget the breaker of a teacher that left long ago."""
        del self._breakers[name]

    def _against(self, now_s: float, teacher: TeacherPeer, lease_id: int, item: str) -> None:
        self.opened_total += teacher.breaker.failed(now_s, lease_id, item)
