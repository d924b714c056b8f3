"""Servers of an engine that the launcher has never heard of: everything that is the engine's own comes from it."""

from __future__ import annotations

import http.client
import sys
import time
from pathlib import Path

import pytest

from stillhouse.engines.base import EngineLost
from stillhouse.engines.config import WorkerSettings
from stillhouse.engines.provider import EngineRole, Launch, ServerCommand, ServerEngine, ServerFacts
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.processes.slots import RestartBudget
from stillhouse.launch.servers.plan import ServerPlan
from stillhouse.launch.servers.watch import ServerChange, ServerWatch
from stillhouse.protocol.turns import Turn
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


class SharingServers(OtherServers):
    """Keeps what was released, by its URL."""

    def __init__(self, fails: int = 0) -> None:
        self.released: list[str] = []
        self._fails = fails

    def give_back(self, url: str, api_key: str, certificate: str = "") -> None:
        assert api_key == "its-key"
        if self._fails:
            self._fails -= 1
            raise EngineLost("no memory saver")
        self.released.append(url)


def plan_of(worker: str, *devices: int, engine: ServerEngine | None = None) -> ServerPlan:
    return ServerPlan(
        worker=worker,
        model="",
        engine=engine or OtherServers(),
        launch=Launch(Path(sys.executable), ("-c", PROGRAM), forked=False),
        devices=devices,
        gpus=tuple(map(str, devices)),
        host="127.0.0.1",
        port=0,
        start_timeout_s=PATIENCE_S,
    )


def test_servers_that_share_a_gpu_start_in_turn_and_what_is_embedded_there_waits_for_them(tmp_path: Path) -> None:
    plans = [plan_of("actor-0", 0), plan_of("teacher-0", 1, 0), plan_of("teacher-1", 2)]
    config = build(RunConfig, {"launch": {"restart_backoff_s": 0.01}})
    watch = ServerWatch(plans, config, tmp_path, RestartBudget(config.launch), "its-key")
    assert watch.start_timeout_s == 2 * PATIENCE_S
    came_up: list[str] = []
    limit = Limit()
    try:
        watch.start()
        assert {name: slot.state for name, slot in watch.slots.items()} == {
            "server-actor-0": "starting",
            "server-teacher-0": "idle",
            "server-teacher-1": "starting",
        }
        assert watch.loading_on(0) and watch.loading_on(1) and not watch.loading_on(3) and not watch.loading_on(None)
        while len(came_up) < 3 and not limit.passed:
            assert (
                watch.loading_on(0) and watch.loading_on(1) and not watch.loading_on(3) and not watch.loading_on(None)
            )
            if watch.slots["server-teacher-0"].state != "idle":
                assert watch.is_up("actor-0")
            came_up += [each.worker for each in watch.pump(restart=True) if each.kind == "up"]
            time.sleep(0.02)
        assert came_up.index("actor-0") < came_up.index("teacher-0")
        assert not watch.loading_on(0) and not watch.loading_on(1)
        watch.replace("actor-0")
        assert not watch.loading_on(0), "nobody waits for a server that is started again"
    finally:
        watch.close()


def test_in_turns_servers_start_one_at_a_time_and_are_released_before_the_turn_is_over(tmp_path: Path) -> None:
    """Also one that is started again, and one that does not release its memory is killed."""
    engine = SharingServers(fails=1)
    plans = [plan_of(worker, engine=engine) for worker in ("actor-0", "teacher-0")]
    config = build(RunConfig, {"launch": {"restart_backoff_s": 0.01}})
    turn = Turn(tmp_path / "turn", "the start of a server")
    watch = ServerWatch(plans, config, tmp_path, RestartBudget(config.launch), "its-key", turn=turn)
    assert watch.start_timeout_s == 2 * PATIENCE_S
    news: list[ServerChange] = []

    def until_up(times: int) -> None:
        limit = Limit()
        while sum(each.kind == "up" for each in news) < times and not limit.passed:
            news.extend(watch.pump(restart=True))
            starting = [slot for slot in watch.slots.values() if slot.state == "starting"]
            assert len(starting) <= 1
            assert (turn.holder == "the start of a server") == bool(starting)
            assert {slot.url for slot in watch.slots.values() if slot.state == "up"} <= {*engine.released}
            time.sleep(0.01)

    try:
        watch.start()
        until_up(2)
        (failed,) = [each.text for each in news if each.kind == "died"]
        assert "did not release its memory: no memory saver; it is started again" in failed
        watch.replace("teacher-0")
        until_up(3)
        assert len(engine.released) == 3
    finally:
        watch.close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_server_of_another_engine_is_started_watched_and_replaced(tmp_path: Path, shared: bool) -> None:
    """Where the members of the weight group share a GPU, it is a host of its own for NCCL."""
    plan = plan_of("actor-0")
    config = build(RunConfig, {"launch": {"restart_backoff_s": 0.01}})
    watch = ServerWatch([plan], config, tmp_path, RestartBudget(config.launch), "its-key", shared=shared)
    news: list[ServerChange] = []

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
