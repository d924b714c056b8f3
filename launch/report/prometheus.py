"""The status of a run for Prometheus: http://127.0.0.1:PORT/metrics, with `--launch.prometheus PORT`.

Figures come from the same snapshots as the status line, at most a second old; a request only reads the newest of them
and disturbs nobody. docs/metrics.md lists the names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stillhouse.launch.errors import LaunchError
from stillhouse.launch.report.figures import RunView, learner_stats, named
from stillhouse.launch.report.status import StatusView
from stillhouse.learner.reports.alarms import ALARM_SINCE, MEAN
from stillhouse.learner.reports.figures import ROLES, staleness
from stillhouse.learner.reports.trackers.feed import LOST_GAUGE
from stillhouse.learner.reports.wait_clock import WAIT_CAUSES
from stillhouse.protocol.messages import Snapshot

LOOPBACK: Final = "127.0.0.1"


def one(name: str, text: str, value: float) -> Metric:
    """A metric of one value: a counter if its name ends with `_total`, else a gauge."""
    return (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(name, text, value=float(value))


def by(name: str, text: str, labels: str, values: Mapping[str | tuple[str, ...], float]) -> Metric:
    """The same for a value by label, or by labels; none where there are no values."""
    family = (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(name, text, labels=labels.split())
    for key, value in values.items():
        family.add_metric((key,) if isinstance(key, str) else key, float(value))
    return family


class RunCollector(Collector):
    """All metrics at one moment; those of the buffer and the learner once they are there."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.view: RunView | None = None

    def collect(self) -> Iterator[Metric]:
        if self.view is not None:
            yield from (family for family in families(self._run, self.view) if family.samples)


def families(run: str, view: RunView) -> Iterator[Metric]:
    yield by("stillhouse_run_info", "Always 1; the label names the run.", "run", {run: 1})
    yield one("stillhouse_elapsed_seconds", "Seconds since the start of this launch.", view.elapsed_s)
    yield one("stillhouse_target_steps", "Optimizer steps that the run is to make.", view.steps)
    roles = Counter(name.rpartition("-")[0] for name in view.workers)
    running = Counter(name.rpartition("-")[0] for name, runs in view.workers.items() if runs)
    text = "Worker processes of this launcher, by role."
    yield by("stillhouse_workers_expected", text, "role", {**roles})
    text = "Worker processes of this launcher that run, by role."
    yield by("stillhouse_workers_running", text, "role", {role: running[role] for role in roles})
    yield one("stillhouse_restarts_total", "Restarts of workers and servers.", view.restarts)
    yield one("stillhouse_peak_memory_bytes", "Peak memory of all processes.", view.memory_bytes)
    yield one("stillhouse_servers_expected", "Inference servers of this launcher.", view.servers)
    yield one("stillhouse_servers_up", "Inference servers that answer.", view.servers_up)
    if view.snapshot is not None:
        yield from _of_buffer(view.snapshot)
        yield from _of_peers(view.snapshot)
        yield from _of_learner(learner_stats(view.snapshot) or {})


def _of_buffer(snapshot: Snapshot) -> Iterator[Metric]:
    tokens = snapshot.ledger.tokens
    yield one("stillhouse_steps_total", "Optimizer steps made.", snapshot.version.step)
    mean, top = staleness(snapshot.staleness_hist)
    yield one("stillhouse_staleness_mean_steps", "Mean staleness of all trained tokens.", mean)
    yield one("stillhouse_staleness_max_steps", "Largest staleness of a trained token.", top)
    yield one("stillhouse_staleness_bound_steps", "buffer.max_staleness.", snapshot.max_staleness)
    yield one("stillhouse_tokens_accepted_total", "Sampled tokens that were accepted.", tokens.accepted)
    yield one("stillhouse_tokens_trained_total", "Sampled tokens that were trained.", tokens.trained)
    fates = (("masked", tokens.masked), ("dropped", tokens.dropped))
    text = "Sampled tokens that were masked or dropped, by reason."
    lost = {(fate, reason): n for fate, counts in fates for reason, n in counts.items()}
    yield by("stillhouse_tokens_lost_total", text, "fate reason", {**lost})
    depths = {name: n for name, n in snapshot.queues.items() if not name.endswith("_total")}
    yield by("stillhouse_queue_depth", "What the buffer holds; the label has the unit.", "queue", {**depths})
    events = {name.removesuffix("_total"): n for name, n in snapshot.queues.items() if name.endswith("_total")}
    text = "Rollouts issued again, hedged leases, open breakers and the like."
    yield by("stillhouse_buffer_events_total", text, "event", {**events})
    failed = {each.reason: each.n for each in snapshot.failures}
    yield by("stillhouse_rollouts_failed_total", "Attempts that actors gave up.", "reason", {**failed})


