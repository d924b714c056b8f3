"""Whole runs with trackers and Prometheus: broken trackers cost no step, and what boards show is what the run did."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.integration.conftest import Launched
from tests.integration.test_whole_run import assert_balanced
from tests.patience import PATIENCE_S

Launch = Callable[..., Launched]

BROKEN = """
import time


class Hanging:
    def start(self, run):
        time.sleep(3600)


class Raising:
    def start(self, run):
        return "nowhere"

    def log(self, step, figures):
        raise ConnectionError("no network")

    def finish(self, ok):
        raise ConnectionError("no network")
"""


def test_trackers_that_hang_or_raise_stop_no_run_and_prometheus_sees_it(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "broken_trackers.py").write_text(BROKEN)
    run = launch(
        *("--actors=1", "--steps=30", "--learner.eval_every=0", "--launch.prometheus=0"),
        "--track=broken_trackers:Hanging,broken_trackers:Raising",
    )
    run.until(lambda: "figures for Prometheus" in run.text(), "the endpoint's address")
    found = re.search(r"figures for Prometheus: (\S+)", run.text())
    assert found is not None
    seen: list[str] = []

    def stepped() -> bool:
        try:
            with urllib.request.urlopen(found[1], timeout=PATIENCE_S) as answer:
                seen.append(answer.read().decode())
        except OSError:  # it is starting, or over
            return bool(seen)
        return re.search(r"^stillhouse_steps_total [1-9]", seen[-1], re.MULTILINE) is not None

    run.until(stepped, "a step in Prometheus")
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    assert run.summary()["steps"] == 30
    assert 'stillhouse_workers_alive{role="actor"} 1.0' in seen[-1]
    assert run.text().count("the tracker broken_trackers:Raising loses rows") == 1
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["health/broken_trackers:Raising_rows_lost_total"] >= 1
    assert rows[-1]["health/broken_trackers:Hanging_rows_lost_total"] == 0, "its queue has room for all"
    log = (run.run_dir / "logs" / "learner-0.log").read_text()
    assert log.count("loses rows") == 1 and "no network" in log and "Hanging did not end within" in log
