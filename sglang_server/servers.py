"""Starts real SGLang servers on a CPU, forked from one interpreter that has imported SGLang.

    with Servers(log_dir) as servers:
        student = servers.start("student", "builtin/data/student")
        servers.wait_ready([student], timeout_s=60)
        ... student.url ...

`Servers` owns one zygote process (zygote.py, in SGLang's own environment) and talks to it in
JSON lines; a thread reads its events. Everything ends with `close`, or with this process, because the zygote then sees
end of file.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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

    kind: Literal["warm", "started", "exited", "refused", "ended"]
    """`ended`: the zygote is gone, and its servers with it."""
    name: str = ""
    pid: int = 0
    port: int = 0
    code: int = 0
    """Exit code of `exited`; below 0: killed by that signal."""
    reason: str = ""
    """Reason of `refused`."""


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
        self._replies: dict[str, SGLangServer | ServerError] = {}
        """Server name -> result of the last `start`."""
        self._keys: dict[str, str] = {}
        self._exit_codes: dict[int, int] = {}
        self._events: deque[ServerEvent] = deque()
        self._warm_s: float | None = None
        self._ended = False
        with open(os.open(log_dir / "zygote.log", _LOG_FLAGS, 0o666), "ab") as log:  # noqa: PTH123 - flags
            self._process = subprocess.Popen(
                [python, HERE / "zygote.py", log_dir, str(os.getpid() if die_with_thread else 0)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
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
        self._await(lambda: name in self._replies, 10.0, f"server {name} to be forked")
        reply = self._replies[name]
        if isinstance(reply, ServerError):
            raise reply
        return reply

    def request(self, name: str, arguments: Sequence[str], *, port: int) -> None:
        """Like `start`, with all of the server's arguments and without waiting; see `take_events`. Raises ServerError
        if the zygote is gone."""
        with self._changed:
            self._replies.pop(name, None)
            self._keys[name] = arguments[arguments.index(KEY_ARGUMENT) + 1] if KEY_ARGUMENT in arguments else ""
        self._send(do="start", name=name, port=port, args=arguments)

    def request_stop(self, name: str, *, grace_s: float) -> None:
        """Like `stop`, without waiting. A name without a server is ignored."""
        self._send(do="stop", name=name, grace_s=grace_s)

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
        self._send(do="stop", name=server.name, grace_s=grace_s)
        self._await(lambda: server.pid in self._exit_codes, grace_s + _LEAVE_TIMEOUT_S, f"{server.name} to end")
        return self._exit_codes[server.pid]

    def close(self) -> None:
        """End all servers and the zygote. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        if self._warm_s is None:
            self._process.kill()  # it reads no commands during the imports, and has no servers yet
        try:
            self._process.wait(_LEAVE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its servers die with it
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, **command: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise ServerError(f"the zygote is gone\n{_tail(self.log_dir / 'zygote.log')}") from error

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            with self._changed:
                self._note(event)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._events.append(ServerEvent("ended"))
            self._changed.notify_all()

    def _note(self, event: dict[str, Any]) -> None:
        name = event.get("name", "")
        match event["event"]:
            case "warm":
                self._warm_s = event["seconds"]
                self._events.append(ServerEvent("warm"))
            case "started":
                log, pid, port = self.log_dir / f"{name}.log", event["pid"], event["port"]
                self._replies[name] = SGLangServer(name, pid, port, log, self._keys.get(name, ""))
                self._events.append(ServerEvent("started", name, pid, port))
            case "exited":
                self._exit_codes[event["pid"]] = event["code"]
                self._events.append(ServerEvent("exited", name, event["pid"], code=event["code"]))
            case "refused":
                self._replies[name] = ServerError(event["reason"])
                self._events.append(ServerEvent("refused", name, reason=event["reason"]))
            case other:
                raise AssertionError(f"zygote.py and servers.py disagree: event {other!r}")

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
    host: str, port: int, api_key: str = "", *, timeout_s: float = _PROBE_TIMEOUT_S, certificate: str = ""
) -> bool:
    """True if a server answers GET /model_info, which it does once its model is loaded. No proxy is used.
    `certificate`: the file of a server that speaks TLS."""
    try:
        connection = _connection(host, port, timeout_s, certificate)
    except OSError:  # ssl.SSLError too: the server will say why it cannot use the file
        return False
    try:
        connection.request("GET", "/model_info", headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
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
