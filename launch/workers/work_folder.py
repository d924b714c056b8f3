"""What every launcher's folder has: the configuration its workers read, and their logs."""

from __future__ import annotations

import os
from pathlib import Path

from protocol.printable import printable


class WorkFolder:
    """At `path`, for workers of the run `run_id` (empty: it was not asked for)."""

    def __init__(self, path: Path, run_id: str = "") -> None:
        self.path = path
        self.run_id = run_id

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log_path(self, worker_name: str) -> Path:
        return self.logs / f"{worker_name}.log"

    def log_tail(self, worker_name: str, *, lines: int = 15) -> str:
        """The last lines of a worker's log, indented, for an error message."""
        path = self.log_path(worker_name)
        if not path.is_file():
            return "    (no log)"
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 16384))
            tail = log.read().decode(errors="replace").rstrip("\n").split("\n")[-lines:]
        return "\n".join(f"    {printable(line)}" for line in tail if line) or "    (the log is empty)"

    def last_words(self, worker_name: str) -> str:
        """The last line of a worker's log that is not about its leaving; usually the error."""
        return self.log_tail(worker_name, lines=1).strip()
