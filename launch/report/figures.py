"""What the status shows, computed from the buffer's snapshots: rates, staleness, the learner's waits, news."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from stillhouse.learner.reports.attribution import WINDOW_S as BOUND_WINDOW_S
from stillhouse.learner.reports.attribution import BoundVerdict, attribute
from stillhouse.learner.reports.figures import RATES_S, TokenRates, staleness
from stillhouse.learner.reports.trackers.feed import LOST_GAUGE
from stillhouse.learner.reports.work_window import WorkWindow
from stillhouse.protocol.messages import PeerView, Snapshot
from stillhouse.protocol.processors import share_used

QUEUES: Final = {
    "tasks_queued": "tasks",
    "tickets_outstanding": "tickets",
    "tokens_unscored": "unscored",
    "tokens_scoring": "scoring",
    "tokens_scored": "scored",
    "tokens_in_batch": "in_batch",
}
WAITS: Final = {"data": "wait_data_fraction", "scoring": "wait_scoring_fraction", "weights": "wait_weights_fraction"}
ETA_WINDOW_S: Final = 60.0
HELD_S: Final = 10.0
"""For `SteadyLimit`."""
NAMES_SHOWN: Final = 8


class RunView(NamedTuple):
    """What a launcher knows at one moment; both a run's own launcher and a joining one make it."""

    now_s: float
    """Monotonic clock of the launcher."""
    elapsed_s: float
    steps: int
    """Optimizer steps that the run is to make."""
    snapshot: Snapshot | None
    workers: Mapping[str, bool]
    """Worker name -> its process runs."""
    restarts: int
    memory_bytes: int = 0
    """Peak memory of all processes so far; 0 when it is not measured."""
    ending: str | None = None
    """Why the run is ending, once it is."""
    servers_up: int = 0
    """Inference servers of the launcher that answer."""
    servers: int = 0
    sample: str = ""
    """A rollout of one of the newest steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The status at one moment, ready to be shown."""

    view: RunView
    step: int | None
    """None before the learner is there."""
    eta_s: float | None
    tokens_per_s: Mapping[str, float]
    learner: Mapping[str, float]
    """The learner's own gauges."""
    learner_does: str
    bound: str
    """What limits the speed, and what more of it would give; empty: not known yet."""
    bound_short: str
    """The same for a status in one line."""
    staleness_mean: float
    staleness_max: int
    staleness_bound: int
    queues: Mapping[str, int]
    versions_listed: str
    """Weight version of every actor: `0:12 1:12 2:11`, with `!` for one that is not connected. Actors that joined are
    listed by their prefix: `host-4f2a-0:12`."""
    versions_counted: str
    """The same, counted: `12 x31, 11 x1`."""
    lost: Mapping[str, int]
    """Sampled tokens masked or dropped, by reason."""
    ready: int
    running: int
    expected: int
    joined: str
    """Connected workers of other launchers: `2 actors, 1 teacher`."""
    held_back: Mapping[str, str]
    """Connected teachers that get no work, and why."""
    hedges: Mapping[str, int]
    """Items given to a second teacher so far, and the outcome; empty if there were none."""
    equal_groups: str
    """What dynamic sampling dropped since the last batch, if that is a batch or more; empty otherwise."""
    failed: str
    """Failed rollouts: their number and the newest cause; empty if there were none."""

    def rate(self, role: str) -> float:
        return self.tokens_per_s.get(role, math.nan)


