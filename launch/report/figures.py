"""What the status shows, computed from the buffer's snapshots: rates, staleness, the learner's waits, news."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from protocol.messages import PeerView, Role, Snapshot

WINDOW_S: Final = 20.0
"""Rates are means over this long."""
QUEUES: Final = {
    "tasks_queued": "tasks",
    "tickets_outstanding": "tickets",
    "tokens_unscored": "unscored",
    "tokens_scoring": "scoring",
    "tokens_scored": "scored",
    "tokens_in_batch": "in_batch",
}
WAITS: Final = {"data": "wait_data_fraction", "scoring": "wait_scoring_fraction", "weights": "wait_weights_fraction"}
NAMES_SHOWN: Final = 8
COUNTED_ROLES: Final[tuple[Role, ...]] = ("actor", "teacher", "learner")


class RunView(NamedTuple):
    """What a launcher knows at one moment: a run's own, or that of some who joined it."""

    now_s: float
    """Monotonic clock of the launcher."""
    elapsed_s: float
    steps: int
    """To be made in all."""
    snapshot: Snapshot | None
    workers: Mapping[str, bool]
    """Worker name -> its process runs."""
    restarts: int
    memory_bytes: int = 0
    """At most so far, of all processes; 0 where nobody looks."""
    ending: str | None = None
    """Why the run is ending, once it is."""
    servers_up: int = 0
    """Inference servers of the launcher's that answer."""
    servers: int = 0
    """That there should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One moment, ready to be shown."""

    elapsed_s: float
    step: int | None
    """None before the learner is there."""
    steps: int
    eta_s: float | None
    tokens_per_s: Mapping[str, float]
    learner: Mapping[str, float]
    """Its own gauges."""
    learner_does: str
    staleness_mean: float
    staleness_max: int
    staleness_bound: int
    queues: Mapping[str, int]
    versions_listed: str
    """Every actor's weight version: `0:12 1:12 2:11`, with `!` for an actor that is not there; those that joined by
    their prefix, `host-4f2a-0:12`."""
    versions_counted: str
    """The same, counted: `12 x31, 11 x1`."""
    lost: Mapping[str, int]
    """Sampled tokens masked or dropped, by reason."""
    ready: int
    running: int
    expected: int
    restarts: int
    memory_bytes: int
    ending: str | None
    servers_up: int
    servers: int
    joined: str = ""
    """Workers of other launchers that are there: `2 actors, 1 teacher`."""
    intake_trouble: str = ""
    """Why the buffer takes nothing in (its disk is full, say); empty: it does."""
    held_back: Mapping[str, str] = field(default_factory=dict[str, str])
    """Teachers that are given no work although they are there, and why."""
    hedges: Mapping[str, int] = field(default_factory=dict[str, int])
    """Items given to a second teacher so far, what came of it; empty: none was."""
    failed: str = ""
    """Rollouts that failed: how many, and the newest cause; empty: none has."""

    def rate(self, role: str) -> float:
        return self.tokens_per_s.get(role, math.nan)


class Rates:
    """Keeps the last snapshots' totals, to tell rates."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, int, dict[str, int]]] = deque()

    def figures(self, view: RunView) -> Figures:
        snapshot = view.snapshot
        expected = sum(not name.startswith("buffer") for name in view.workers)
        learner = learner_stats(snapshot)
        step = snapshot.version.step if snapshot is not None and learner is not None else None
        if snapshot is not None:
            self._remember(snapshot)
        mean, top = staleness(snapshot.staleness_hist) if snapshot is not None else (0.0, 0)
        return Figures(
            elapsed_s=view.elapsed_s,
            step=step,
            steps=view.steps,
            eta_s=self._eta_s(view.steps),
            tokens_per_s=self._tokens_per_s(),
            learner=learner or {},
            learner_does=_learner_does(learner or {}),
            staleness_mean=mean,
            staleness_max=top,
            staleness_bound=snapshot.max_staleness if snapshot is not None else 0,
            queues=_queues(snapshot),
            versions_listed=_versions_listed(snapshot, view.workers),
            versions_counted=_versions_counted(snapshot),
            lost=_lost(snapshot),
            ready=sum(peer.alive and peer.name in view.workers for peer in snapshot.peers) if snapshot else 0,
            running=sum(runs for name, runs in view.workers.items() if not name.startswith("buffer")),
            expected=expected,
            restarts=view.restarts,
            memory_bytes=view.memory_bytes,
            ending=view.ending,
            servers_up=view.servers_up,
            servers=view.servers,
            joined=counted(p for p in guests(snapshot, view.workers) if p.alive) if snapshot is not None else "",
            intake_trouble=snapshot.intake_trouble if snapshot is not None else "",
            held_back={p.name: p.held_back for p in snapshot.peers if p.held_back} if snapshot is not None else {},
            hedges=_hedges(snapshot),
            failed=failures_text(snapshot),
        )

    def _remember(self, snapshot: Snapshot) -> None:
        if self._past and self._past[-1][0] == snapshot.time_s:
            return
        totals = {role: snapshot.tokens_total(role) for role in COUNTED_ROLES}
        self._past.append((snapshot.time_s, snapshot.version.step, totals))
        while len(self._past) > 2 and self._past[-1][0] - self._past[1][0] >= WINDOW_S:
            self._past.popleft()

    def _tokens_per_s(self) -> dict[str, float]:
        if len(self._past) < 2:
            return {}
        (first_s, _, first), (last_s, _, last) = self._past[0], self._past[-1]
        return {role: (last[role] - first[role]) / (last_s - first_s) for role in last}

    def _eta_s(self, steps: int) -> float | None:
        if len(self._past) < 2:
            return None
        (first_s, first, _), (last_s, last, _) = self._past[0], self._past[-1]
        return (steps - last) * (last_s - first_s) / (last - first) if last > first else None


def learner_stats(snapshot: Snapshot | None) -> Mapping[str, float] | None:
    """The learner's gauges, or None before it was there."""
    if snapshot is None:
        return None
    return next((peer.stats for peer in snapshot.peers if peer.role == "learner"), None)


