"""A launcher in a process of its own, with fake workers, to be watched and killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.patience import PATIENCE_S, SLOWNESS, eventually

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


PATHS = (str(HERE), str(HERE / "fake_sglang"), str(ROOT))


def environment() -> dict[str, str]:
    """Of launchers: fake roles and fake servers are found."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join((*PATHS, os.environ.get("PYTHONPATH", "")))}


class WarmLaunchers:
    """The process of warm_launchers, and the exit codes of what it forked."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "warm_launchers.py"), str(theirs.fileno())],
                env=environment(),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._lines = self._control.makefile("rb")
        self._codes: dict[int, int] = {}
        self._await("Warm")

    def fork(self, words: list[str], output: Path) -> int:
        """A launcher with these words, whose output goes to this file; its pid."""
        asked = {"name": "", "incarnation": "", "words": words, "environment": environment(), "output": str(output)}
        self._control.sendall(json.dumps({"type": "Fork", **asked}).encode() + b"\n")
        return self._await("Forked")["pid"]

    def code(self, pid: int) -> int | None:
        """The exit code of a launcher; None: it runs."""
        self._control.sendall(b'{"type": "Ping"}\n')
        self._await("Pong")
        return self._codes.get(pid)

    def _await(self, kind: str) -> dict[str, Any]:
        while True:
            said = json.loads(self._lines.readline())
            if said["type"] == kind:
                return said
            if said["type"] == "Exited":
                self._codes[said["pid"]] = said["code"]

    def close(self) -> None:
        self._lines.close()
        self._control.close()
        self._process.wait(PATIENCE_S)


class WarmProcess:
    """A forked launcher: what tests use of subprocess.Popen."""

    def __init__(self, warm: WarmLaunchers, words: list[str], output: Path) -> None:
        self._warm, self._output = warm, output
        self.pid = warm.fork(words, output)

    @property
    def returncode(self) -> int | None:
        return self._warm.code(self.pid)

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, None]:
        eventually(lambda: self.returncode is not None, "the launcher ends", timeout)
        return self._output.read_text(encoding="utf-8"), None


class Launcher:
    """One launcher process and its run folder."""

    def __init__(
        self,
        run_dir: Path,
        behaviour: Mapping[str, str],
        settings: Mapping[str, Any],
        preload: tuple[str, ...],
        warm: WarmLaunchers | None,
        output: Path,
        **process: Any,
    ) -> None:
        """`warm`: who forks it, with its output in this file. None: it is started, with these arguments of Popen."""
        self.run_dir = run_dir
        launch = {
            "start_method": "auto",
            "shutdown_grace_s": 30.0 * SLOWNESS,
            "restart_backoff_s": 0.05,
            "status": "off",
        } | dict(settings.get("launch", {}))
        config = {"actors": 1, "teachers": 1} | dict(settings) | {"launch": launch}
        words = [str(HERE / "fake_launcher.py"), str(run_dir), json.dumps(behaviour), json.dumps(config), *preload]
        self.process: Any
        """A subprocess.Popen, or a WarmProcess in its place."""
        if warm is None:
            streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | process
            self.process = subprocess.Popen([sys.executable, *words], env=environment(), **streams)
        else:
            self.process = WarmProcess(warm, words, output)
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
        """Processes that mention the run folder, have a file of it open, or were workers of it, and are not dead."""
        mine = {pid for name in ("buffer-0", "learner-0", "actor-0", "teacher-0") for pid in self.pids(name)}
        left: list[int] = []
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            mentions = any(str(self.run_dir) in word for word in process.info["cmdline"] or [])
            alive = process.info["status"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            known = process.pid in mine and "python" in process.name()
            if alive and (mentions or known or self._is_open_in(process.pid)):
                left.append(process.pid)
        return left

    def _is_open_in(self, pid: int) -> bool:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()).startswith(f"{self.run_dir}/"):
                    return True
        return False


StartLauncher = Callable[..., Launcher]
