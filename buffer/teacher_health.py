"""Whose fault a lease is that brought nothing: the teacher's, or the item's; and what comes of it (`buffer.breaker`).

A lease that was answered elsewhere first (`superseded`) is still watched until its deadline: late scores show a slow
teacher, none at all a sick one.
"""

from __future__ import annotations

from buffer.breaker import Breaker
from buffer.config import BufferConfig
from buffer.peers import Lease, TeacherPeer


class TeacherHealth:
    """Owner of what is held against teachers."""

    def __init__(self, config: BufferConfig) -> None:
        self._config = config
        self._superseded: dict[int, tuple[TeacherPeer, str]] = {}
        """Lease -> who has it, and of which item."""
        self._breakers: dict[str, Breaker] = {}
        """Of the newest process of each teacher, there or not."""
        self.opened_total = 0
        self.probes_total = 0

    def new_breaker(self, name: str) -> Breaker:
        """For a new process of this teacher."""
        config = self._config
        breaker = self._breakers[name] = Breaker(
            failures=config.breaker_failures,
            backoff_s=config.breaker_backoff_s,
            backoff_max_s=config.breaker_backoff_max_s,
        )
        return breaker

    def sent(self, lease: Lease) -> None:
        self.probes_total += lease.teacher.breaker.sent(lease.lease_id)

    def failed(self, now_s: float, lease: Lease) -> None:
        """It failed, or its deadline passed."""
        job = lease.job
        others = job.failed_by - {lease.teacher.name}
        job.failed_by.add(lease.teacher.name)
        job.failed_at_s = now_s
        if not others:
            self._against(now_s, lease.teacher, lease.lease_id, job.item)
            return
        lease.teacher.breaker.came_to_nothing(lease.lease_id)
        for name in sorted(job.failed_by & self._breakers.keys()):
            self._breakers[name].pardon(job.item)

    def superseded(self, lease: Lease) -> None:
        """Another teacher answered first."""
        self._superseded[lease.lease_id] = (lease.teacher, lease.job.item)

    def watches(self, lease_id: int) -> bool:
        return lease_id in self._superseded

    def answered_late(self, teacher: TeacherPeer, lease_id: int) -> None:
        """Scores for a lease that is over."""
        if self._superseded.get(lease_id, (None, ""))[0] is teacher:
            del self._superseded[lease_id]
            teacher.breaker.came_to_nothing(lease_id)

    def failed_late(self, now_s: float, teacher: TeacherPeer, lease_id: int) -> None:
        """A failure for a lease that is over; another teacher could score the item."""
        watched, item = self._superseded.get(lease_id, (None, ""))
        if watched is teacher:
            del self._superseded[lease_id]
            self._against(now_s, teacher, lease_id, item)

    def ran_out(self, now_s: float, lease_id: int) -> None:
        """The deadline of a superseded lease passed, and no answer came."""
        teacher, item = self._superseded.pop(lease_id)
        self._against(now_s, teacher, lease_id, item)

    def lost(self, teacher: TeacherPeer) -> None:
        """What it had may never have reached it."""
        for lease_id in [i for i, (watched, _) in self._superseded.items() if watched is teacher]:
            del self._superseded[lease_id]
            teacher.breaker.came_to_nothing(lease_id)

    def forgotten(self, name: str) -> None:
        """This teacher left so long ago that nothing is held against it any more."""
        del self._breakers[name]

    def _against(self, now_s: float, teacher: TeacherPeer, lease_id: int, item: str) -> None:
        self.opened_total += teacher.breaker.failed(now_s, lease_id, item)
