"""Starting, watching and ending real servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stillhouse.sglang_server.servers import ServerError, Servers
from tests.patience import Limit
from tests.sglang.conftest import READY_S, STUDENT


def group(pid: int) -> list[psutil.Process]:
    """Living processes of a server's group."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, ProcessLookupError):
            continue
    return found


def wait_gone(
    pids: list[int],
) -> None:
    limit = Limit()
    while left := [process for pid in pids for process in group(pid)]:
        assert not limit.passed, f"still there: {left}"
        time.sleep(0.05)


def test_a_killed_server_is_reported_takes_its_helpers_along_and_can_be_started_again(servers: Servers) -> None:
    first = servers.start("phoenix", STUDENT)
    servers.wait_ready([first], READY_S)
    assert len(group(first.pid)) >= 2  # the server and its scheduler
    os.kill(first.pid, signal.SIGKILL)  # the leader only
    wait_gone([first.pid])
    while servers.exit_code(first) is None:
        time.sleep(0.02)
    second = servers.start("phoenix", STUDENT, port=first.port)
    servers.wait_ready([second], READY_S)
    servers.stop(second)

    assert servers.exit_code(first) == -signal.SIGKILL
    assert second.url == first.url and second.pid != first.pid
    wait_gone([second.pid])


def test_a_name_in_use_is_refused(servers: Servers) -> None:
    server = servers.start("twin", STUDENT)
    with pytest.raises(ServerError, match="is already running"):
        servers.start("twin", STUDENT)
    servers.stop(server, grace_s=0.0)


def test_a_server_that_cannot_start_says_why(servers: Servers, tmp_path: Path) -> None:
    server = servers.start("no-model", tmp_path / "nothing-here")
    with pytest.raises(ServerError, match="nothing-here"):
        servers.wait_ready([server], READY_S)


def test_without_the_environment_one_is_told_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make sglang-cpu"):
        Servers(tmp_path, python=tmp_path / "python")


def test_servers_die_with_a_killed_owner(servers: Servers, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from stillhouse.sglang_server.servers import Servers\n"
        "servers = Servers(Path(sys.argv[1])); server = servers.start('orphan', sys.argv[2])\n"
        "servers.wait_ready([server], 60); print(server.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path, STUDENT], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert group(pid)
        owner.kill()
    wait_gone([pid])
