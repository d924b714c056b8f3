"""Starts real SGLang servers on a CPU, forked from one interpreter that has imported SGLang.

    with Servers(log_dir) as servers:
        student = servers.start("student", "builtin/data/student")
        servers.wait_ready([student], timeout_s=60)
        ... student.url ...

`Servers` owns one zygote process (zygote.py, in SGLang's own environment) and talks to it as protocol.fork_server says;
a thread reads its events. Everything ends with `close`, or with this process, because the zygote then sees end of file.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

from stillhouse.protocol.addresses import free_port

HERE: Final = Path(__file__).resolve().parent
DEFAULT_PYTHON: Final = HERE.parent / ".venv-sglang" / "bin" / "python"
"""Installed by `make sglang-cpu`."""
VERSION_VARIABLE: Final = "SGLANG_CPU_VERSION"
"""Environment variable that selects another version of SGLang than that of DEFAULT_PYTHON, installed by e.g.
`make sglang-cpu-0.5.17`."""
SERVER_ARGS: Final = (
    *("--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "32768", "--max-running-requests", "128"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--skip-server-warmup", "--random-seed", "0", "--sleep-on-idle", "--incremental-streaming-output"),
)
"""Arguments that SGLang needs to serve on a CPU. Without --sleep-on-idle an idle server keeps a core busy. The token
budget bounds the KV cache, which is allocated at the start. --mem-fraction-static only has to leave room for it beside
the weights: a tenth of the free memory was less than the 0.5 GB of a model of 135 M parameters."""
KEY_ARGUMENT: Final = "--api-key"
_LOG_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
_LEAVE_TIMEOUT_S: Final = 8.0
_TAIL_LINES: Final = 15
_PROBE_TIMEOUT_S: Final = 2.0


class ServerError(RuntimeError):
    """A server or the zygote did not start; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class SGLangServer:
    """One SGLang server process, the leader of its own process group."""

    name: str
    pid: int
    port: int
    log: Path
    api_key: str = field(default="", repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class ServerEvent(NamedTuple):
    """An event from the zygote, for callers that do not wait (`request`, `request_stop`)."""

    kind: Literal["warm", "started", "exited", "ended"]
    """`ended`: the zygote is gone, and its servers with it."""
    name: str = ""
    pid: int = 0
    port: int = 0
    code: int = 0
    """Exit code of `exited`; below 0: killed by that signal."""


class Servers:
    """One zygote and the servers forked from it. Thread-safe."""

    def __init__(
        self,
        log_dir: Path,
        *,
        python: Path = DEFAULT_PYTHON,
        environment: Mapping[str, str] | None = None,
        warm_timeout_s: float | None = 120.0,
        die_with_thread: bool = False,
    ) -> None:
        """Returns when the zygote has imported SGLang, after about ten seconds; at once if `warm_timeout_s` is None.
        `environment` is added to that of this process, for all servers, because SGLang reads much of it during import.
        `die_with_thread`: everything gets SIGKILL when the calling thread ends; otherwise it has a few seconds to
        leave. Raises FileNotFoundError if SGLang's environment is missing, ServerError if the imports fail."""
        if not python.exists():
            raise FileNotFoundError(f"no interpreter with SGLang at {python}; make it with: make sglang-cpu")
        log_dir.mkdir(parents=True, exist_ok=True)
        self.log_dir = log_dir
        self._changed = threading.Condition()
        self._asked: dict[str, tuple[int, str]] = {}
        """Name -> port and key of a server whose fork is pending."""
        self._owed: dict[str, int] = {}
        """Name -> signal to send once that fork is done."""
        self._running: dict[str, SGLangServer] = {}
        self._started: dict[str, SGLangServer] = {}
        """Name -> the newest server of that name."""
        self._exit_codes: dict[int, int] = {}
        self._events: deque[ServerEvent] = deque()
        self._began_s = time.monotonic()
        self._warm_s: float | None = None
        self._ended = False
        self._control, theirs = socket.socketpair()
        words = (str(theirs.fileno()), log_dir, str(os.getpid() if die_with_thread else 0))
        with theirs, open(os.open(log_dir / "zygote.log", _LOG_FLAGS, 0o666), "ab") as log:  # noqa: PTH123 - flags
            self._process = subprocess.Popen(
                [python, HERE / "zygote.py", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env=server_environment({**os.environ, **(environment or {})}),
                start_new_session=True,  # Ctrl-C in a terminal is for the owner to handle
            )
        self._reader = threading.Thread(target=self._read_events, name="sglang-zygote-events", daemon=True)
        self._reader.start()
        if warm_timeout_s is None:
            return
        try:
            self._await(lambda: self._warm_s is not None, warm_timeout_s, "the zygote to import SGLang")
        except ServerError:
            self.close()
            raise

    @property
    def warm_s(self) -> float:
        """Duration of the imports in seconds."""
        return self._warm_s or 0.0

    def start(
        self,
        name: str,
        model: str | Path,
        args: Sequence[str] = (),
        *,
        port: int = 0,
        base_args: Sequence[str] = SERVER_ARGS,
    ) -> SGLangServer:
        """Fork a server, which then loads its model (see `wait_ready`). `args` come after `base_args`, so they win. A
        name may be used again once its server is gone."""
        self.request(name, ["--model-path", str(model), *base_args, *args], port=port or free_port())
        self._await(lambda: name not in self._asked, 10.0, f"server {name} to be forked")
        with self._changed:
            return self._started[name]

    def request(self, name: str, arguments: Sequence[str], *, port: int) -> None:
        """Like `start`, with all of the server's arguments and without waiting; see `take_events`. Raises ServerError
        if a server of this name runs, or the zygote is gone."""
        with self._changed:
            if name in self._running or name in self._asked:
                raise ServerError(f"server {name!r} is already running: {self._running.get(name)}")
            key = arguments[arguments.index(KEY_ARGUMENT) + 1] if KEY_ARGUMENT in arguments else ""
            self._asked[name] = port, key
        self._send("Start", name=name, incarnation="", args=["--port", str(port), *arguments])

    def signal(self, name: str, signum: int) -> None:
        """Send it to a server; SIGKILL goes to its group. A name without a server is ignored."""
        with self._changed:
            if name in self._asked:
                self._owed[name] = signum
            server = self._running.get(name)
        if server is not None:
            self._send("Signal", pid=server.pid, signum=signum)

    def take_events(self) -> list[ServerEvent]:
        """Events since the last call, oldest first."""
        with self._changed:
            events = list(self._events)
            self._events.clear()
        return events

    def wait_ready(self, servers: Sequence[SGLangServer], timeout_s: float) -> None:
        """Wait until all answer /model_info, which means that their models are loaded. Raises ServerError."""
        deadline_s = time.monotonic() + timeout_s
        for server in servers:
            while not answers("127.0.0.1", server.port, server.api_key):
                code = self.exit_code(server)
                if code is not None:
                    raise ServerError(f"server {server.name} ended with code {code}\n{_tail(server.log)}")
                if time.monotonic() > deadline_s:
                    raise ServerError(f"server {server.name}: not ready after {timeout_s:g} s\n{_tail(server.log)}")
                time.sleep(0.1)

    def exit_code(self, server: SGLangServer) -> int | None:
        """The exit code; None while it runs; below 0: killed by that signal."""
        with self._changed:
            return self._exit_codes.get(server.pid)

    def stop(self, server: SGLangServer, *, grace_s: float = 5.0) -> int:
        """Send SIGTERM, and after `grace_s` SIGKILL to its group. Returns its exit code."""
        gone = lambda: server.pid in self._exit_codes  # noqa: E731
        self.signal(server.name, signal.SIGTERM)
        with self._changed:
            self._changed.wait_for(lambda: gone() or self._ended, grace_s)
        if not gone():
            self.signal(server.name, signal.SIGKILL)
            self._await(gone, _LEAVE_TIMEOUT_S, f"{server.name} to end")
        return self._exit_codes[server.pid]

    def close(self) -> None:
        """End all servers and the zygote. Idempotent."""
        with suppress(OSError):  # closed already, or the zygote is gone
            self._control.shutdown(socket.SHUT_WR)
        if self._warm_s is None:
            self._process.kill()  # it reads no commands during the imports, and has no servers yet
        try:
            self._process.wait(_LEAVE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its servers die with it
            self._process.wait()
        self._reader.join()
        self._control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, kind: str, **details: Any) -> None:
        try:
            self._control.sendall(json.dumps({"type": kind, **details}).encode() + b"\n")
        except OSError as error:
            raise ServerError(f"the zygote is gone\n{_tail(self.log_dir / 'zygote.log')}") from error

    def _read_events(self) -> None:
        with suppress(ConnectionResetError), self._control.makefile("rb") as lines:
            for line in lines:
                with self._changed:
                    self._note(json.loads(line))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._events.append(ServerEvent("ended"))
            self._changed.notify_all()

    def _note(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "Warm":
                self._warm_s = round(time.monotonic() - self._began_s, 1)
                self._events.append(ServerEvent("warm"))
            case "Forked":
                name, pid = message["name"], message["pid"]
                port, key = self._asked.pop(name)
                self._running[name] = self._started[name] = SGLangServer(
                    name, pid, port, self.log_dir / f"{name}.log", key
                )
                self._events.append(ServerEvent("started", name, pid, port))
                if (signum := self._owed.pop(name, 0)) != 0:
                    self._send("Signal", pid=pid, signum=signum)
            case "Exited":
                pid, code = message["pid"], message["code"]
                name = next(name for name, server in self._running.items() if server.pid == pid)
                del self._running[name]
                self._exit_codes[pid] = code
                self._events.append(ServerEvent("exited", name, pid, code=code))
            case other:
                raise AssertionError(f"the zygote sent {other!r}")

    def _await(self, reached: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: reached() or self._ended, timeout_s)
            if not reached():
                why = "the zygote ended" if self._ended else f"waited {timeout_s:g} s"
                raise ServerError(f"waiting for {what}: {why}\n{_tail(self.log_dir / 'zygote.log')}")


def server_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Environment of the zygote: the shim comes first on the path, then another version of SGLang if `base` selects
    one; one thread per server, no downloads of model files. Raises FileNotFoundError if that version is not
    installed."""
    environment = {key: value for key, value in base.items() if key != "SGLANG_USE_CPU_ENGINE"}
    path = os.pathsep.join(filter(None, (str(HERE / "shim"), _other_version(base), base.get("PYTHONPATH", ""))))
    return {**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _other_version(base: Mapping[str, str]) -> str:
    version = base.get(VERSION_VARIABLE, "")
    folder = DEFAULT_PYTHON.parents[1] / "versions" / version
    if version and not folder.is_dir():
        raise FileNotFoundError(f"{VERSION_VARIABLE} = {version}: no {folder}; make it with: make sglang-cpu-{version}")
    return str(folder) if version else ""


def answers(
    host: str,
    port: int,
    api_key: str = "",
    *,
    timeout_s: float = _PROBE_TIMEOUT_S,
    certificate: str = "",
    path: str = "/model_info",
) -> bool:
    """True if a server answers GET `path`, which it does once its model is loaded. No proxy is used. `certificate`: the
    file of a server that speaks TLS."""
    try:
        connection = _connection(host, port, timeout_s, certificate)
    except OSError:  # ssl.SSLError too: the server will say why it cannot use the file
        return False
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _connection(host: str, port: int, timeout_s: float, certificate: str) -> http.client.HTTPConnection:
    if not certificate:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    context = ssl.create_default_context(cafile=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)


def _tail(log: Path) -> str:
    lines = (
        log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:] if log.exists() else ["(no log)"]
    )
    return "\n".join(f"    {line}" for line in lines)
