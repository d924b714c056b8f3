"""The endpoint says what the snapshot says, and Prometheus's own parser reads it; the page lists its names."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError, LaunchError
from stillhouse.launch.report.figures import RunView
from stillhouse.launch.report.prometheus import PublishedStatus, RunCollector
from stillhouse.launch.report.status import StatusView
from stillhouse.protocol.messages import (
    ForgottenPeers,
    Ledger,
    LedgerCounts,
    PeerView,
    RolloutFailures,
    Snapshot,
    WeightVersion,
)
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
NO_COUNTS = LedgerCounts(0, 0, {}, {}, 0, 0)
LEARNER = {
    **{"busy_fraction": 0.5, "loss": 0.25, "reverse_kl": float("nan"), "eval_greedy": 0.75, "eval_sampled": 0.5},
    **{"wait_data_fraction": 0.25, "wait_scoring_fraction": 0.125, "checkpoints_failed_total": 2.0},
    **{"alarm_since_length": 12.0, "mean_length_mean": 31.5, "tracker_lost_wandb": 3.0},
}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def view(snapshot: Snapshot | None) -> RunView:
    workers = {"buffer-0": True, "learner-0": True, "teacher-0": True, "actor-0": True, "actor-1": False}
    return RunView(
        now_s=5.0,
        elapsed_s=90.5,
        steps=200,
        snapshot=snapshot,
        workers=workers,
        restarts=3,
        memory_bytes=1 << 30,
        servers_up=1,
        servers=2,
    )


def full() -> RunView:
    tokens = LedgerCounts(1000, 700, {"stale": 30}, {'a "quoted"\nreason\\': 20}, 200, 50)
    peers = (
        PeerView("learner", "learner-0", True, None, 0.0, LEARNER, 0, 0, 700),
        PeerView("teacher", "teacher-0", True, None, 0.0, {"busy_fraction": 0.75}, 0, 0, 800),
        PeerView("actor", "actor-0", True, None, 0.0, {"busy_fraction": 0.25}, 0, 0, 600),
        PeerView("actor", "actor-1", False, None, 0.0, {"busy_fraction": 0.25}, 0, 0, 300),
    )
    return view(
        Snapshot(
            time_s=1.0,
            phase="running",
            phase_reason="",
            version=WeightVersion(1, 42),
            published=WeightVersion(1, 42),
            ledger=Ledger(NO_COUNTS, NO_COUNTS, tokens, {}, NO_COUNTS),
            queues={"tokens_unscored": 17, "hedges_sent_total": 4},
            staleness_hist={0: 100, 1: 300},
            max_staleness=4,
            peers=peers,
            forgotten={"actor": ForgottenPeers(1, 1, 100)},
            failures=(RolloutFailures("env_error", 5, "actor-0: x", ("x",)),),
        )
    )


def exposition(run: str, shown: RunView) -> str:
    registry = CollectorRegistry(auto_describe=False)
    collector = RunCollector(run)
    registry.register(collector)
    collector.view = shown
    return generate_latest(registry).decode()


def parsed(text: str) -> Samples:
    """By Prometheus's own parser, which checks types and escapes."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type in ("gauge", "counter"), family
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample
            place = sample.name, tuple(sorted(sample.labels.items()))
            assert place not in found
            found[place] = sample.value
    return found