class Eta:
    """Predicts the end of a run from the moments at which it was seen to have made steps. The first step is left out,
    as it waits for workers that start. The others count alike, over the last ETA_WINDOW_S or the last three."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._made: deque[tuple[float, int]] = deque()
        self._now_s = 0.0

    def update(self, snapshot: Snapshot) -> None:
        """Add a snapshot. If the clock or the step has gone back, a process has restarted, and it begins anew."""
        now_s, step = snapshot.time_s, snapshot.version.step
        if self._step is not None and (now_s < self._now_s or step < self._step):
            self._step = None
            self._made.clear()
        if self._step is not None and step > self._step:
            self._made.append((now_s, step))
            while len(self._made) > 3 and now_s - self._made[1][0] >= ETA_WINDOW_S:
                self._made.popleft()
        self._step, self._now_s = step, now_s

    def seconds(self, steps: int) -> float | None:
        """Until step `steps`. None before three moments, so from about the third step on; fewer say too little."""
        if len(self._made) < 3:
            return None
        (first_s, first), (last_s, last) = self._made[0], self._made[-1]
        step_s = (last_s - first_s) / (last - first)
        since_s = min(self._now_s - last_s, step_s)  # the step under way
        return max(0.0, (steps - last) * step_s - since_s)


class SteadyLimit:
    """What limits the run, as it is shown: another limit, or other advice, has to last for HELD_S before it takes the
    place of what stands there, and a share is renewed as often."""

    def __init__(self) -> None:
        self._shown: BoundVerdict | None = None
        self._shown_s = -math.inf
        self._other: tuple[str, int] | None = None
        self._since_s = 0.0

    def take(self, now: BoundVerdict | None, now_s: float) -> BoundVerdict | None:
        if now is None or self._shown is None:
            self._shown, self._shown_s = now or self._shown, now_s
            return self._shown
        kind = now.stage, now.more
        if kind == (self._shown.stage, self._shown.more):
            self._other = None
            if now_s - self._shown_s >= HELD_S:
                self._shown, self._shown_s = now, now_s
        elif kind != self._other:
            self._other, self._since_s = kind, now_s
        elif now_s - self._since_s >= HELD_S:
            self._shown, self._shown_s, self._other = now, now_s, None
        return self._shown


class Rates:
    """Turns views into figures; remembers the last snapshots, from which it computes rates."""

    def __init__(self) -> None:
        self._rates = TokenRates(RATES_S)
        self._eta = Eta()
        self._work = WorkWindow(BOUND_WINDOW_S)
        self._limit = SteadyLimit()
        self._seen_s = -math.inf

    def figures(self, view: RunView) -> Figures:
        snapshot = view.snapshot
        peers = snapshot.peers if snapshot is not None else ()
        learner = learner_stats(snapshot)
        if snapshot is not None and snapshot.time_s != self._seen_s:
            self._seen_s = snapshot.time_s
            self._rates.update(snapshot)
            self._eta.update(snapshot)
            self._work.update(snapshot, share_used())
        verdict = self._limit.take(attribute(self._work.work()), view.now_s)
        mean, top = staleness(snapshot.staleness_hist) if snapshot is not None else (0.0, 0)
        return Figures(
            view=view,
            step=snapshot.version.step if snapshot is not None and learner is not None else None,
            eta_s=self._eta.seconds(view.steps),
            bound=verdict.text if verdict is not None else "",
            bound_short=verdict.short if verdict is not None else "",
            tokens_per_s=self._rates.tokens_per_s,
            learner=learner or {},
            learner_does=_learner_does(learner or {}),
            staleness_mean=mean,
            staleness_max=top,
            staleness_bound=snapshot.max_staleness if snapshot is not None else 0,
            queues=_queues(snapshot),
            versions_listed=_versions_listed(peers, view.workers),
            versions_counted=_versions_counted(peers),
            lost=_lost(snapshot),
            ready=sum(peer.alive and peer.name in view.workers for peer in peers),
            running=sum(runs for name, runs in view.workers.items() if not name.startswith("buffer")),
            expected=sum(not name.startswith("buffer") for name in view.workers),
            joined=counted(peer for peer in guests(peers, view.workers) if peer.alive),
            held_back={peer.name: peer.held_back for peer in peers if peer.held_back},
            hedges=_hedges(snapshot),
            equal_groups=_equal_groups(snapshot),
            failed=failures_text(snapshot),
        )


def learner_stats(snapshot: Snapshot | None) -> Mapping[str, float] | None:
    """The learner's gauges; None before it has connected."""
    if snapshot is None:
        return None
    return next((peer.stats for peer in snapshot.peers if peer.role == "learner"), None)


def named(stats: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The gauges whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in stats.items() if name.startswith(prefix)}


