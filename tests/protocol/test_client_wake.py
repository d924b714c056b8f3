"""`wake` ends a wait for messages: the worker has something else to do."""

from __future__ import annotations

import threading

from protocol.client import Client
from protocol.messages import Hello
from protocol.server import Server
from tests.patience import PATIENCE_S


def test_wake_ends_the_present_wait_or_the_next_one_once() -> None:
    server = Server("tcp://127.0.0.1:*", run_id="r", vocab_fingerprint="f", heartbeat_s=1.0, peer_timeout_s=PATIENCE_S)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            server.poll(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        hello = Hello(role="actor", name="actor-0", incarnation="i", run_id="r", vocab_fingerprint="f")
        with Client(server.address, hello) as client:
            client.connect()
            client.wake()
            assert client.recv(60.0) is None  # the test's own timeout would end a wait that nobody ended
            waker = threading.Timer(0.05, client.wake)
            waker.start()
            assert client.recv(60.0) is None
            waker.join()
            assert client.recv(0.01) is None
    finally:
        stop.set()
        thread.join()
        server.close()
