"""The status of a run for Prometheus: http://127.0.0.1:PORT/metrics, with `--launch.prometheus PORT`.

Text format 0.0.4, written here: it is three kinds of lines. Figures come from the same snapshots as the status line, at
most a second old; a request only reads the newest of them and disturbs nobody. docs/metrics.md lists the names.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Literal, NamedTuple, Self

from stillhouse.launch.errors import LaunchError
from stillhouse.launch.report.figures import RunView, learner_stats, named
from stillhouse.launch.report.status import StatusView
from stillhouse.learner.reports.alarms import ALARM_SINCE, MEAN
from stillhouse.learner.reports.declared import DECLARED
from stillhouse.learner.reports.figures import ROLES, staleness
from stillhouse.learner.reports.trackers.feed import LOST_GAUGE
from stillhouse.learner.reports.wait_clock import WAIT_CAUSES
from stillhouse.protocol.messages import Snapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
LOOPBACK: Final = "127.0.0.1"
SERVED_S: Final = 10.0
"""Longest time for one request."""


class Family(NamedTuple):
    """One metric: its samples differ in their labels."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: Mapping[tuple[tuple[str, str], ...], float]
    """Labels (name, value) -> value."""


def one(name: str, kind: Literal["gauge", "counter"], text: str, value: float) -> Family:
    return Family(name, kind, text, {(): value})


def by(name: str, kind: Literal["gauge", "counter"], text: str, label: str, values: Mapping[str, float]) -> Family:
    return Family(name, kind, text, {((label, key),): value for key, value in values.items()})


def families(run: str, view: RunView) -> Iterator[Family]:
    """All metrics at one moment; those of the buffer and the learner once they are there."""
    yield by("stillhouse_run_info", "gauge", "Always 1; the label names the run.", "run", {run: 1})
    yield one("stillhouse_elapsed_seconds", "gauge", "Seconds since the start of this launch.", view.elapsed_s)
    yield one("stillhouse_target_steps", "gauge", "Optimizer steps that the run is to make.", view.steps)
    roles = Counter(name.rpartition("-")[0] for name in view.workers)
    running = Counter(name.rpartition("-")[0] for name, runs in view.workers.items() if runs)
    text = "Worker processes of this launcher, by role."
    yield by("stillhouse_workers_expected", "gauge", text, "role", roles)
    text = "Worker processes of this launcher that run, by role."
    yield by("stillhouse_workers_running", "gauge", text, "role", {role: running[role] for role in roles})
    yield one("stillhouse_restarts_total", "counter", "Restarts of workers and servers.", view.restarts)
    yield one("stillhouse_peak_memory_bytes", "gauge", "Peak memory of all processes.", view.memory_bytes)
    yield one("stillhouse_servers_expected", "gauge", "Inference servers of this launcher.", view.servers)
    yield one("stillhouse_servers_up", "gauge", "Inference servers that answer.", view.servers_up)
    if view.snapshot is not None:
        yield from _of_buffer(view.snapshot)
        yield from _of_peers(view.snapshot)
        yield from _of_learner(learner_stats(view.snapshot) or {})


def _of_buffer(snapshot: Snapshot) -> Iterator[Family]:
    tokens = snapshot.ledger.tokens
    yield one("stillhouse_steps_total", "counter", "Optimizer steps made.", snapshot.version.step)
    mean, top = staleness(snapshot.staleness_hist)
    yield one("stillhouse_staleness_mean_steps", "gauge", "Mean staleness of all trained tokens.", mean)
    yield one("stillhouse_staleness_max_steps", "gauge", "Largest staleness of a trained token.", top)
    yield one("stillhouse_staleness_bound_steps", "gauge", "buffer.max_staleness.", snapshot.max_staleness)
    yield one("stillhouse_tokens_accepted_total", "counter", "Sampled tokens that were accepted.", tokens.accepted)
    yield one("stillhouse_tokens_trained_total", "counter", "Sampled tokens that were trained.", tokens.trained)
    lost = {
        (("fate", fate), ("reason", reason)): float(n)
        for fate, counts in (("masked", tokens.masked), ("dropped", tokens.dropped))
        for reason, n in counts.items()
    }
    text = "Sampled tokens that were masked or dropped, by reason."
    yield Family("stillhouse_tokens_lost_total", "counter", text, lost)
    depths = {name: n for name, n in snapshot.queues.items() if not name.endswith("_total")}
    yield by("stillhouse_queue_depth", "gauge", "What the buffer holds; the label has the unit.", "queue", depths)
    events = {name.removesuffix("_total"): n for name, n in snapshot.queues.items() if name.endswith("_total")}
    text = "Rollouts issued again, hedged leases, open breakers and the like."
    yield by("stillhouse_buffer_events_total", "counter", text, "event", events)
    failed = {each.reason: each.n for each in snapshot.failures}
    yield by("stillhouse_rollouts_failed_total", "counter", "Attempts that actors gave up.", "reason", failed)
    text = "1 while the buffer accepts data, 0 while its disk is full."
    yield one("stillhouse_buffer_intake", "gauge", text, not snapshot.intake_trouble)


