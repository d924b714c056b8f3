"""Starting, signalling and reaping SGLang servers: forked from sglang_server's zygote, or one process each. No policy.

    input   start(), stop(), kill()            from launch.servers.watch
    output  poll() -> Started | Exited         nothing here waits but `close`

A process of its own runs sglang_server/serve.py in SGLang's interpreter, which gets its arguments, the key among them,
on stdin. Either way a server leads its own process group and dies with the launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from launch.processes.lifeline import kill_group, reap
from launch.servers.plan import OPTIONAL_ARGS, ServerPlan
from sglang_server import servers as sglang_cpu_servers
from sglang_server.servers import KEY_ARGUMENT, ServerError, Servers

SERVE: Final = Path(sglang_cpu_servers.__file__).with_name("serve.py")
ZYGOTE_LOG: Final = "zygote"
GRACE_S: Final = 5.0
"""Between SIGTERM and SIGKILL."""
KILLED_WAIT_S: Final = 5.0
"""How long a process may take to vanish after SIGKILL."""


class Started(NamedTuple):
    """The process of a server exists; it does not answer yet."""

    name: str
    pid: int


class Exited(NamedTuple):
    """It is gone and reaped, and its process group with it. A negative code is the signal that killed it."""

    name: str
    code: int


Event: TypeAlias = Started | Exited


class ServerProcesses:
    """All server processes of one run. Owned by the server watch, used from one thread: the launcher's main one, with
    which they die."""

    def __init__(self, log_dir: Path, environment: Callable[[Path], Mapping[str, str]]) -> None:
        """`environment`: given a folder for temporary files, what all servers get beside this process's environment."""
        self._log_dir = log_dir
        self._temporary = Path(tempfile.mkdtemp(prefix="stillhouse-servers-"))
        self._environment = dict(environment(self._temporary))
        self._zygote: Servers | None = None
        self._forked: dict[str, int] = {}
        """Name -> pid, 0 while its fork is under way."""
        self._spawned: dict[str, subprocess.Popen[bytes]] = {}
        self._events: list[Event] = []

    def __repr__(self) -> str:
        return f"ServerProcesses({self.pids})"

    @property
    def pids(self) -> dict[str, int]:
        """Name -> pid of those that run."""
        return self._forked | {name: process.pid for name, process in self._spawned.items()}

    def start(self, plan: ServerPlan, port: int, api_key: str) -> None:
        """The former server of this name has exited."""
        address = ["--host", plan.host, "--port", str(port), KEY_ARGUMENT, api_key]
        if plan.shim:
            self._fork(plan, [*plan.args, *address], port)
        else:
            self._spawn(plan, ["--model-path", plan.model, *plan.args, *address])

    def stop(self, name: str) -> None:
        """SIGTERM; running requests may take a while to end."""
        self._signal(name, signal.SIGTERM)

    def kill(self, name: str) -> None:
        """SIGKILL to its whole group: it may be stuck where SIGTERM does nothing."""
        self._signal(name, signal.SIGKILL)

    def poll(self) -> list[Event]:
        """What happened since."""
        if self._zygote is not None:
            self._read_zygote(self._zygote)
        for name, process in list(self._spawned.items()):
            if (code := reap(process.pid)) is not None:
                process.returncode = code  # reaped behind its back
                del self._spawned[name]
                self._events.append(Exited(name, code))
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """End whatever still runs, at once; waits for it. One more `poll` tells the exit codes. Idempotent."""
        for name in self.pids:
            self.kill(name)
        if self._zygote is not None:
            self._zygote.close()
            self._read_zygote(self._zygote)
            self._zygote = None
        for name, process in self._spawned.items():
            self._events.append(Exited(name, process.wait(KILLED_WAIT_S)))
        self._spawned.clear()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _fork(self, plan: ServerPlan, args: list[str], port: int) -> None:
        self._forked[plan.name] = 0
        try:
            if self._zygote is None:
                self._zygote = Servers(
                    self._log_dir,
                    python=plan.python,
                    environment=self._environment,
                    warm_timeout_s=None,
                    die_with_thread=True,
                )
            self._zygote.request(plan.name, plan.model, args, port=port, base_args=())
        except ServerError:
            self._zygote_lost()

    def _spawn(self, plan: ServerPlan, args: list[str]) -> None:
        log_path = self._log_dir / f"{plan.name}.log"
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(plan.gpus)} if plan.gpus else {}
        with open(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:  # noqa: PTH123 - a mode
            process = subprocess.Popen(
                [plan.python, SERVE],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment, **devices},
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
            )
        request = {"args": args, "optional": OPTIONAL_ARGS, "log": str(log_path), "parent_pid": os.getpid()}
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it is dead already, which poll() tells
            process.stdin.write(json.dumps(request).encode() + b"\n")
        self._spawned[plan.name] = process
        self._events.append(Started(plan.name, process.pid))

    def _signal(self, name: str, signum: int) -> None:
        if (process := self._spawned.get(name)) is not None:  # ours to reap: the pid is still its own
            if signum == signal.SIGKILL:
                kill_group(process.pid)
            os.kill(process.pid, signum)
        elif name in self._forked and self._zygote is not None:
            with contextlib.suppress(ServerError):  # the zygote is gone, and its servers with it; poll() tells
                self._zygote.request_stop(name, grace_s=0.0 if signum == signal.SIGKILL else GRACE_S)

    def _read_zygote(self, zygote: Servers) -> None:
        for event in zygote.take_events():
            match event.kind:
                case "started":
                    self._forked[event.name] = event.pid
                    self._events.append(Started(event.name, event.pid))
                case "exited" | "refused":
                    self._forked.pop(event.name, None)
                    self._events.append(Exited(event.name, event.code if event.kind == "exited" else 1))
                case "ended":
                    self._zygote_lost()
                case "warm":
                    pass

    def _zygote_lost(self) -> None:
        """Its servers died with it, by order of the kernel. The next start makes another one."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None
        self._events += [Exited(name, -signal.SIGKILL) for name in self._forked]
        self._forked.clear()
