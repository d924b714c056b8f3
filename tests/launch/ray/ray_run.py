"""A run with --backend ray, as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.launch.ray.nodes import ROOT
from tests.patience import RUN_PATIENCE_S, eventually

SMALL: Final = """\
steps = 100000
actors = 1
teachers = 1
learner = { lr = 3e-4, eval_every = 0, record = "RECORD" }
launch = { backend = "ray", status = "plain", threads_per_worker = 1 }
"""


class RayRun(NamedTuple):
    process: subprocess.Popen[bytes]
    console: Path
    folder: Path

    def text(self) -> str:
        return self.console.read_text()

    def until(self, condition: Callable[[], bool] | str, what: str) -> str:
        """Wait for a condition, or for words on the console, while the run goes on; returns the console."""
        holds = condition if callable(condition) else lambda: condition in self.text()
        eventually(
            lambda: holds() or self.process.poll() is not None, lambda: f"{what}:\n{self.text()}", RUN_PATIENCE_S
        )
        assert self.process.poll() is None, self.text()
        return self.text()

    def steps(self) -> list[dict[str, Any]]:
        """Figures of each step, from the metrics alone."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.is_file() else []
        return [row for row in map(json.loads, lines) if row["kind"] == "step"]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def stop(self) -> None:
        """In order, with a checkpoint."""
        self.process.terminate()
        assert self.process.wait(RUN_PATIENCE_S) == 143, self.text()


@contextmanager
def ray_run(folder: Path, topology: str, *words: str, **variables: str) -> Generator[RayRun]:
    """Without RAY_ADDRESS among the variables it has a cluster of its own."""
    file, said = folder / "topology.toml", folder / "console.txt"
    file.write_text(topology.replace("RECORD", str(folder / "record")))
    others = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment = {**others, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, str(ROOT / "launch" / "cluster.py"), "--config", str(file)]
    with said.open("wb") as console:
        run = subprocess.Popen(
            [*command, "--run-dir", str(folder / "run"), *words],
            env=environment,
            stdout=console,
            stderr=subprocess.STDOUT,
        )
    try:
        yield RayRun(run, said, folder / "run")
    finally:
        run.kill()
        run.wait()
