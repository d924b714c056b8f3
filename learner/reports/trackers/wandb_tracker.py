"""Weights & Biases (the extra `wandb`). The variables of wandb itself apply: WANDB_MODE, WANDB_PROJECT, WANDB_API_KEY.

Without a login it writes offline, into the run folder; `wandb sync` uploads that later.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stillhouse.learner.reports.trackers.registry import TrackedRun
from stillhouse.protocol.atomic_file import write_atomic

ID_FILE: Final = "id"
ROWS_FILE: Final = "rows"
PROJECT: Final = "stillhouse"


class WandbTracker:
    """One wandb run. The id in its folder makes a resumed run go on in the same one."""

    def __init__(self) -> None:
        self._run: Any = None
        self._rows = 0
        """Rows of the run so far, over all launches: wandb's own count of steps, which must rise."""
        self._rows_file = Path()

    def start(self, run: TrackedRun) -> str:
        import wandb

        id_file = run.folder / ID_FILE
        if not id_file.exists():
            write_atomic(id_file, secrets.token_hex(8).encode())
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(run.folder),
            mode=mode,
            config=dict(run.settings),
            # Nothing but the figures and the configuration: no console, no code, no state of the machine.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                save_code=False,
                disable_job_creation=True,
                x_disable_stats=True,
            ),
        )
        self._rows_file = run.folder / ROWS_FILE
        counted = int(self._rows_file.read_text(encoding="utf-8")) if self._rows_file.exists() else 0
        self._rows = max(counted, self._run.step)  # offline it begins with 0 again
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.url) if mode == "online" else f"{self._run.dir} ({mode})"

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({**figures, "step": step}, step=self._rows)
        self._rows += 1
        write_atomic(self._rows_file, str(self._rows).encode())

    def finish(self, ok: bool | None) -> None:
        self._run.finish(exit_code=0 if ok or ok is None else 1)
