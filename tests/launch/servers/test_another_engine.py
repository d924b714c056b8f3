"""Servers of an engine that the launcher has never heard of: everything that is the engine's own comes from it."""

from __future__ import annotations

import http.client
import sys
import time
from pathlib import Path

import pytest

from stillhouse.engines.config import WorkerSettings
from stillhouse.engines.provider import EngineRole, Launch, ServerCommand, ServerEngine, ServerFacts
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.processes.slots import RestartBudget
from stillhouse.launch.servers.plan import ServerPlan
from stillhouse.launch.servers.watch import ServerNews, ServerWatch
from tests.patience import PATIENCE_S, Limit

PROGRAM = """
import ctypes, http.server, os, signal, sys
print("NCCL_HOSTID", os.environ.get("NCCL_HOSTID"), flush=True)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
key = sys.stdin.readline().strip()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(204 if self.headers["X-Key"] == key else 403)
        self.end_headers()

http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


class OtherServers(ServerEngine):
    """Speaks nothing that SGLang does."""

    def command(self, launch: Launch, model: str, host: str, port: int, api_key: str, log: Path) -> ServerCommand:
        return ServerCommand((launch.python, *launch.arguments, host, str(port)), f"{api_key}\n".encode())

    def answers(self, host: str, port: int, api_key: str, timeout_s: float, certificate: str = "") -> bool:
        try:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
            connection.request("GET", "/", headers={"X-Key": api_key})
            return connection.getresponse().status == 204
        except OSError:
            return False

    def ask(
        self, key: str, role: EngineRole, settings: WorkerSettings, student: str
    ) -> tuple[list[ServerFacts], list[str]]:
        raise AssertionError("no server is attached")


@pytest.mark.parametrize("shared", [False, True])
def test_a_server_of_another_engine_is_started_watched_and_replaced(tmp_path: Path, shared: bool) -> None:
    """Where the members of the weight group share a GPU, it is a host of its own for NCCL."""
    plan = ServerPlan(
        worker="actor-0",
        model="",
        engine=OtherServers(),
        launch=Launch(Path(sys.executable), ("-c", PROGRAM), forked=False),
        gpus=(),
        host="127.0.0.1",
        port=0,
        start_timeout_s=PATIENCE_S,
    )
    config = build(RunConfig, {"launch": {"restart_backoff_s": 0.01}})
    watch = ServerWatch([plan], config, tmp_path, RestartBudget(config.launch), "its-key", shared=shared)
    news: list[ServerNews] = []

    def until_up(times: int) -> None:
        limit = Limit()
        while sum(each.kind == "up" for each in news) < times and not limit.passed:
            news.extend(watch.pump(restart=True))
            time.sleep(0.02)

    try:
        watch.start()
        until_up(1)
        assert watch.is_up("actor-0"), (tmp_path / "server-actor-0.log").read_text()
        watch.replace("actor-0")
        until_up(2)
        assert [each.kind for each in news] == ["up", "died", "up"]
        watch.stop()
    finally:
        watch.close()
    assert watch.slots["server-actor-0"].exit_codes == [-9, -15]
    host = "server-actor-0" if shared else "None"
    assert (tmp_path / "server-actor-0.log").read_text().splitlines()[0] == f"NCCL_HOSTID {host}"