def _of_peers(snapshot: Snapshot) -> Iterator[Family]:
    totals = {role: snapshot.tokens_total(role) for role in ROLES}
    text = "Tokens sampled by actors, scored by teachers and trained by the learner."
    yield by("stillhouse_role_tokens_total", "counter", text, "role", totals)
    alive = Counter(peer.role for peer in snapshot.peers if peer.alive)
    text = "Workers connected to the buffer, also those of other launchers."
    yield by("stillhouse_workers_alive", "gauge", text, "role", {role: alive[role] for role in ROLES})
    busy = {
        (("role", peer.role), ("worker", peer.name)): peer.stats["busy_fraction"]
        for peer in snapshot.peers
        if peer.alive and "busy_fraction" in peer.stats
    }
    yield Family("stillhouse_worker_busy_ratio", "gauge", "Share of its time in which a worker computes.", busy)


def _of_learner(stats: Mapping[str, float]) -> Iterator[Family]:
    waits = {cause: stats[key] for cause in WAIT_CAUSES if (key := f"wait_{cause}_fraction") in stats}
    text = "Share of its time in which the learner waits, by cause."
    yield by("stillhouse_learner_wait_ratio", "gauge", text, "cause", waits)
    for tag, declared in DECLARED.items():
        key = tag.rpartition("/")[2]
        if declared.prometheus and key in stats:
            yield one(declared.prometheus, "gauge", f"Newest step: {declared.meaning}.", stats[key])
    text = "Figures of the training rollouts, mean over the newest five steps; rollouts/... of the metrics"
    yield by("stillhouse_rollouts_mean", "gauge", text, "figure", named(stats, MEAN))
    accuracy = {kind: stats[key] for kind in ("greedy", "sampled") if (key := f"eval_{kind}") in stats}
    yield by("stillhouse_eval_accuracy_ratio", "gauge", "Accuracy of the newest evaluation.", "decoding", accuracy)
    alarms, text = named(stats, ALARM_SINCE), "Step since which an alarm is on."
    yield by("stillhouse_alarm_since_step", "gauge", text, "alarm", alarms)
    lost = named(stats, LOST_GAUGE)
    yield by("stillhouse_tracker_rows_lost_total", "counter", "Rows that a tracker lost.", "tracker", lost)
    failed = stats.get("checkpoints_failed_total", 0.0)
    yield one("stillhouse_checkpoints_failed_total", "counter", "Checkpoints that could not be written.", failed)


def exposition(run: str, view: RunView) -> str:
    """The text that Prometheus reads. A metric without samples is left out."""
    lines: list[str] = []
    for family in families(run, view):
        if family.samples:
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
        for labels, value in family.samples.items():
            shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
            lines.append(f"{family.name}{{{shown}}} {float(value)!r}" if labels else f"{family.name} {float(value)!r}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class PublishedStatus(StatusView):
    """Shows what another view shows, and serves it to Prometheus while entered."""

    def __init__(self, shown: StatusView, run: str, address: str) -> None:
        """`address`: PORT or HOST:PORT (launch.prometheus). Raises LaunchError if it cannot be bound."""
        self._shown = shown
        self._view: RunView | None = None
        host, _, port = address.rpartition(":")
        try:
            self._server = ThreadingHTTPServer((host or LOOPBACK, int(port)), self._handler(run))
        except OSError as error:
            raise LaunchError(f"launch.prometheus: {address}: {error}; expected a free port of this machine") from error
        self._server.daemon_threads = True
        self.url = f"http://{host or LOOPBACK}:{self._server.server_port}/metrics"

    def __enter__(self) -> Self:
        self._shown.__enter__()
        self._shown.say(f"figures for Prometheus: {self.url}")
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._shown.__exit__(*error)

    def say(self, text: str) -> None:
        self._shown.say(text)

    def show(self, view: RunView) -> None:
        self._view = view
        self._shown.show(view)

    def _handler(self, run: str) -> type[BaseHTTPRequestHandler]:
        status = self

        class Handler(BaseHTTPRequestHandler):
            timeout = SERVED_S

            def do_GET(self) -> None:
                view = status._view
                if self.path.split("?")[0] != "/metrics":
                    self.send_error(404, "expected /metrics")
                    return
                if view is None:
                    self.send_error(503, "the run is starting")
                    return
                body = exposition(run, view).encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: the console belongs to the run."""

        return Handler
