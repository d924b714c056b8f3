"""How much each role worked over the last seconds of a run, or over all of it, from the buffer's snapshots.

Workers report running totals of their work beside the time they have been there for, so a share of them is exact
however late the report is. No torch: the launcher's status uses it, too."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from stillhouse.learner.reports.wait_clock import WAIT_CAUSES
from stillhouse.protocol.messages import GPU_S, Snapshot
from stillhouse.protocol.processors import has_quota, usable_cores

MAX_SAMPLES: Final = 64
"""Kept per window; of more, every second one is forgotten."""
BUSY, ELAPSED, CPU, FLOPS = "busy_s_total", "elapsed_s_total", "cpu_s_total", "flops_total"
ROLES: Final = ("learner", "actor", "teacher")
ADDED: Final = (
    *(BUSY, ELAPSED, CPU, "batches_total", "scored_tokens_total", "weight_pauses_total", "weight_pause_s_total"),
    *("environment_s_total", "rollouts_finished_total", FLOPS),
    *(f"wait_{cause}_s_total" for cause in WAIT_CAUSES),
)
"""Running totals of workers that are read."""
GAUGES: Final = ("running", "rollouts_in_hand", "waiting_for_weights")
"""Momentary numbers of actors that are read."""
QUEUES: Final = ("tokens_unscored", "tokens_scoring")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What happened between two moments. Shares are in [0, 1]."""

    seconds: float
    steps: int
    trained_tokens: int
    accepted_tokens: int
    learner: Mapping[str, float]
    """Shares of the learner's time: `busy`, and each cause of waiting. They sum to 1; empty: it has not reported."""
    teachers: int
    """Connected at the end."""
    teachers_busy: float | None
    """Mean share of their time; None: none has reported."""
    busiest_teacher: float
    actors: int
    actors_busy: float | None
    unscored_tokens: float
    """Mean number of tokens that wait for teachers, or are with them."""
    always_unscored: bool
    """There were some at every moment that was looked at."""
    in_environment: float
    """Share of the rollouts under way that wait for their environment."""
    environment_s: float
    """Time that a rollout spends in its environment, mean over those that ended."""
    max_staleness: int
    awaiting_weights: float
    """Share of the rollouts under way that wait for newer weights."""
    scored_tokens: float
    teacher_busy_s: float
    weight_pauses: float
    """Swaps of weights during which an engine had requests."""
    weight_pause_s: float
    cpu: float | None
    """Mean share of this machine's processors that was used, or of those that the run may use; None: unknown."""
    cpu_s: Mapping[str, float]
    """Role -> seconds of a processor that its workers used, wherever they are; not those of servers, of further ranks
    and of processes of environments."""
    processors: float
    """Number of processors of this machine that the run may use."""
    flops: Mapping[str, float]
    """Role -> floating-point operations of its models (stillhouse.models.flops) since its workers' start, in a window
    of any length. A role of which they are not known is not there."""

    gpu_hours: Mapping[str, float]
    """Role -> GPU hours of its workers and of their former processes, in a window of any length. A role without is not
    there."""

    def efficiency(self) -> dict[str, float]:
        """Figures by tag, as far as there is something to compute them from."""
        figures: dict[str, float] = {}
        if self.learner:
            figures["learner_bubble"] = 1 - self.learner["busy"]
        if self.teachers_busy is not None:
            figures["teacher_wait"] = 1 - self.teachers_busy
        if self.scored_tokens:
            figures["teacher_s_per_1000_tokens"] = 1000 * self.teacher_busy_s / self.scored_tokens
        if self.weight_pauses:
            figures["weight_pause_s"] = self.weight_pause_s / self.weight_pauses
        return {f"efficiency/{name}": value for name, value in figures.items()}


class _Sample(NamedTuple):
    time_s: float
    step: int
    trained: int
    accepted: int
    max_staleness: int
    totals: dict[str, dict[str, float]]
    """Worker -> running totals since the window began to look; a restart does not set them back."""
    gauges: dict[str, float]
    queues: dict[str, int]
    cpu: float | None


