"""Real env servers of verifiers, on ports of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import msgpack
import zmq

from tests.actors.adapters.openenv_server import free_port
from tests.patience import PATIENCE_S, eventually

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
MADE_BY = "make verifiers installs what this needs"
PROGRAM = ROOT / "examples" / "agents" / "verifiers_server.py"


class Served(NamedTuple):
    address: str
    process: subprocess.Popen[bytes]


@contextmanager
def serving(taskset: str, *more: str, modules: Path | None = None) -> Generator[Served]:
    """A taskset of examples/agents, or of the folder `modules`."""
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    server = subprocess.Popen(
        [str(PYTHON), str(PROGRAM), taskset, "--address", address, *more],
        env={**os.environ, "PYTHONPATH": str(modules or ""), "TRANSFORMERS_VERBOSITY": "error"},
        cwd=ROOT,
    )

    def is_up() -> bool:
        assert server.poll() is None, "the server ended"
        with socket.socket() as probe:
            return not probe.connect_ex(("127.0.0.1", port))

    try:
        eventually(is_up, "the server is up")
        assert ask(address, "health", {}) == {"success": True, "error": None}
        yield Served(address, server)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(PATIENCE_S)


def ask(address: str, method: str, body: object) -> object:
    """One request of the server's protocol, and its reply."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.rcvtimeo = int(1000 * PATIENCE_S)
        asking.connect(address)
        asking.send_multipart([b"1", method.encode(), packed(body)])
        *_, data = asking.recv_multipart()
        return msgpack.unpackb(data)


def packed(value: object) -> bytes:
    return cast(bytes, msgpack.packb(value))
