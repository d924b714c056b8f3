"""Feeds trackers from the learner without ever keeping it waiting: each has a thread and a bounded queue of its own.

A tracker may raise, hang or have no network. What it cannot take is lost to it (metrics.jsonl and TensorBoard have it)
and counted, as `health/<tracker>_rows_lost_total`. The first loss is logged with its cause, and the launcher says it
once on the console.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stillhouse.learner.reports.settings import Setting, without_secrets
from stillhouse.learner.reports.trackers.registry import TrackedRun, Tracker, make_tracker

log = logging.getLogger(__name__)

FOLDER: Final = "trackers"
"""Folder in the run folder; each tracker has one of its own in it."""
MAX_ROWS: Final = 200
"""Rows that wait for a tracker; further ones are lost."""
RETRY_S: Final = 30.0
"""Time between two attempts to start a tracker."""
CLOSE_S: Final = 15.0
"""Time that trackers have at the end of the run, together."""
LOST_GAUGE: Final = "tracker_lost_"
"""Prefix of the gauges with the number of rows that each tracker has lost."""


@dataclass(frozen=True, slots=True)
class _Row:
    step: int
    figures: Mapping[str, float]


@dataclass(slots=True)
class _Feed:
    """One tracker, its queue and its counts. Only its own thread calls the tracker."""

    name: str
    run: TrackedRun
    make: Callable[[str], Tracker]
    rows: queue.Queue[_Row | None] = field(default_factory=lambda: queue.Queue[_Row | None](MAX_ROWS))
    ok: bool | None = None
    lost: int = 0
    _logged: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        # A daemon, because a tracker that hangs must not keep the learner from leaving.
        self.thread = threading.Thread(target=self._work, name=f"tracker-{self.name}", daemon=True)
        self.thread.start()

    def put(self, row: _Row) -> None:
        try:
            self.rows.put_nowait(row)
        except queue.Full:
            self._lose("it does not keep up: its queue is full")

    def _work(self) -> None:
        tracker: Tracker | None = None
        tried_s = float("-inf")
        while (row := self.rows.get()) is not None:
            if tracker is None and time.monotonic() - tried_s >= RETRY_S:
                tried_s = time.monotonic()
                tracker = self._started()
            if tracker is None:
                self._lose("it could not be started")
                continue
            try:
                tracker.log(row.step, row.figures)
            except Exception as error:
                self._lose(f"{type(error).__name__}: {error}")
        try:
            if tracker is not None:
                tracker.finish(self.ok)
        except Exception as error:
            self._say("cannot end its run", f"{type(error).__name__}: {error}")

    def _started(self) -> Tracker | None:
        try:
            self.run.folder.mkdir(parents=True, exist_ok=True)
            tracker = self.make(self.name)
            log.info("%s: the run is at %s", self.name, without_secrets(tracker.start(self.run)))
            return tracker
        except Exception as error:
            self._say("cannot start, and is tried again later", f"{type(error).__name__}: {error}")
            return None

    def _lose(self, why: str) -> None:
        with self._lock:  # the learner and the tracker's thread both count
            self.lost += 1
            first, self._logged = not self._logged, True
        if first:
            self._say("loses rows, which metrics.jsonl and TensorBoard have", why)

    def _say(self, what: str, why: str) -> None:
        log.error("tracker %s %s: %s", self.name, what, without_secrets(why))


class Trackers:
    """All trackers of a run. Owned by the learner's thread. `close` is idempotent."""

    def __init__(
        self,
        names: Sequence[str],
        run_dir: Path,
        settings: Mapping[str, Setting],
        make: Callable[[str], Tracker] = make_tracker,
    ) -> None:
        self._feeds: list[_Feed] = []
        for name in names:
            folder = run_dir / FOLDER / name.replace(":", ".")
            run = TrackedRun(name=run_dir.resolve().name, folder=folder, settings=settings)
            self._feeds.append(_Feed(name, run, make))

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Pass a row on. Returns at once."""
        for feed in self._feeds:
            feed.put(_Row(step, dict(figures)))

    def ended(self, *, ok: bool) -> None:
        """Note how the run ended, for `close`."""
        for feed in self._feeds:
            feed.ok = ok

    @property
    def lost(self) -> dict[str, int]:
        """Rows that each tracker has lost."""
        return {feed.name: feed.lost for feed in self._feeds}

    def gauges(self) -> dict[str, float]:
        """For the heartbeat."""
        return {f"{LOST_GAUGE}{name}": float(n) for name, n in self.lost.items()}

    def close(self) -> None:
        """Let the trackers write what they have and end their runs, within CLOSE_S."""
        feeds, self._feeds = self._feeds, []
        deadline_s = time.monotonic() + CLOSE_S
        for feed in feeds:
            with contextlib.suppress(queue.Full):
                feed.rows.put(None, timeout=max(0.0, deadline_s - time.monotonic()))
        for feed in feeds:
            feed.thread.join(max(0.0, deadline_s - time.monotonic()))
            if feed.thread.is_alive():
                log.error(
                    "tracker %s did not end within %.0f s; up to %d rows did not reach it",
                    feed.name,
                    CLOSE_S,
                    feed.rows.qsize() + 1,
                )
