"""Real servers of OpenEnv, on ports of their own."""

from __future__ import annotations

import socket
import subprocess
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.patience import PATIENCE_S, eventually

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-openenv" / "bin" / "python"
MADE_BY = "make openenv installs what this needs"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def serving(folder: Path, app: str) -> Generator[str]:
    """The app `module:name` of a folder; the value is its address."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [PYTHON, "-m", "uvicorn", "--app-dir", folder, app, "--port", port, "--log-level", "warning"]
    server = subprocess.Popen([str(part) for part in command])

    def is_up() -> bool:
        assert server.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1.0).close()
        except OSError:
            return False
        return True

    try:
        eventually(is_up, "the server is up")
        yield url
    finally:
        server.terminate()
        server.wait(PATIENCE_S)
