"""A real vLLM server as somebody else would run it: `vllm serve`, in a session of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from stillhouse.engines.vllm.servers import DEFAULT_PYTHON
from stillhouse.protocol.addresses import free_port
from tests.patience import PATIENCE_S, Limit

ENVIRONMENT: Final = {
    **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"},
    **{"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"},
}
"""Without the last one the first log-probs of prompts would be compiled for, up to a minute."""
ARGS: Final = (
    *(
        "--served-model-name",
        "a-model",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--kv-cache-memory-bytes",
        "268435456",
    ),
    *("--max-num-batched-tokens", "64", "--max-num-seqs", "16"),
)
"""A prompt of more than 64 tokens is computed in pieces."""


@dataclass(frozen=True)
class Attached:
    """One server."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def kill(self) -> None:
        """All its processes at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(model: Path, log: Path, port: int = 0, *arguments: str) -> Generator[Attached]:
    """Started at once; `wait_ready` waits for it."""
    if not DEFAULT_PYTHON.exists():
        pytest.skip("no .venv-vllm: make vllm-cpu")
    port = port or free_port("127.0.0.1")
    command = [DEFAULT_PYTHON.with_name("vllm"), "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, *ARGS, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
    server = Attached(port, process, log)
    try:
        yield server
    finally:
        server.kill()


def wait_ready(server: Attached) -> None:
    """Until it answers, which takes about half a minute of imports."""
    limit = Limit(4 * PATIENCE_S)
    while True:
        with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=2.0).close()
            return
        said = "\n".join(server.log.read_text(errors="replace").splitlines()[-30:])
        assert server.process.poll() is None, f"vLLM ended with {server.process.returncode}:\n{said}"
        assert not limit.passed, f"vLLM is not ready after {limit}:\n{said}"
        time.sleep(0.3)
