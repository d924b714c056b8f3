"""Every test here must end without a thread or a file descriptor (ZeroMQ's sockets and contexts hold several) more."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psutil
import pytest
import zmq


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    zmq.Context[zmq.Socket[bytes]]().term()  # what ZeroMQ opens once per process
    process = psutil.Process()
    threads, fds = set(threading.enumerate()), process.num_fds()
    yield
    leaked = set(threading.enumerate()) - threads
    assert not leaked, f"threads left running: {leaked}"
    assert process.num_fds() <= fds, f"{process.num_fds() - fds} file descriptors left open"