def _of_peers(snapshot: Snapshot) -> Iterator[Metric]:
    text = "Tokens sampled by actors, scored by teachers and trained by the learner."
    yield by("stillhouse_role_tokens_total", text, "role", {role: snapshot.tokens_total(role) for role in ROLES})
    alive = Counter(peer.role for peer in snapshot.peers if peer.alive)
    text = "Workers connected to the buffer, also those of other launchers."
    yield by("stillhouse_workers_alive", text, "role", {role: alive[role] for role in ROLES})
    busy = {
        (peer.role, peer.name): peer.stats["busy_fraction"]
        for peer in snapshot.peers
        if peer.alive and "busy_fraction" in peer.stats
    }
    yield by("stillhouse_worker_busy_ratio", "Share of its time in which a worker computes.", "role worker", {**busy})


def _of_learner(stats: Mapping[str, float]) -> Iterator[Metric]:
    waits = {cause: stats[key] for cause in WAIT_CAUSES if (key := f"wait_{cause}_fraction") in stats}
    text = "Share of its time in which the learner waits, by cause."
    yield by("stillhouse_learner_wait_ratio", text, "cause", {**waits})
    for name, key, text in (
        ("stillhouse_loss", "loss", "Loss of the newest step."),
        ("stillhouse_reverse_kl_nats", "reverse_kl", "Reverse KL per token of the newest step."),
    ):
        if key in stats:
            yield one(name, text, stats[key])
    text = "Figures of the training rollouts, mean over the newest five steps; docs/metrics.md, rollouts/..."
    yield by("stillhouse_rollouts_mean", text, "figure", {**named(stats, MEAN)})
    accuracy = {kind: stats[key] for kind in ("greedy", "sampled") if (key := f"eval_{kind}") in stats}
    yield by("stillhouse_eval_accuracy_ratio", "Accuracy of the newest evaluation.", "decoding", {**accuracy})
    alarms, text = named(stats, ALARM_SINCE), "Step since which an alarm is on."
    yield by("stillhouse_alarm_since_step", text, "alarm", {**alarms})
    lost = named(stats, LOST_GAUGE)
    yield by("stillhouse_tracker_rows_lost_total", "Rows that a tracker lost.", "tracker", {**lost})
    failed = stats.get("checkpoints_failed_total", 0.0)
    yield one("stillhouse_checkpoints_failed_total", "Checkpoints that could not be written.", failed)


class PublishedStatus(StatusView):
    """Shows what another view shows, and serves it to Prometheus while entered."""

    def __init__(self, shown: StatusView, run: str, address: str) -> None:
        """`address`: PORT or HOST:PORT (launch.prometheus). Raises LaunchError if it cannot be bound."""
        self._shown, self._collector = shown, RunCollector(run)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._collector)
        host, _, port = address.rpartition(":")
        try:
            self._server, self._thread = start_http_server(int(port), host or LOOPBACK, registry)
        except (OSError, OverflowError) as error:
            raise LaunchError(f"launch.prometheus: {address}: {error}; expected a free port of this machine") from error
        self.url = f"http://{host or LOOPBACK}:{self._server.server_port}/metrics"

    def __enter__(self) -> Self:
        self._shown.__enter__()
        self._shown.say(f"figures for Prometheus: {self.url}")
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._shown.__exit__(*error)

    def say(self, text: str) -> None:
        self._shown.say(text)

    def show(self, view: RunView) -> None:
        self._collector.view = view
        self._shown.show(view)
