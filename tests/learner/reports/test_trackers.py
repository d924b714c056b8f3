"""Trackers get every row, and one that raises, hangs or is slow costs the learner nothing but its own rows."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from stillhouse.launch.checks import preflight
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.report.figures import Announcements
from stillhouse.learner.reports.metrics import MetricsWriter
from stillhouse.learner.reports.settings import without_secrets
from stillhouse.learner.reports.trackers import feed
from stillhouse.learner.reports.trackers.feed import Trackers
from stillhouse.learner.reports.trackers.registry import TrackedRun, UnknownTracker, check_tracker
from tests.declared_figures import undeclared
from tests.learner.reports.test_metrics import evaluation, peer, snapshot, write_step
from tests.patience import PATIENCE_S, eventually


class Kept:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.run: TrackedRun | None = None
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.ended: list[bool | None] = []

    def start(self, run: TrackedRun) -> str:
        assert run.folder.is_dir()
        self.run = run
        return "memory"

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.rows.append((step, figures))

    def finish(self, ok: bool | None) -> None:
        self.ended.append(ok)


class Raising(Kept):
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step == 2:
            raise ConnectionError(f"no route to http://me:pw@host, key {os.environ.get('MINE_API_KEY')}")
        super().log(step, figures)


class Hanging(Kept):
    """Takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        assert self.go.wait(PATIENCE_S)
        super().log(step, figures)


class Unstartable(Kept):
    def start(self, run: TrackedRun) -> str:
        raise OSError("no network")


def test_a_tracker_gets_what_metrics_jsonl_gets(tmp_path: Path) -> None:
    kept = Kept()
    trackers = Trackers(["mine"], tmp_path, {"learner.lr": 0.5}, lambda _: kept)
    with MetricsWriter(tmp_path, trackers=trackers) as writer:
        row = write_step(writer, 1, loss=0.5)
        writer.evaluation(evaluation(1, accuracy_sampled=0.25))
        writer.ended(ok=True)
    (step, figures), (_, evaluated) = kept.rows
    assert kept.run is not None and (kept.run.name, kept.run.settings) == (tmp_path.name, {"learner.lr": 0.5})
    assert step == 1 and figures == {tag: value for tag, value in row.items() if "/" in tag}
    assert evaluated["eval/accuracy_sampled"] == 0.25 and kept.ended == [True]
    assert undeclared(figures) == [] and figures["health/mine_rows_lost_total"] == 0


def test_rows_that_a_tracker_raises_at_are_counted_and_said_once_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MINE_API_KEY", "sk-12345678")
    raising = Raising()
    trackers = Trackers(["mine"], tmp_path, {}, lambda _: raising)
    for step in (1, 2, 2, 3):
        trackers.add(step, {"train/loss": 0.5})
    lost = lambda: trackers.lost["mine"] == 2  # noqa: E731
    eventually(lost, "two rows to be lost")
    gauges = trackers.gauges()
    trackers.close()
    assert [step for step, _ in raising.rows] == [1, 3] and gauges == {"tracker_lost_mine": 2.0}
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 1 and "no route to http://(hidden)@host, key (hidden)" in said[0]


def test_a_tracker_that_hangs_keeps_nobody_waiting_and_loses_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "CLOSE_S", 0.1)
    hanging = Hanging()
    trackers = Trackers(["mine"], tmp_path, {}, lambda _: hanging)
    trackers.add(0, {})
    eventually(lambda: trackers._feeds[0].rows.empty(), "the first row to be taken")  # pyright: ignore[reportPrivateUsage]
    for step in range(1, feed.MAX_ROWS + 6):
        trackers.add(step, {})
    assert trackers.lost == {"mine": 5}
    trackers.close()  # returns although the tracker hangs
    hanging.go.set()
    eventually(lambda: len(hanging.rows) == feed.MAX_ROWS + 1, "the queue to be emptied")


def test_a_tracker_that_cannot_start_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, made = Kept(), list[Kept]()

    def make(_: str) -> Kept:
        made.append(Unstartable() if not made else kept)
        return made[-1]

    monkeypatch.setattr(feed, "RETRY_S", 0.0)
    trackers = Trackers(["mine"], tmp_path, {}, make)
    trackers.add(1, {})
    eventually(lambda: trackers.lost["mine"] == 1, "the first row to be lost")
    trackers.add(2, {})
    trackers.close()
    assert [step for step, _ in kept.rows] == [2] and kept.ended == [None]


def test_names_are_checked_before_a_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownTracker, match=r"wandbb: unknown tracker, expected one of .*; did you mean wandb"):
        check_tracker("wandbb")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("stillhouse.learner.reports.trackers.registry.find_spec", dict[str, object]().get)
    with pytest.raises(ConfigError, match=r"learner\.trackers: wandb needs wandb, .* pip install -e '\.\[wandb\]'"):
        preflight.check(build(RunConfig, {"learner": {"trackers": ["wandb"]}}))


def test_the_console_says_once_that_rows_are_lost() -> None:
    news = Announcements(())
    learner = peer("learner", "learner-0", 0)
    for lost in (0.0, 1.0, 7.0):
        learner.stats["tracker_lost_wandb"] = lost
        said = list(news.take(snapshot(time.monotonic(), learner)))
        assert [text for text in said if "the tracker wandb loses rows" in text] == said and len(said) == (lost == 1.0)


def test_short_values_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "e")
    assert without_secrets("the step") == "the step"
