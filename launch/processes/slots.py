"""Records that a launcher keeps of its workers: slots, restart budgets, and how a run ended. No I/O."""

from __future__ import annotations

import signal
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from stillhouse.launch.config.run import LaunchConfig
from stillhouse.protocol.context import ExitCode, WorkerRole
from stillhouse.protocol.messages import Snapshot

RESTART_WINDOW_S: Final = 300.0
"""Restarts longer ago than this are forgotten."""
LONGEST_BACKOFF: Final = 30
"""Longest wait before a restart, in units of restart_backoff_s."""


def worker_name(role: str, index: int, prefix: str = "") -> str:
    """`actor-0`; for a worker that joined a run, `actor-PREFIX-0`, which cannot clash with the run's own workers."""
    return f"{role}-{prefix}-{index}" if prefix else f"{role}-{index}"


@dataclass
class Worker:
    """One worker slot. Its process changes with every restart."""

    role: WorkerRole
    index: int
    prefix: str = ""
    """Name prefix of workers that join a run."""
    incarnation: str = ""
    running: bool = False
    """A process was requested and has not exited."""
    where: str = ""
    """Location of its process; empty while there is none."""
    started_s: float = 0.0
    restart_at_s: float | None = None
    awaits_server: bool = False
    """To be started as soon as its inference server answers, or all servers on its GPU do."""
    excused: bool = False
    """Asked to leave because its server died; this exit does not count against its budget."""
    given_up: bool = False
    """It did not leave within its grace and gets SIGKILL."""
    kill_at_s: float | None = None
    """Deadline for leaving."""
    exit_codes: list[int] = field(default_factory=list[int])

    @property
    def name(self) -> str:
        return worker_name(self.role, self.index, self.prefix)


class RestartBudget:
    """Allows `max_restarts` restarts per worker within the last RESTART_WINDOW_S. The wait before the k-th of them is
    restart_backoff_s * 2^(k-1), at most LONGEST_BACKOFF times restart_backoff_s."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._recent: defaultdict[str, deque[float]] = defaultdict(deque)
        self.totals: defaultdict[str, int] = defaultdict(int)
        """Restarts granted per worker since the start."""

    def died(self, name: str, now_s: float) -> float | None:
        """Record a death. Returns the seconds to wait before the restart, or None when the budget is spent."""
        recent = self._recent[name]
        while recent and now_s - recent[0] > RESTART_WINDOW_S:
            recent.popleft()
        if len(recent) >= self._config.max_restarts:
            return None
        recent.append(now_s)
        self.totals[name] += 1
        return self._config.restart_backoff_s * min(2 ** (len(recent) - 1), LONGEST_BACKOFF)

    def excused(self, name: str) -> None:
        """Record a restart that its server caused: it is counted in `totals` but uses no budget."""
        self.totals[name] += 1


class Ending(NamedTuple):
    """How and why the run ended."""

    ok: bool
    reason: str
    exit_code: int


class ServerAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Record of an inference server that the launcher started, over all its processes."""

    worker: str
    """Name of the worker that used it."""
    place: str
    """`CPU` or its GPUs."""
    restarts: int
    exit_codes: list[int]


class RunOutcome(NamedTuple):
    """Result of a run's supervision, for its summary."""

    ending: Ending
    ready_s: float | None
    """Time until every worker was connected; None if that never happened."""
    wall_s: float
    peak_memory_bytes: int
    snapshot: Snapshot | None
    """The last snapshot received from the buffer."""
    restarts: dict[str, int]
    exit_codes: dict[str, list[int]]
    servers: Mapping[str, ServerAccount] = MappingProxyType({})
    """By server name."""


def said(code: int) -> str:
    """Describe an exit code, for a sentence that begins with the worker's name."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == ExitCode.SERVER_LOST:
        return "found its inference server dead or stuck"
    if code == ExitCode.SPENT:
        return "has spent the budget of its API"
    if code == ExitCode.RUN_LOST:
        return "found another buffer than the one it knew"
    return f"ended with exit code {code}"
