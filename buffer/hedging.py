"""When a lease is given to a second teacher as well: it has been out for much longer than is usual in its pool.

    overdue   after max(hedge_floor_s, hedge_multiple * q), q = the hedge_quantile of the pool's last WINDOW lease times
    budget    at most hedge_budget of the pool's last WINDOW leases are hedges, so that a pool that is slow as a whole
              is not asked for twice the work

After Dean and Barroso, The Tail at Scale (2013). What comes of hedges: `hedges_sent = won + wasted + still out`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Final, Literal, TypeAlias

WINDOW: Final = 256
"""Leases of a pool that count as recent."""
MIN_TIMES: Final = 16
"""Of fewer lease times nobody can say what is usual."""

Waste: TypeAlias = Literal["original_late", "hedge_late", "hedge_failed", "hedge_unwanted"]
"""Why a lease was for nothing. `original_late`: the hedge answered first. `hedge_late`: it did not. `hedge_failed`: it
failed, ran out, or its teacher was lost. `hedge_unwanted`: nobody wanted the scores any more."""


class LeaseTimes:
    """The last WINDOW lease times of a pool, seconds."""

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
        """The least of the times that at least the share `q` of them does not exceed; None of fewer than MIN_TIMES."""
        n = len(self._sorted)
        return None if n < MIN_TIMES else self._sorted[max(0, math.ceil(q * n) - 1)]


class HedgeBudget:
    """Which of a pool's last WINDOW leases were hedges."""

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
        """One more hedge?"""
        return self._n_hedges + 1 <= share * len(self._recent)


class HedgeCounts:
    """Since the start, over all pools."""

    def __init__(self) -> None:
        self.sent = 0
        self.won = 0
        """The hedge's scores were the ones that counted."""
        self.wasted: dict[Waste, int] = {"original_late": 0, "hedge_late": 0, "hedge_failed": 0, "hedge_unwanted": 0}
