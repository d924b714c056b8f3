"""A second process backend: each worker by a command, as by ssh or srun, from another folder and with the run folder
under another name. It shares nothing with launch.processes.local, and cannot see what its processes do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from stillhouse.launch.processes.backend import Event, ProcessBackend, Vitals, WorkerExited, WorkerStarted
from stillhouse.launch.workers.launch_plan import LaunchPlan
from stillhouse.launch.workers.start_role import StartRole, WorkFolder

ROOT: Final = Path(__file__).parents[1]
NAP_S: Final = 0.02
END_S: Final = 10.0
ELSEWHERE: Final = ("sh", "-c", 'cd "$0" && exec "$@"', "/")
"""Goes to a host, so to speak, and runs there what follows."""


class SubprocessBackend(ProcessBackend):
    def __init__(self, plan: LaunchPlan, folder: WorkFolder, command: Sequence[str] = ELSEWHERE) -> None:
        self._command = command
        self._mounts = tempfile.TemporaryDirectory(prefix="mount-")
        self._mount = Path(self._mounts.name) / "run"
        self._mount.symlink_to(folder.path)
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._environment = {**os.environ, "PYTHONPATH": paths, **plan.environment}
        self._running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        self._events: list[Event] = []

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def start(self, start: StartRole, *, preloaded: bool) -> None:
        process = subprocess.Popen(
            [*self._command, sys.executable, "-P", "-m", "stillhouse.launch.workers.roles", str(self._mount)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            process.stdin.flush()
        self._running[start.name] = (start.incarnation, process)
        self._events.append(WorkerStarted(start.name, start.incarnation, f"elsewhere, process {process.pid}"))

    def stop(self, name: str) -> None:
        self._signal(name, signal.SIGTERM)

    def kill(self, name: str) -> None:
        self._signal(name, signal.SIGKILL)

    def dump_stacks(self, name: str) -> None:
        """There is no way to ask for it."""

    def vitals(self, names: Collection[str]) -> dict[str, Vitals]:
        return {}

    def poll(self, timeout_s: float) -> list[Event]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            for name, (incarnation, process) in list(self._running.items()):
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    self._events.append(WorkerExited(name, incarnation, self._end(name)))
            if self._events or time.monotonic() >= deadline_s:
                events, self._events = self._events, []
                return events
            time.sleep(NAP_S)

    def close(self) -> None:
        for name in list(self._running):
            self._end(name)
        self._mounts.cleanup()

    def _signal(self, name: str, signum: int) -> None:
        if name in self._running:
            os.kill(self._running[name][1].pid, signum)

    def _end(self, name: str) -> int:
        _, process = self._running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait(END_S)
        assert process.stdin is not None
        process.stdin.close()
        return code
