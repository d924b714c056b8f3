"""MLflow (the extra `mlflow`). Its own variables apply: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.

Without MLFLOW_TRACKING_URI it writes a SQLite file into the run folder.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from stillhouse.learner.reports.trackers.registry import TrackedRun
from stillhouse.protocol.atomic_file import write_atomic

ID_FILE: Final = "id"
EXPERIMENT: Final = "stillhouse"
STORE_FILE: Final = "mlflow.db"
AT_ONCE: Final = 100
"""Parameters in one request, MLflow's limit."""
VALUE_CHARS: Final = 500
_NOT_ALLOWED: Final = re.compile(r"[^\w\-. /]")
"""Characters that MLflow refuses in a name."""


class MlflowTracker:
    """One MLflow run. The id in its folder makes a resumed run go on in the same one."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> str:
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run.folder / STORE_FILE).absolute()}"
        self._client = client = MlflowClient(tracking_uri=uri)
        id_file = run.folder / ID_FILE
        if id_file.exists():
            self._run_id = id_file.read_text(encoding="utf-8")
            client.update_run(self._run_id, status="RUNNING")
            return f"{uri}, run {self._run_id}"
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else client.create_experiment(name, f"{run.folder}")
        self._run_id = client.create_run(experiment, run_name=run.name).info.run_id
        write_atomic(id_file, self._run_id.encode())
        self._log_settings(run)
        return f"{uri}, run {self._run_id}"

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(_allowed(tag), float(value), now_ms, step) for tag, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, ok: bool | None) -> None:
        status = "KILLED" if ok is None else "FINISHED" if ok else "FAILED"
        self._client.set_terminated(self._run_id, status)

    def _log_settings(self, run: TrackedRun) -> None:
        from mlflow.entities import Param

        params = [Param(_allowed(key), str(value)[:VALUE_CHARS]) for key, value in run.settings.items()]
        for start in range(0, len(params), AT_ONCE):
            self._client.log_batch(self._run_id, params=params[start : start + AT_ONCE])


def _allowed(name: str) -> str:
    return _NOT_ALLOWED.sub("_", name)