class WorkWindow:
    """Add snapshots with `update`; ask with `work`."""

    def __init__(self, window_s: float) -> None:
        """`window_s`: infinite for the whole run."""
        self._window_s = window_s
        self._samples: deque[_Sample] = deque()
        self._before: dict[str, Mapping[str, float]] = {}
        self._totals: defaultdict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(ADDED, 0.0))
        self._roles: dict[str, str] = {}
        self._alive: set[str] = set()
        self._gpu_s: dict[str, float] = {}

    def update(self, snapshot: Snapshot, cpu: float | None = None) -> None:
        """Add a snapshot; one that is not newer than the last is ignored: a batch that was fetched ahead brings an
        older one. `cpu`: the share of this machine's processors that was used since the one before."""
        if self._samples and snapshot.time_s <= self._samples[-1].time_s:
            if snapshot.time_s >= self._samples[0].time_s:
                return
            self._samples.clear()  # the buffer has restarted on another clock
        gauges: defaultdict[str, float] = defaultdict(float)
        self._alive = {peer.name for peer in snapshot.peers if peer.alive}
        self._gpu_s |= {peer.name: peer.stats[GPU_S] for peer in snapshot.peers if GPU_S in peer.stats}
        for peer in snapshot.peers:
            self._roles[peer.name] = peer.role
            self._add(peer.name, peer.stats)
            if peer.role == "actor" and peer.alive:
                for name in GAUGES:
                    gauges[name] += peer.stats.get(name, 0.0)
        tokens = snapshot.ledger.tokens
        self._samples.append(
            _Sample(
                snapshot.time_s,
                snapshot.version.step,
                tokens.trained,
                tokens.accepted,
                snapshot.max_staleness,
                {name: dict(totals) for name, totals in self._totals.items()},
                dict(gauges),
                {name: snapshot.queues.get(name, 0) for name in QUEUES},
                cpu,
            )
        )
        while len(self._samples) > 2 and self._samples[-1].time_s - self._samples[1].time_s >= self._window_s:
            self._samples.popleft()
        if len(self._samples) > MAX_SAMPLES:
            self._samples = deque(list(self._samples)[::2])

    def work(self) -> Work | None:
        """None before two snapshots."""
        if len(self._samples) < 2:
            return None
        first, last, samples = self._samples[0], self._samples[-1], list(self._samples)[1:]
        added = {
            worker: {name: n - first.totals.get(worker, {}).get(name, 0.0) for name, n in totals.items()}
            for worker, totals in last.totals.items()
        }
        backlog = [sum(sample.queues.values()) for sample in samples]
        under_way = sum(sample.gauges.get("rollouts_in_hand", 0.0) for sample in samples)
        awaiting = sum(sample.gauges.get("waiting_for_weights", 0.0) for sample in samples)
        running = sum(sample.gauges.get("running", 0.0) for sample in samples)
        cpu = [sample.cpu for sample in samples if sample.cpu is not None]
        of_role = {role: [added[name] for name in added if self._roles[name] == role] for role in ROLES}
        teachers, actors = of_role["teacher"], of_role["actor"]
        cpu_s = {role: _sum(workers, CPU) for role, workers in of_role.items()}
        seconds, processors = last.time_s - first.time_s, usable_cores()
        mean_cpu = sum(cpu) / len(cpu) if cpu else None
        if mean_cpu is not None and has_quota():  # whose use nobody sees but those who use it
            mean_cpu = max(mean_cpu, min(1.0, sum(cpu_s.values()) / (seconds * processors)))
        return Work(
            seconds=seconds,
            steps=last.step - first.step,
            trained_tokens=last.trained - first.trained,
            accepted_tokens=last.accepted - first.accepted,
            learner=_shares(of_role["learner"]),
            teachers=sum(self._roles[name] == "teacher" for name in self._alive),
            teachers_busy=_busy(teachers),
            busiest_teacher=max((_busy([one]) or 0.0 for one in teachers), default=0.0),
            actors=sum(self._roles[name] == "actor" for name in self._alive),
            actors_busy=_busy(actors),
            unscored_tokens=sum(backlog) / len(backlog),
            always_unscored=all(backlog),
            in_environment=max(0.0, under_way - awaiting - running) / under_way if under_way else 0.0,
            environment_s=_sum(actors, "environment_s_total") / max(1.0, _sum(actors, "rollouts_finished_total")),
            max_staleness=last.max_staleness,
            awaiting_weights=awaiting / under_way if under_way else 0.0,
            scored_tokens=_sum(teachers, "scored_tokens_total"),
            teacher_busy_s=_sum(teachers, BUSY),
            weight_pauses=_sum(actors, "weight_pauses_total"),
            weight_pause_s=_sum(actors, "weight_pause_s_total"),
            cpu=mean_cpu,
            cpu_s=cpu_s,
            processors=processors,
            flops=self._by_role({name: totals[FLOPS] for name, totals in last.totals.items()}),
            gpu_hours=self._by_role({name: seconds / 3600 for name, seconds in self._gpu_s.items()}),
        )

    def _by_role(self, of: Mapping[str, float]) -> dict[str, float]:
        """Sums of what workers have; a role without is left out."""
        sums = {role: sum(n for name, n in of.items() if self._roles[name] == role) for role in ROLES}
        return {role: total for role, total in sums.items() if total}

    def _add(self, name: str, stats: Mapping[str, float]) -> None:
        """Add what a worker's totals have grown by. One that has restarted counts from 0 again."""
        before = self._before.get(name)
        if before is None:  # what it did before we looked is not of this window
            before = {**stats, FLOPS: 0.0} if not self._samples else {}
        elif any(stats.get(total, 0.0) < before.get(total, 0.0) for total in ADDED):
            before = {}
        for total in ADDED:
            self._totals[name][total] += stats.get(total, 0.0) - before.get(total, 0.0)
        self._before[name] = stats


def _sum(added: list[dict[str, float]], name: str) -> float:
    return sum(one[name] for one in added)


def _busy(added: list[dict[str, float]]) -> float | None:
    elapsed_s = _sum(added, ELAPSED)
    return min(1.0, _sum(added, BUSY) / elapsed_s) if elapsed_s > 0 else None


def _shares(learners: list[dict[str, float]]) -> dict[str, float]:
    seconds = {"busy": sum(one[BUSY] for one in learners)}
    seconds |= {cause: sum(one[f"wait_{cause}_s_total"] for one in learners) for cause in WAIT_CAUSES}
    whole_s = sum(seconds.values())
    return {name: value / whole_s for name, value in seconds.items()} if whole_s > 0 else {}
