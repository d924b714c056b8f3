"""Tokens per second and role, from the running totals in the buffer's snapshots."""

from __future__ import annotations

from protocol.messages import Role, Snapshot

ROLES: tuple[Role, ...] = ("actor", "teacher", "learner")


class TokenRates:
    """Differences between one snapshot and the one before it."""

    def __init__(self) -> None:
        self._time_s: float | None = None
        self._totals: dict[Role, int] = {}

    def update(self, snapshot: Snapshot) -> dict[Role, float]:
        """Tokens/s since the last snapshot: accepted from actors, scored by teachers, trained by the learner.

        Empty for the first one, for one taken at the same moment, and when a total or the clock went back (the buffer
        began anew): there is no interval to speak of then."""
        totals: dict[Role, int] = {role: snapshot.tokens_total(role) for role in ROLES}
        before_s, before = self._time_s, self._totals
        self._time_s, self._totals = snapshot.time_s, totals
        if before_s is None or snapshot.time_s <= before_s or any(totals[role] < before[role] for role in ROLES):
            return {}
        return {role: (totals[role] - before[role]) / (snapshot.time_s - before_s) for role in ROLES}
