"""Every test here must end without a thread or a file descriptor (ZeroMQ's sockets and contexts hold several) more."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psutil
import pytest
import zmq


@pytest.fixture(scope="session")
def opened_once_per_process() -> None:
    """What ZeroMQ and pyzmq open the first time: pyzmq's thread that frees what was sent without a copy among it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    sender.bind("inproc://once")
    receiver.connect("inproc://once")
    sender.send(bytes(1 << 20), copy=False, track=True)
    receiver.recv()
    context.destroy(linger=0)


@pytest.fixture(autouse=True)
def nothing_leaks(opened_once_per_process: None) -> Iterator[None]:
    process = psutil.Process()
    threads, fds = set(threading.enumerate()), process.num_fds()
    yield
    leaked = set(threading.enumerate()) - threads
    assert not leaked, f"threads left running: {leaked}"
    assert process.num_fds() <= fds, f"{process.num_fds() - fds} file descriptors left open"
