"""Real SGLang servers as the launcher starts them: forked from a zygote, which may die too, or a process each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from stillhouse import builtin
from stillhouse.engines.provider import Launch
from stillhouse.engines.sglang.servers import SGLangServers
from stillhouse.launch.servers.plan import ServerPlan
from stillhouse.launch.servers.processes import Event, ServerExited, ServerProcesses, ServerStarted, shared_files
from stillhouse.protocol.addresses import free_port
from stillhouse.sglang_server.servers import DEFAULT_PYTHON, SERVER_ARGS, answers, server_environment
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, Limit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DEFAULT_PYTHON.exists(), reason="no .venv-sglang: make sglang-cpu"),
]
KEY = "a-key-of-this-test"


class Watched:
    """Server processes, and all that was heard of them."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.processes = ServerProcesses(log_dir, lambda temporary: {"TMPDIR": str(temporary)})
        self.events: list[Event] = []

    def start(self, worker: str, *, shim: bool = True) -> int:
        """Its port."""
        plan = ServerPlan(
            worker=worker,
            model=str(builtin.STUDENT_DIR),
            engine=SGLangServers(),
            launch=Launch(DEFAULT_PYTHON, SERVER_ARGS, shim),
            gpus=(),
            host="127.0.0.1",
            port=0,
            start_timeout_s=PATIENCE_S,
        )
        port = free_port("127.0.0.1")
        self.processes.start(plan, port, KEY)
        return port

    def until_answers(self, port: int) -> None:
        self._until(lambda: answers("127.0.0.1", port, KEY), f"port {port} to answer")

    def until_exited(self, name: str) -> int:
        def codes() -> list[int]:
            return [event.code for event in self.events if isinstance(event, ServerExited) and event.name == name]

        self._until(lambda: bool(codes()), f"{name} to exit")
        return codes()[-1]

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        limit = Limit(RUN_PATIENCE_S)  # to import SGLang takes a busy machine more than a minute
        while not reached():
            self.events += self.processes.poll()
            assert not limit.passed, f"waited for {what}; heard {self.events}"
            time.sleep(0.05)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    yield watched
    watched.processes.close()
    ours = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
    assert not [line for line in ours if "zygote" in line and str(tmp_path) in line]


def test_forked_servers_answer_who_has_the_key_and_keep_it_out_of_their_logs(watched: Watched) -> None:
    ports = [watched.start("actor-0"), watched.start("teacher-0")]
    for port in ports:
        watched.until_answers(port)
        assert not answers("127.0.0.1", port, "another key")
    assert {event.name for event in watched.events} == {"server-actor-0", "server-teacher-0"}
    assert all(isinstance(event, ServerStarted) for event in watched.events)
    watched.processes.stop("server-actor-0")
    assert watched.until_exited("server-actor-0") in (0, -signal.SIGTERM)
    log = watched.log_dir / "server-teacher-0.log"
    assert "'api_key': '(hidden)'" in log.read_text()
    assert not [file for file in watched.log_dir.iterdir() if KEY in file.read_text()]


def test_servers_of_a_dead_zygote_are_gone_and_the_next_start_makes_another(watched: Watched) -> None:
    watched.until_answers(watched.start("actor-0"))
    server = psutil.Process(watched.processes.pids["server-actor-0"])
    zygote = server.parent()
    assert zygote is not None
    zygote.send_signal(signal.SIGKILL)
    assert watched.until_exited("server-actor-0") == -signal.SIGKILL
    watched.until_answers(watched.start("actor-0"))


def test_a_server_in_a_process_of_its_own_has_its_arguments_on_no_command_line(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server_environment(os.environ).items():
        monkeypatch.setenv(name, value)
    port = watched.start("actor-0", shim=False)
    watched.until_answers(port)
    leader = psutil.Process(watched.processes.pids["server-actor-0"])
    family = [leader, *leader.children(recursive=True)]
    assert len(family) >= 3  # with scheduler and detokenizer, which were spawned and import serve.py again
    assert not [word for process in family for word in process.cmdline() if KEY in word or str(port) in word]
    assert KEY not in (watched.log_dir / "server-actor-0.log").read_text()
    shared = shared_files(leader.pid)
    assert shared and all(file.exists() for file in shared)
    watched.processes.kill("server-actor-0")
    assert watched.until_exited("server-actor-0") == -signal.SIGKILL
    assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]
    assert not any(file.exists() for file in shared)  # SGLang leaves them in /dev/shm


def test_a_zygote_that_still_imports_is_not_waited_for(watched: Watched) -> None:
    watched.start("actor-0")
    watched.processes.close()
    assert watched.until_exited("server-actor-0") == -signal.SIGKILL
    assert watched.processes.pids == {}
