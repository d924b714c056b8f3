"""What was decided about GPUs reaches the workers: their device, the environment of NCCL; and a server that is not as
configured ends its worker for good."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

import stillhouse.engines.sglang.engine
import stillhouse.engines.sglang.scorer
from stillhouse import builtin
from stillhouse.actors.worker import main as actor_main
from stillhouse.launch.checks.placement import Choice, Placement
from stillhouse.launch.checks.threads import Threads
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.machine.gpus import Places
from stillhouse.launch.processes.local import LocalProcesses
from stillhouse.launch.processes.slots import RestartBudget, Worker
from stillhouse.launch.servers.watch import ServerWatch
from stillhouse.launch.workers.crew import Crew
from stillhouse.launch.workers.launch_plan import LaunchPlan
from stillhouse.launch.workers.start_role import StartRole, WorkFolder
from stillhouse.protocol.context import ExitCode, RoleContext, WorkerRole
from stillhouse.teachers.worker import main as teacher_main
from tests.launch.servers.test_another_engine import plan_of
from tests.server_features import CAPABLE

PLACED = Placement(
    Places({"learner": 0, "teacher-0": 1, "actor-0": 2, "actor-1": 3}, {}),
    Choice("nccl", ""),
    Threads({"learner": 4, "actor-1": 2}),
    "placed",
)


def test_a_worker_is_started_with_the_device_and_the_threads_that_it_was_given(tmp_path: Path) -> None:
    started: list[StartRole] = []

    def begin(start: StartRole, *, preloaded: bool) -> None:
        started.append(start)

    backend = SimpleNamespace(start=begin)
    workers = [Worker("learner", 0), Worker("teacher", 0), Worker("actor", 1), Worker("buffer", 0)]
    config = build(RunConfig, {"actor": {"engine": "torch"}, "teacher": {"engine": "torch"}})
    plan = LaunchPlan(config=config, began_s=0.0, placement=PLACED)
    watch = ServerWatch([plan_of("actor-0", 0)], config, tmp_path, RestartBudget(config.launch), "")
    watch.close()
    crew = Crew(plan, "r", cast(Any, backend), watch, workers)
    for worker in workers:
        crew.start(worker)
    assert workers[0].awaits_server and len(started) == 3, "a server loads on the learner's GPU"
    watch.slots["server-actor-0"].ever_up = True
    crew.start(workers[0])
    started.insert(0, started.pop())
    assert [start.device for start in started] == ["cuda:0", "cuda:1", "cuda:3", ""]
    assert [start.threads for start in started] == [4, 1, 2, 1]


def test_the_environment_of_nccl_goes_on_from_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    plan = LaunchPlan(config=build(RunConfig, {"actor": {"engine": "sglang"}}), began_s=0.0)
    backend = LocalProcesses(plan, WorkFolder(tmp_path))
    backend.close()
    expected = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert expected.items() <= backend.environment.items()


class Server:
    """An engine or a scorer that has connected to a server with tp 2, on a GPU."""

    closed = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.features = msgspec.structs.replace(CAPABLE, device="cuda", tp_size=2)

    def abort_leftovers(self) -> None:
        pass

    def close(self) -> None:
        Server.closed += 1


class Connection:
    """To the buffer; nothing is said."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wake(self) -> None:
        pass


@pytest.mark.parametrize("role", ["actor", "teacher"])
def test_a_server_with_another_tp_ends_its_worker_for_good(
    role: WorkerRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stillhouse.engines.sglang.engine, "SGLangEngine", Server)
    monkeypatch.setattr(stillhouse.engines.sglang.scorer, "SGLangScorer", Server)
    monkeypatch.setattr("stillhouse.protocol.client.Client", Connection)
    monkeypatch.setattr(Server, "closed", 0)
    settings = {"engine": "sglang", "server": {"device": "cuda"}}
    models = {"student": str(builtin.STUDENT_DIR), "teacher": str(builtin.TEACHER_DIR)}
    context: RoleContext[Any] = RoleContext(
        role=role,
        index=0,
        name=f"{role}-0",
        incarnation="i",
        run_id="r",
        run_dir=tmp_path,
        buffer_address="tcp://127.0.0.1:1",
        resume=False,
        config=build(RunConfig, {"actor": settings, "teacher": settings, "models": models}),
        server_url="http://127.0.0.1:1",
    )
    main: Any = actor_main if role == "actor" else teacher_main
    assert main(context) == ExitCode.USELESS
    assert "tp_size = 2, but server.tp is 1" in caplog.text
    assert Server.closed == 1
