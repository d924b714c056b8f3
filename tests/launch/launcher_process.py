"""A launcher in a process of its own, with fake workers, to be watched and killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.patience import PATIENCE_S, SLOWNESS, eventually

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


class Launcher:
    """One launcher process and its run folder."""

    def __init__(
        self,
        run_dir: Path,
        behaviour: Mapping[str, str],
        settings: Mapping[str, Any],
        preload: tuple[str, ...],
        **process: Any,
    ) -> None:
        """`process`: arguments of its Popen."""
        self.run_dir = run_dir
        launch = {
            "start_method": "auto",
            "shutdown_grace_s": 30.0 * SLOWNESS,
            "restart_backoff_s": 0.05,
            "status": "off",
        } | dict(settings.get("launch", {}))
        config = {"actors": 1, "teachers": 1} | dict(settings) | {"launch": launch}
        paths = [str(HERE), str(HERE / "fake_sglang"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | process
        script = str(HERE / "fake_launcher.py")
        self.process = subprocess.Popen(
            [sys.executable, script, str(run_dir), json.dumps(behaviour), json.dumps(config), *preload],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            **streams,
        )
        self._said: str | None = None

    def wait(self) -> int:
        """Until the launcher ends by itself; its exit code."""
        self._said, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode

    @property
    def said(self) -> str:
        """What it printed; after `wait`."""
        assert self._said is not None
        return self._said

    def finish(self, word: str = "ok") -> None:
        """The fake learner ends the run with this word."""
        draft = self.run_dir / "finish.draft"
        draft.write_text(word)
        draft.rename(self.run_dir / "finish")

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def summary_when_finished(self) -> dict[str, Any]:
        """Ends the run well."""
        self.finish()
        assert self.wait() == 0, self.said
        return self.summary()

    def pids(self, name: str) -> list[int]:
        """Of all processes that the worker of this name has had, oldest first."""
        seen = (self.run_dir / "seen").glob(f"{name}.*")
        return [int(path.suffix[1:]) for path in sorted(seen, key=lambda path: path.stat().st_mtime_ns)]

    def log(self, name: str) -> str:
        file = self.run_dir / "logs" / f"{name}.log"
        return file.read_text() if file.is_file() else ""

    def until_ready(self) -> None:
        """Every worker was welcomed."""
        eventually(lambda: "are ready" in self.log("launcher"), "all workers are ready")

    def leftovers(self) -> list[int]:
        """Processes that mention the run folder, or that were workers of it, and are not dead."""
        mine = {pid for name in ("buffer-0", "learner-0", "actor-0", "teacher-0") for pid in self.pids(name)}
        left: list[int] = []
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            mentions = any(str(self.run_dir) in word for word in process.info["cmdline"] or [])
            alive = process.info["status"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            if alive and (mentions or (process.pid in mine and "python" in process.name())):
                left.append(process.pid)
        return left


StartLauncher = Callable[..., Launcher]
