"""When a dead worker is started again, and when it has died too often. Clock readings in, decisions out; no I/O."""

from __future__ import annotations

from collections import defaultdict, deque

from launch.config.run import LaunchConfig


class RestartBudget:
    """At most `max_restarts` restarts per worker within the last `restart_window_s`; the wait before the k-th of them
    is restart_backoff_s * 2^(k-1), at most restart_backoff_max_s."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._recent: defaultdict[str, deque[float]] = defaultdict(deque)
        self.totals: defaultdict[str, int] = defaultdict(int)
        """Restarts granted per worker since the start."""

    def __repr__(self) -> str:
        return f"RestartBudget(totals={dict(self.totals)}, of {self._config.max_restarts} per window)"

    def died(self, name: str, now_s: float) -> float | None:
        """A worker died: seconds to wait before it is started again, or None when its budget is spent."""
        recent = self._recent[name]
        while recent and now_s - recent[0] > self._config.restart_window_s:
            recent.popleft()
        if len(recent) >= self._config.max_restarts:
            return None
        recent.append(now_s)
        self.totals[name] += 1
        return min(self._config.restart_backoff_s * 2 ** (len(recent) - 1), self._config.restart_backoff_max_s)

    def excused(self, name: str) -> None:
        """A worker is started again because its server was: counted, and not held against it."""
        self.totals[name] += 1
