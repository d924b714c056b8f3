"""Every test here must end without a thread or a file descriptor (ZeroMQ's sockets and contexts hold several) more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import zmq

from tests.patience import PATIENCE_S

CLOSE_WITHIN_S: Final = PATIENCE_S
"""Not all is closed by who ends a test: ZeroMQ's own threads hang up, an accepted connection is noticed late."""


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
    threads, files = set(threading.enumerate()), open_files()
    yield
    leaked = set(threading.enumerate()) - threads
    assert not leaked, f"threads left running: {leaked}"
    deadline_s = time.monotonic() + CLOSE_WITHIN_S
    while len(left := open_files()) > len(files) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    more = {number: what for number, what in left.items() if files.get(number) != what}
    assert len(left) <= len(files), f"{len(left) - len(files)} file descriptors left open, among {more}"


def open_files() -> dict[int, str]:
    """Descriptors of this process, and what each is of."""
    found = dict[int, str]()
    for link in Path("/proc/self/fd").iterdir():
        try:
            found[int(link.name)] = str(link.readlink())
        except FileNotFoundError:  # that of this listing itself, or closed just now
            continue
    return found
