"""Whole runs listen on loopback only, all their processes, whatever takes part. By the kernel's own list of sockets."""

from __future__ import annotations

import importlib.util
import ipaddress
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stillhouse.sglang_server.servers import DEFAULT_PYTHON
from tests.integration.conftest import Launched
from tests.patience import PATIENCE_S, eventually

AGENT = """
import aiohttp

async def asks(ctx, task):
    async with ctx.endpoint() as endpoint, aiohttp.ClientSession() as http:
        body = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with http.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
    ctx.reward(1.0)
"""


def listening(process: psutil.Process) -> set[tuple[str, str]]:
    """Address and program of each listening socket of a process and its descendants."""
    found: set[tuple[str, str]] = set()
    for each in [process, *process.children(recursive=True)]:
        try:
            for connection in each.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr[0], " ".join(each.cmdline())[:80]))
        except psutil.Error:
            continue  # it has just ended
    return found


def elsewhere(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those that others than this machine may reach."""

    def is_local(text: str) -> bool:
        address = ipaddress.ip_address(text)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    return {one for one in found if not is_local(one[0])}


def assert_local(run: Launched, at_least: int) -> None:
    run.until(lambda: len(run.steps()) >= 2, "two steps")
    found = listening(psutil.Process(run.process.pid))
    assert len(found) >= at_least, found
    assert elsewhere(found) == set()


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_a_server_for_everybody_is_seen(address: str) -> None:
    family = "socket.AF_INET6" if ":" in address else "socket.AF_INET"
    code = f"import socket, time; s = socket.create_server(({address!r}, 0), family={family}); time.sleep(999)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            eventually(
                lambda: {a for a, _ in elsewhere(listening(psutil.Process()))} == {address}, lambda: address, PATIENCE_S
            )
        finally:
            process.kill()


def test_a_run_with_endpoint_ranks_and_prometheus(launch: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(AGENT, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run = launch(
        *("--steps=1000", "--actors=2", "--teachers=2", "--learner.ranks=2", "--device=cpu"),
        *("--learner.tasks.env=asking:asks", f"--launch.prometheus={port}", "--learner.eval_every=0"),
    )
    run.until(lambda: len(run.steps()) >= 1, "a step")
    assert_local(run, 3)


def test_a_run_of_one_process_per_role(launch: Callable[..., Launched]) -> None:
    assert_local(launch("--steps=1000", "--actors=1", "--teachers=1", "--learner.eval_every=0"), 1)


@pytest.mark.skipif(not DEFAULT_PYTHON.exists(), reason="no .venv-sglang: make sglang-cpu")
def test_a_run_on_sglang_with_tensor_parallelism(
    launch: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # a core for each rank
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # it asks for Triton, which a CPU has not
    engines = ("--actor.engine=sglang", "--teacher.engine=sglang", "--teacher.server.tp=2", "--device=cpu")
    assert_local(launch("--steps=1000", "--actors=1", "--teachers=1", "--learner.eval_every=0", *engines), 4)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray (make ray)")
def test_a_run_on_ray(launch: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the daemons of a cluster that it starts for itself."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    hosts = [f"--cluster.{role}.{key}=1" for role in ("learner", "actors") for key in ("cpus", "memory_gib")]
    words = ("--backend=ray", "--cluster.actors.each=1", *hosts)
    assert_local(launch("--steps=1000", "--actors=1", "--teachers=1", "--learner.eval_every=0", *words), 6)
