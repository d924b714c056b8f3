"""Starts and signals inference servers: each in a process of its own, or forked from sglang_server's zygote. No policy.

A server leads its own process group and dies with the launcher. Only `close` waits.
"""

# Why it is so: docs/decisions/sglang-launch.md

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from stillhouse.launch.servers.plan import ServerPlan
from stillhouse.protocol.children import kill_group, reap
from stillhouse.sglang_server.servers import KEY_ARGUMENT, ServerError, Servers
from stillhouse.weights.config import own_nccl_host

ZYGOTE_LOG: Final = "zygote"
LOADS: Final = "/dev/shm/sglang_loads_"
"""Beginning of the names of files that an SGLang server shares with its scheduler, and leaves when it is killed."""
KILLED_WAIT_S: Final = 5.0
"""Time for a process to vanish after SIGKILL."""


class ServerStarted(NamedTuple):
    """The server's process exists; it does not answer yet."""

    name: str
    pid: int


class ServerExited(NamedTuple):
    """The server is gone and reaped, with its process group. A negative code is the signal that killed it."""

    name: str
    code: int


Event: TypeAlias = ServerStarted | ServerExited


class ServerProcesses:
    """All server processes of one run. They die with the thread that started them, the launcher's main one."""

    def __init__(self, log_dir: Path, environment: Callable[[Path], Mapping[str, str]]) -> None:
        """`environment` maps a folder for temporary files to the variables that servers get in addition to ours."""
        self._log_dir = log_dir
        self._temporary = Path(tempfile.mkdtemp(prefix="stillhouse-servers-"))
        self._environment = dict(environment(self._temporary))
        self._zygote: Servers | None = None
        self._forked: dict[str, int] = {}
        """Name -> pid, 0 while the fork is pending."""
        self._spawned: dict[str, subprocess.Popen[bytes]] = {}
        self._shared: dict[str, set[Path]] = {}
        """Name -> `shared_files` of a server that was told to end."""
        self._events: list[Event] = []

    @property
    def pids(self) -> dict[str, int]:
        """Name -> pid, for running servers."""
        return self._forked | {name: process.pid for name, process in self._spawned.items()}

    def start(self, plan: ServerPlan, port: int, api_key: str) -> None:
        """Start a server. A former server of this name has exited."""
        if plan.launch.forked:
            self._fork(plan, port, api_key)
        else:
            self._spawn(plan, port, api_key)

    def stop(self, name: str) -> None:
        """Send SIGTERM; running requests may take a while to end."""
        self._signal(name, signal.SIGTERM)

    def kill(self, name: str) -> None:
        """Send SIGKILL to its whole group; it may be stuck where SIGTERM has no effect."""
        self._signal(name, signal.SIGKILL)

    def poll(self) -> list[Event]:
        """Events since the last call."""
        if self._zygote is not None:
            self._read_zygote(self._zygote)
        for name, process in list(self._spawned.items()):
            if (code := reap(process.pid)) is not None:
                process.returncode = code  # Popen cannot know: we reaped it
                del self._spawned[name]
                self._exited(name, code)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """End everything that still runs, at once, and wait for it; `poll` then returns the exit codes. Idempotent."""
        for name in self.pids:
            self.kill(name)
        if self._zygote is not None:
            self._zygote.close()
            self._read_zygote(self._zygote)
            self._zygote = None
        for name, process in self._spawned.items():
            self._exited(name, process.wait(KILLED_WAIT_S))
        self._spawned.clear()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _fork(self, plan: ServerPlan, port: int, api_key: str) -> None:
        server = ("--model-path", plan.model, *plan.launch.arguments)
        address = ("--host", plan.host, KEY_ARGUMENT, api_key)
        self._forked[plan.name] = 0
        try:
            if self._zygote is None:
                self._zygote = Servers(
                    self._log_dir,
                    python=plan.launch.python,
                    environment=self._environment,
                    warm_timeout_s=None,
                    die_with_thread=True,
                )
            self._zygote.request(plan.name, (*server, *address), port=port)
        except ServerError:
            self._zygote_lost()

    def _spawn(self, plan: ServerPlan, port: int, api_key: str) -> None:
        log_path = self._log_dir / f"{plan.name}.log"
        command = plan.engine.command(plan.launch, plan.model, plan.host, port, api_key, log_path)
        environment = {**os.environ, **self._environment}
        environment |= own_nccl_host(environment, plan.name)
        if plan.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(plan.gpus)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with open(os.open(log_path, flags, 0o600), "ab") as log:  # noqa: PTH123 - a mode
            process = subprocess.Popen(
                command.words,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # already dead, which poll() will report
            process.stdin.write(command.stdin)
        self._spawned[plan.name] = process
        self._events.append(ServerStarted(plan.name, process.pid))

    def _exited(self, name: str, code: int) -> None:
        for file in self._shared.pop(name, ()):
            file.unlink(missing_ok=True)
        self._events.append(ServerExited(name, code))

    def _signal(self, name: str, signum: int) -> None:
        if pid := self.pids.get(name):
            self._shared[name] = self._shared.get(name, set()) | shared_files(pid)
        if (process := self._spawned.get(name)) is not None:  # not reaped yet, so the pid is still its own
            if signum == signal.SIGKILL:
                kill_group(process.pid)
            os.kill(process.pid, signum)
        elif name in self._forked and self._zygote is not None:
            with contextlib.suppress(ServerError):  # the zygote died with its servers, which poll() reports
                self._zygote.signal(name, signum)

    def _read_zygote(self, zygote: Servers) -> None:
        for event in zygote.take_events():
            match event.kind:
                case "started":
                    self._forked[event.name] = event.pid
                    self._events.append(ServerStarted(event.name, event.pid))
                case "exited":
                    self._forked.pop(event.name, None)
                    self._exited(event.name, event.code)
                case "ended":
                    self._zygote_lost()
                case "warm":
                    pass

    def _zygote_lost(self) -> None:
        """The kernel killed its servers with it. The next start makes a new zygote."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None
        for name in self._forked:
            self._exited(name, -signal.SIGKILL)
        self._forked.clear()


def shared_files(group: int) -> set[Path]:
    """The files named LOADS that processes of this group have mapped."""
    found = set[Path]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if os.getpgid(int(maps.parent.name)) == group:
                lines = maps.read_text(encoding="utf-8").splitlines()
                found |= {Path(line[line.index(LOADS) :]) for line in lines if LOADS in line}
    return found