def test_every_figure_is_that_of_the_snapshot() -> None:
    samples = parsed(exposition("first", full()))
    expected: dict[str, float] = {
        "stillhouse_elapsed_seconds": 90.5,
        "stillhouse_target_steps": 200,
        "stillhouse_steps_total": 42,
        "stillhouse_restarts_total": 3,
        "stillhouse_peak_memory_bytes": 2**30,
        "stillhouse_servers_expected": 2,
        "stillhouse_servers_up": 1,
        "stillhouse_staleness_mean_steps": 0.75,
        "stillhouse_staleness_max_steps": 1,
        "stillhouse_staleness_bound_steps": 4,
        "stillhouse_tokens_accepted_total": 1000,
        "stillhouse_tokens_trained_total": 700,
        "stillhouse_loss": 0.25,
        "stillhouse_checkpoints_failed_total": 2,
    }
    assert {name: samples[name, ()] for name in expected} == expected
    labelled: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
        ("stillhouse_run_info", (("run", "first"),)): 1,
        ("stillhouse_tokens_lost_total", (("fate", "masked"), ("reason", "stale"))): 30,
        ("stillhouse_tokens_lost_total", (("fate", "dropped"), ("reason", 'a "quoted"\nreason\\'))): 20,
        ("stillhouse_role_tokens_total", (("role", "actor"),)): 1000,
        ("stillhouse_workers_alive", (("role", "actor"),)): 1,
        ("stillhouse_workers_expected", (("role", "actor"),)): 2,
        ("stillhouse_workers_running", (("role", "actor"),)): 1,
        ("stillhouse_worker_busy_ratio", (("role", "teacher"), ("worker", "teacher-0"))): 0.75,
        ("stillhouse_queue_depth", (("queue", "tokens_unscored"),)): 17,
        ("stillhouse_buffer_events_total", (("event", "hedges_sent"),)): 4,
        ("stillhouse_rollouts_failed_total", (("reason", "env_error"),)): 5,
        ("stillhouse_learner_wait_ratio", (("cause", "scoring"),)): 0.125,
        ("stillhouse_eval_accuracy_ratio", (("decoding", "sampled"),)): 0.5,
        ("stillhouse_alarm_since_step", (("alarm", "length"),)): 12,
        ("stillhouse_rollouts_mean", (("figure", "length_mean"),)): 31.5,
        ("stillhouse_tracker_rows_lost_total", (("tracker", "wandb"),)): 3,
    }
    assert {place: samples[place] for place in labelled} == labelled
    assert samples["stillhouse_reverse_kl_nats", ()] != samples["stillhouse_reverse_kl_nats", ()], "NaN is said as such"


def test_before_the_buffer_is_there_only_the_launcher_is_known() -> None:
    names = {name for name, _ in parsed(exposition("first", view(None)))}
    assert "stillhouse_workers_running" in names and "stillhouse_steps_total" not in names


def exported() -> set[str]:
    return set(re.findall(r"^# TYPE (\S+)", exposition("first", full()), re.MULTILINE))


def test_every_query_of_the_dashboard_names_a_metric_that_is_exported() -> None:
    board: Any = json.loads((ROOT / "examples" / "grafana" / "stillhouse.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    used = {name for query in queries for name in re.findall(r"\bstillhouse_\w+", query)}
    assert len(queries) > 20 and all("stillhouse_" in query for query in queries)
    assert used - exported() == set()
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in board["panels"]})


def test_the_page_lists_what_is_exported() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"`(stillhouse_\w+)`", page)) == exported()


class Silent(StatusView):
    def say(self, text: str) -> None: ...


def get(url: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        error.read()
        error.close()
        return error.code, "", ""


def test_it_is_served_on_loopback_until_the_run_ends() -> None:
    status = PublishedStatus(Silent(), "first", "0")
    assert status.url.startswith("http://127.0.0.1:")
    with status:
        assert get(status.url)[::2] == (200, ""), "the run is starting"
        status.show(full())
        code, kind, text = get(status.url)
        assert (code, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert text == exposition("first", full())
    with pytest.raises(urllib.error.URLError):
        get(status.url)


def test_a_port_that_is_taken_or_no_port_is_an_error_that_says_so() -> None:
    with PublishedStatus(Silent(), "first", "0") as status:
        port = status.url.split(":")[-1].split("/")[0]
        with pytest.raises(LaunchError, match=r"launch\.prometheus: \d+: .*in use.*expected a free port"):
            PublishedStatus(Silent(), "second", port)
    with pytest.raises(ConfigError, match="expected a port or HOST:PORT"):
        build(RunConfig, {"launch": {"prometheus": "yes"}})
