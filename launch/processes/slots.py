"""What a launcher remembers of each worker (its slot, its restart budget), and how a run ended. No I/O."""

from __future__ import annotations

import signal
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from launch.config.run import LaunchConfig
from protocol.context import ExitCode, WorkerRole
from protocol.messages import Snapshot


def worker_name(role: str, index: int, prefix: str = "") -> str:
    """`actor-0`; of one that joined a run, `actor-PREFIX-0`, so that it cannot be one of the run's own."""
    return f"{role}-{prefix}-{index}" if prefix else f"{role}-{index}"


@dataclass
class Worker:
    """One worker slot; its process may change."""

    role: WorkerRole
    index: int
    prefix: str = ""
    """Of workers that join a run from elsewhere."""
    incarnation: str = ""
    running: bool = False
    """A process of it was asked for and has not exited."""
    where: str = ""
    """Where its process is, once there is one; empty: there is none yet, or none any more."""
    started_s: float = 0.0
    restart_at_s: float | None = None
    awaits_server: bool = False
    """It is started as soon as its inference server answers."""
    excused: bool = False
    """Told to leave because its server died; not held against it."""
    given_up: bool = False
    """It did not leave when it was told to, and gets SIGKILL."""
    kill_at_s: float | None = None
    """When it must have left."""
    exit_codes: list[int] = field(default_factory=list[int])

    @property
    def name(self) -> str:
        return worker_name(self.role, self.index, self.prefix)


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


class Ending(NamedTuple):
    """Why the run ends."""

    ok: bool
    reason: str
    exit_code: int


class ServerEnd(NamedTuple):
    """What became of an inference server."""

    worker: str
    """Whose it was."""
    place: str
    """`CPU` or its GPUs."""
    exit_codes: list[int]


class Outcome(NamedTuple):
    """What is left of a run for its summary."""

    ending: Ending
    ready_s: float | None
    """Start until every worker was welcomed; None if that never happened."""
    wall_s: float
    peak_memory_bytes: int
    snapshot: Snapshot | None
    """The last one seen while the buffer lived."""
    restarts: dict[str, int]
    exit_codes: dict[str, list[int]]
    servers: Mapping[str, ServerEnd] = MappingProxyType({})
    """Inference servers that the launcher started, by name."""


def said(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == ExitCode.SERVER_LOST:
        return "found its inference server dead or stuck"
    if code == ExitCode.RUN_LOST:
        return "found another buffer than the one it knew"
    return f"ended with exit code {code}"
