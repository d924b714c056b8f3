"""A run as a queueing network: actors, environments, teachers and a learner with fixed service times, simulated.

It shares nothing with the project but the Snapshot that it reports. What limits it is known from the service times, and
what more workers give is found by simulating it again with more of them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from stillhouse.protocol.messages import Ledger, LedgerCounts, PeerView, Role, Snapshot, WeightVersion

TOKENS = 10
"""Tokens of a rollout."""


@dataclass(frozen=True)
class Shape:
    """Sizes, and seconds of service."""

    actors: int = 1
    write_s: float = 0.01
    """One rollout on one actor, which writes one at a time."""
    environment_s: float = 0.0
    """Before a rollout is written; all rollouts that an actor holds wait side by side."""
    slots: int = 1000
    """Rollouts that an actor holds."""
    teachers: int = 1
    score_s: float = 0.01
    train_s: float = 0.1
    batch: int = 16
    max_staleness: int = 1


@dataclass
class _Station:
    """Servers of one kind with a common queue."""

    servers: int
    service_s: float
    done: Callable[[], None]
    queue: int = 0
    busy: int = 0
    busy_s: float = 0.0
    served: int = 0


@dataclass
class Pipeline:
    """Run with `run`; then `snapshots` is what a launcher would have seen."""

    shape: Shape
    snapshots: list[Snapshot] = field(default_factory=list[Snapshot])
    now_s: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        shape = self.shape
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._n = 0
        self._tickets = (shape.max_staleness + 1) * shape.batch
        self._held = self._in_environment = self._ready = self._live = 0
        self._written = _Station(shape.actors, shape.write_s, self._wrote)
        self._scored = _Station(shape.teachers, shape.score_s, self._score)
        self._trains = False
        self._train_s = self._data_s = self._scoring_s = 0.0
        self._since_s = 0.0
        self._batches: deque[int] = deque()

    def run(self, seconds: float, every_s: float = 0.5) -> Pipeline:
        self._at(every_s, lambda: self._look(every_s))
        self._issue()
        while self._events and self._events[0][0] <= seconds:
            moved_s = self._events[0][0] - self.now_s
            self._pass(moved_s)
            self.now_s, _, happens = heapq.heappop(self._events)
            happens()
        return self

    @property
    def steps_per_s(self) -> float:
        """Over the second half."""
        half = [one for one in self.snapshots if one.time_s >= self.now_s / 2]
        return (half[-1].version.step - half[0].version.step) / (half[-1].time_s - half[0].time_s)

    def _pass(self, seconds: float) -> None:
        for station in (self._written, self._scored):
            station.busy_s += station.busy * seconds
        if self._trains:
            self._train_s += seconds
        elif self._held == 0 and self._scored.queue + self._scored.busy:
            self._scoring_s += seconds
        else:
            self._data_s += seconds

    def _at(self, in_s: float, happens: Callable[[], None]) -> None:
        self._n += 1
        heapq.heappush(self._events, (self.now_s + in_s, self._n, happens))

    def _issue(self) -> None:
        shape = self.shape
        while self._live < self._tickets and self._held < shape.actors * shape.slots:
            self._live += 1
            self._held += 1
            self._in_environment += 1
            self._at(shape.environment_s, self._answered)

    def _answered(self) -> None:
        self._in_environment -= 1
        self._enter(self._written)

    def _wrote(self) -> None:
        self._held -= 1
        self._enter(self._scored)
        self._issue()

    def _score(self) -> None:
        self._ready += 1
        self._train()

    def _train(self) -> None:
        if not self._trains and self._ready >= self.shape.batch:
            self._trains = True
            self._ready -= self.shape.batch
            self._at(self.shape.train_s, self._trained)

    def _trained(self) -> None:
        self._trains = False
        self.steps += 1
        self._live -= self.shape.batch
        self._issue()
        self._train()

    def _enter(self, station: _Station) -> None:
        station.queue += 1
        self._serve(station)

    def _serve(self, station: _Station) -> None:
        while station.queue and station.busy < station.servers:
            station.queue -= 1
            station.busy += 1

            def end() -> None:
                station.busy -= 1
                station.served += 1
                station.done()
                self._serve(station)

            self._at(station.service_s, end)

    def _look(self, every_s: float) -> None:
        self._at(every_s, lambda: self._look(every_s))
        shape = self.shape
        waits = {f"wait_{cause}_s_total": 0.0 for cause in ("shards", "weights", "eval", "checkpoint")}
        waits |= {"wait_data_s_total": self._data_s, "wait_scoring_s_total": self._scoring_s}
        peers = [self._peer("learner", 0, self._train_s, waits)]
        for index in range(shape.teachers):
            each = {"scored_tokens_total": self._scored.served * TOKENS / shape.teachers}
            peers.append(self._peer("teacher", index, self._scored.busy_s / shape.teachers, each))
        for index in range(shape.actors):
            each = {
                "rollouts_in_hand": self._held / shape.actors,
                "running": (self._written.queue + self._written.busy) / shape.actors,
                "waiting_for_weights": 0.0,
                "environment_s_total": self._written.served * shape.environment_s / shape.actors,
                "rollouts_finished_total": self._written.served / shape.actors,
            }
            peers.append(self._peer("actor", index, self._written.busy_s / shape.actors, each))
        trained = self.steps * shape.batch * TOKENS
        counts = LedgerCounts(self._written.served * TOKENS, trained, {}, {}, 0, 0)
        self.snapshots.append(
            Snapshot(
                time_s=self.now_s,
                phase="running",
                phase_reason="",
                version=WeightVersion(0, self.steps),
                published=WeightVersion(0, self.steps),
                ledger=Ledger(counts, counts, counts, {}, counts),
                queues={
                    "tickets_outstanding": self._held,
                    "tokens_unscored": self._scored.queue * TOKENS,
                    "tokens_scoring": self._scored.busy * TOKENS,
                },
                staleness_hist={},
                max_staleness=shape.max_staleness,
                peers=tuple(peers),
            )
        )

    def _peer(self, role: Role, index: int, busy_s: float, more: dict[str, float]) -> PeerView:
        stats = {"busy_s_total": busy_s, "elapsed_s_total": self.now_s, **more}
        return PeerView(role, f"{role}-{index}", True, None, 0.0, stats, 0, 0, 0)