def plural(n: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


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
    waits = " ".join(f"{cause} {stats.get(key, 0.0):.0%}" for cause, key in WAITS.items())
    return f"busy {stats['busy_fraction']:.0%}, waits: {waits}"


def _queues(snapshot: Snapshot | None) -> dict[str, int]:
    depths = snapshot.queues if snapshot is not None else {}
    return {label: depths[name] for name, label in QUEUES.items() if name in depths}


def _lost(snapshot: Snapshot | None) -> dict[str, int]:
    if snapshot is None:
        return {}
    tokens = snapshot.ledger.tokens
    both = (("masked", tokens.masked), ("dropped", tokens.dropped))
    return {f"{what} {reason}": n for what, counts in both for reason, n in counts.items() if n}


def _hedges(snapshot: Snapshot | None) -> dict[str, int]:
    counts = snapshot.queues if snapshot is not None else {}
    if not counts.get("hedges_sent_total"):
        return {}
    wasted = sum(n for name, n in counts.items() if name.startswith("leases_wasted_hedge_"))
    return {"sent": counts["hedges_sent_total"], "won": counts["hedges_won_total"], "wasted": wasted}


def _equal_groups(snapshot: Snapshot | None) -> str:
    n = snapshot.queues.get("batches_equal_in_a_row", 0) if snapshot is not None else 0
    return f"{n} {'batch' if n == 1 else 'batches'} of rollouts in a row dropped" if n else ""


def _versions_listed(peers: Iterable[PeerView], own: Container[str]) -> str:
    actors = [peer for peer in peers if peer.role == "actor" and (peer.alive or peer.name in own)]
    actors.sort(key=lambda peer: (peer.name not in own, len(peer.name), peer.name))
    return " ".join(
        f"{peer.name.removeprefix('actor-')}:{peer.version.step if peer.version else '-'}{'' if peer.alive else '!'}"
        for peer in actors
    )


def _versions_counted(peers: Iterable[PeerView]) -> str:
    actors = [peer for peer in peers if peer.role == "actor" and peer.alive]
    counts = Counter(peer.version.step if peer.version else -1 for peer in actors)
    return ", ".join(f"{step if step >= 0 else 'none'} x{n}" for step, n in sorted(counts.items(), reverse=True)) or "-"


def guests(peers: Iterable[PeerView], own: Container[str]) -> list[PeerView]:
    """Actors and teachers that other launchers brought (not in `own`), including those that have left."""
    return [peer for peer in peers if peer.role in ("actor", "teacher") and peer.name not in own]


def counted(peers: Iterable[PeerView]) -> str:
    """`2 actors, 1 teacher`."""
    roles = Counter(peer.role for peer in peers)
    return ", ".join(plural(n, role) for role, n in sorted(roles.items()))


def failures_text(snapshot: Snapshot | None) -> str:
    """Number of failed rollouts and the newest cause; empty if none has failed. The buffer has escaped the texts."""
    if snapshot is None or not snapshot.failures:
        return ""
    newest = snapshot.failures[-1]
    return f"{sum(each.n for each in snapshot.failures):,}, newest {newest.reason}: {newest.newest}"


class Announcements:
    """Compares snapshots and reports, once each, workers that join or leave, the first failure of each kind, and
    trackers that lose rows."""

    def __init__(self, own: Container[str]) -> None:
        self._own = own
        self._here: dict[str, PeerView] = {}
        self._failed: set[str] = set()
        self._losing: set[str] = set()

    def take(self, snapshot: Snapshot) -> Iterator[str]:
        """Lines for the user."""
        if snapshot.phase == "running":  # at the end everyone leaves, which is no news
            here = {peer.name: peer for peer in guests(snapshot.peers, self._own) if peer.alive}
            before, self._here = self._here, here
            for what, some in (("joined", here.keys() - before.keys()), ("left", before.keys() - here.keys())):
                if some:
                    peers = [(here | before)[name] for name in sorted(some)]
                    more = f" and {len(peers) - NAMES_SHOWN} more" if len(peers) > NAMES_SHOWN else ""
                    names = ", ".join(peer.name for peer in peers[:NAMES_SHOWN])
                    yield f"{counted(peers)} {what} the run: {names}{more}"
        for each in snapshot.failures:
            if each.reason not in self._failed:
                self._failed.add(each.reason)
                yield f"a rollout failed ({each.reason}): {each.examples[0] if each.examples else each.newest}"
        for name, lost in named(learner_stats(snapshot) or {}, LOST_GAUGE).items():
            if lost and name not in self._losing:
                self._losing.add(name)
                yield (
                    f"the tracker {name} loses rows (learner-0.log says why); the run goes "
                    "on, and metrics.jsonl has all of them"
                )
