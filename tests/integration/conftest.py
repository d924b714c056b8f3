"""Whole runs: the launcher in a process of its own, with the built-in models and a tiny schedule."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from stillhouse.tools.audit.report import Report
from stillhouse.tools.audit.run import audit
from tests.declared_figures import tags_of, undeclared
from tests.integration.joined import Join, Joined
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, Limit

ROOT = Path(__file__).parents[2]
SMALL = (
    "--learner.lr=2e-4",
    "--buffer.batch_rollouts=16",
    "--actor.segment_tokens=16",
    "--learner.tasks.group_size=4",
    "--learner.tasks.eval_greedy=8",
    "--learner.tasks.eval_sampled=8",
    "--launch.status=plain",
    "--launch.status_every_s=2",
)


class Launched:
    """A launcher that runs, and its run folder."""

    def __init__(self, run_dir: Path, arguments: Sequence[str], command: Sequence[str] = ()) -> None:
        """`command`: put before it, to run it on another host."""
        self.run_dir = run_dir
        self.output = run_dir.with_name(f"{run_dir.name}.out")
        self.record = run_dir.with_name(f"{run_dir.name}.record")
        """Of every batch: what the run is audited by."""
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    *command,
                    sys.executable,
                    str(ROOT / "launch" / "cluster.py"),
                    f"--run-dir={run_dir}",
                    f"--learner.record={self.record}",
                    *SMALL,
                    *arguments,
                ],
                cwd=run_dir.parent,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def wait(self, timeout_s: float = RUN_PATIENCE_S) -> int:
        """Its exit code. Every figure that it wrote must be declared, whatever the run was for."""
        code = self.process.wait(timeout_s)
        if (self.run_dir / "metrics.jsonl").exists():
            assert undeclared(tags_of(self.run_dir)) == [], "learner/reports/figures.toml lacks these figures"
        return code

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = RUN_PATIENCE_S) -> None:
        """Wait for something to be seen in the run folder."""
        limit = Limit(timeout_s)
        while not condition():
            if self.process.poll() is not None or limit.passed:
                raise AssertionError(f"{what} was not seen; the launcher said:\n{self.text()}")
            time.sleep(0.05)

    def text(self) -> str:
        return self.output.read_text()

    def steps(self) -> list[dict[str, Any]]:
        """The step lines of metrics.jsonl, those of abandoned branches included."""
        file = self.run_dir / "metrics.jsonl"
        if not file.exists():
            return []
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        return [row for row in rows if row["kind"] == "step"]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def expect_clean_audit(self) -> Report:
        """By an independent count: nothing was trained twice, skipped, or over the bound."""
        report = audit(self.run_dir)
        assert report.clean, f"{self.run_dir}\n{report}"
        return report

    def workers(self, role: str) -> list[psutil.Process]:
        """Processes of the run whose log says that they are of this role."""
        pids: list[psutil.Process] = []
        for log in sorted((self.run_dir / "logs").glob(f"{role}-*.log")):
            started = [line for line in log.read_text().splitlines() if " starts, pid " in line]
            if started:
                pids.append(psutil.Process(int(started[-1].rsplit(" ", 1)[1])))
        return pids

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE_S)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """`launch(*arguments)` starts a run in a fresh folder; `folder=` names one to go on in. Ends what still runs."""
    running: list[Launched] = []

    def start(*arguments: str, folder: str = "run") -> Launched:
        running.append(Launched(tmp_path / folder, arguments))
        return running[-1]

    yield start
    for launched in running:
        launched.kill()


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    """`join(run, prefix, *arguments, command=...)`, the command put before it. Ends what still runs."""
    running: list[Joined] = []

    def start(run: str | Path, prefix: str, *arguments: str, command: Sequence[str] = ()) -> Joined:
        running.append(Joined(run, prefix, tmp_path / f"joined-{prefix}", arguments, command))
        return running[-1]

    yield start
    for joined in running:
        joined.end()


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