def staleness(hist: Mapping[int, int]) -> tuple[float, int]:
    """(mean, max) distance in optimizer steps of the trained tokens; hist: distance -> tokens."""
    tokens = sum(hist.values())
    if tokens == 0:
        return 0.0, 0
    return sum(distance * n for distance, n in hist.items()) / tokens, max(d for d, n in hist.items() if n)


def clock(seconds: float | None) -> str:
    """`1:05`, `2:03:04`."""
    if seconds is None:
        return "?"
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def short(number: float) -> str:
    """`812`, `4.3k`, `1.2M`."""
    if number != number:
        return "-"
    for limit, divisor, unit in ((1e4, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (math.inf, 1e9, "G")):
        if abs(number) < limit:
            return f"{number / divisor:.{0 if divisor == 1.0 else 1}f}{unit}"
    return f"{number}"


def _learner_does(stats: Mapping[str, float]) -> str:
    if "busy_fraction" not in stats:
        return "-"
    waits = {cause: stats.get(key, 0.0) for cause, key in WAITS.items()}
    told = " ".join(f"{cause} {fraction:.0%}" for cause, fraction in waits.items())
    return f"busy {stats['busy_fraction']:.0%}, waits: {told}"


def _queues(snapshot: Snapshot | None) -> dict[str, int]:
    depths = snapshot.queues if snapshot is not None else {}
    return {label: depths[name] for name, label in QUEUES.items() if name in depths}


def _lost(snapshot: Snapshot | None) -> dict[str, int]:
    if snapshot is None:
        return {}
    tokens = snapshot.ledger.tokens
    told = [("masked", reason, n) for reason, n in tokens.masked.items()]
    told += [("dropped", reason, n) for reason, n in tokens.dropped.items()]
    return {f"{what} {reason}": n for what, reason, n in told if n}


def _hedges(snapshot: Snapshot | None) -> dict[str, int]:
    counts = snapshot.queues if snapshot is not None else {}
    if not counts.get("hedges_sent_total"):
        return {}
    wasted = sum(n for name, n in counts.items() if name.startswith("leases_wasted_hedge_"))
    return {"sent": counts["hedges_sent_total"], "won": counts["hedges_won_total"], "wasted": wasted}


def _versions_listed(snapshot: Snapshot | None, own: Container[str]) -> str:
    actors = [peer for peer in snapshot.peers if peer.role == "actor"] if snapshot is not None else []
    actors = [peer for peer in actors if peer.alive or peer.name in own]
    actors.sort(key=lambda peer: (peer.name not in own, len(peer.name), peer.name))
    return " ".join(
        f"{peer.name.removeprefix('actor-')}:{peer.version.step if peer.version else '-'}{'' if peer.alive else '!'}"
        for peer in actors
    )


def _versions_counted(snapshot: Snapshot | None) -> str:
    actors = [peer for peer in snapshot.peers if peer.role == "actor" and peer.alive] if snapshot is not None else []
    counts = Counter(peer.version.step if peer.version else -1 for peer in actors)
    return ", ".join(f"{step if step >= 0 else 'none'} x{n}" for step, n in sorted(counts.items(), reverse=True)) or "-"


def guests(snapshot: Snapshot, own: Container[str]) -> list[PeerView]:
    """Actors and teachers that are none of the launcher's `own`, those included that have left."""
    return [peer for peer in snapshot.peers if peer.role in ("actor", "teacher") and peer.name not in own]


def counted(peers: Iterable[PeerView]) -> str:
    """`2 actors, 1 teacher`."""
    roles = Counter(peer.role for peer in peers)
    return ", ".join(f"{n} {role}{'s' if n > 1 else ''}" for role, n in sorted(roles.items()))


class Guests:
    """Remembers who was there, to tell who came and who left."""

    def __init__(self, own: Container[str]) -> None:
        self._own = own
        self._here: dict[str, PeerView] = {}

    def news(self, snapshot: Snapshot) -> Iterator[str]:
        """One line for those that came since the last snapshot, one for those that left. At the end all leave, which is
        no news."""
        if snapshot.phase != "running":
            return
        here = {peer.name: peer for peer in guests(snapshot, self._own) if peer.alive}
        before, self._here = self._here, here
        for what, some in (("joined", here.keys() - before.keys()), ("left", before.keys() - here.keys())):
            if some:
                peers = [(here | before)[name] for name in sorted(some)]
                more = f" and {len(peers) - NAMES_SHOWN} more" if len(peers) > NAMES_SHOWN else ""
                names = ", ".join(peer.name for peer in peers[:NAMES_SHOWN])
                yield f"{counted(peers)} {what} the run: {names}{more}"


def failures_text(snapshot: Snapshot | None) -> str:
    """How many, and the newest cause; empty when none has failed."""
    if snapshot is None or not snapshot.failures:
        return ""
    newest = snapshot.failures[-1]
    return f"{sum(each.n for each in snapshot.failures):,}, newest {newest.reason}: {newest.newest}"


class FailureNews:
    """The first failure under each reason is an event; later ones are in the status."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def news(self, snapshot: Snapshot) -> Iterator[str]:
        """What was not told before."""
        for each in snapshot.failures:
            if each.reason not in self._told:
                self._told.add(each.reason)
                yield f"a rollout failed ({each.reason}): {each.examples[0] if each.examples else each.newest}"
