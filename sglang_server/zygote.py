"""Imports SGLang once, then forks a real server for every `start`:  python zygote.py LOG_DIR OWNER_PID

Importing SGLang takes about ten seconds and 200 MB; forked servers share it copy-on-write. Runs in SGLang's own
environment with shim/ on PYTHONPATH, so nothing of the project is imported.

    stdin   one JSON object per line: {"do": "start", "name", "port", "args": [...]}
            {"do": "stop", "name", "grace_s"}. End of file: stop everything and exit.
    stdout  {"event": "warm", "seconds"}, {"event": "started", "name", "pid", "port"},
            {"event": "exited", "name", "pid", "code"} (code < 0: by that signal),
            {"event": "refused", "name", "reason"}
    LOG_DIR/NAME.log has the output of the server, stderr the output of the imports.

Forking is safe because there is one thread and no CUDA context. A server (serve.py) dies with this process, and this
process is killed when the thread that started it dies, if OWNER_PID is not 0.
"""

# pyright: reportMissingImports=false
# SGLang is in an environment of its own, not in the one that is type-checked.

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from serve import become_server, children

POLL_S = 0.1
LORA_ARGUMENT = "--enable-lora"
LAST_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL when everything ends; after SIGTERM, SGLang finishes running requests."""


class Zygote:
    """Forks, watches and ends servers."""

    def __init__(self, log_dir: Path, events_fd: int) -> None:
        self._log_dir = log_dir
        self._events_fd = events_fd
        self._pids: dict[str, int] = {}
        self._kill_at_s: dict[str, float] = {}

    def serve(self, commands_fd: int) -> None:
        """Execute commands until end of file on `commands_fd`, then end all servers."""
        pending = b""
        while True:
            readable, _, _ = select.select([commands_fd], [], [], POLL_S)
            self._reap()
            if not readable:
                continue
            chunk = os.read(commands_fd, 65536)
            if not chunk:
                break
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._obey(json.loads(line))
        for name in list(self._pids):
            self._stop(name, LAST_GRACE_S)
        while self._pids:
            self._reap()
            time.sleep(POLL_S / 4)

    def say(self, event: str, **details: Any) -> None:
        """Write one line to the event pipe. A closed pipe is not an error: end of file on stdin follows."""
        try:
            os.write(self._events_fd, json.dumps({"event": event, **details}).encode() + b"\n")
        except BrokenPipeError:
            print(f"event without a reader: {event} {details}", file=sys.stderr, flush=True)

    def _obey(self, command: dict[str, Any]) -> None:
        name = command["name"]
        if command["do"] == "stop":
            self._stop(name, command["grace_s"])
        elif name in self._pids:
            self.say("refused", name=name, reason=f"server {name!r} is already running, pid {self._pids[name]}")
        else:
            self._start(name, command["port"], command["args"])

    def _start(self, name: str, port: int, args: list[str]) -> None:
        own_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(self._events_fd)
            if LORA_ARGUMENT in args:
                from sglang_torch_cpu.pinned import ignore_pinning

                ignore_pinning()
            become_server(self._log_dir / f"{name}.log", own_pid, ["--port", str(port), *args])
        self._pids[name] = pid
        self.say("started", name=name, pid=pid, port=port)

    def _stop(self, name: str, grace_s: float) -> None:
        pid = self._pids.get(name)
        if pid is None:
            return
        os.kill(pid, signal.SIGTERM)
        self._kill_at_s[name] = min(self._kill_at_s.get(name, float("inf")), time.monotonic() + grace_s)

    def _reap(self) -> None:
        for name, pid in list(self._pids.items()):
            if time.monotonic() >= self._kill_at_s.get(name, float("inf")):
                children.kill_group(pid)
                os.kill(pid, signal.SIGKILL)  # it may have no group of its own yet
            if (code := children.reap(pid)) is None:
                continue
            del self._pids[name]
            self._kill_at_s.pop(name, None)
            self.say("exited", name=name, pid=pid, code=code)


def warm_up() -> None:
    """Import what a server imports, including the registry of all models."""
    import torch

    torch.set_num_threads(1)
    set_start_method = multiprocessing.set_start_method
    set_start_method("fork", force=True)

    def always_fork(method: str | None = None, force: bool = False) -> None:
        """SGLang asks for "spawn" because of CUDA. There is no CUDA here, and spawning would repeat all imports."""
        set_start_method("fork", force=True)

    multiprocessing.set_start_method = always_fork
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.srt.entrypoints.http_server  # noqa: F401
    import sglang.srt.managers.detokenizer_manager  # noqa: F401
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.get_supported_archs()
    gc.collect()
    gc.freeze()


def main() -> None:
    events_fd = os.dup(1)
    os.dup2(2, 1)  # output of the imports must not mix with events
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C in a terminal the owner decides, by closing stdin
    began_s = time.monotonic()
    log_dir, owner_pid = Path(sys.argv[1]), int(sys.argv[2])
    if owner_pid:
        children.die_with_parent(owner_pid)
    zygote = Zygote(log_dir, events_fd)
    warm_up()
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    zygote.say("warm", seconds=round(time.monotonic() - began_s, 1), threads=threads)
    zygote.serve(0)


if __name__ == "__main__":
    main()
