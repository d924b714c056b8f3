"""A TCP link of so many bytes per second towards the worker, which can be cut."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final

PIECE_S: Final = 0.02
BUFFER_BYTES: Final = 16 << 10
"""Of the kernel, on both sides: what is under way does not hide in there."""


class SlowLink:
    """Connections to `address` (a ZeroMQ endpoint) begin at `self.address`. All counts are of what went downwards."""

    def __init__(self, upstream: str, bytes_per_s: int) -> None:
        host, _, port = upstream.removeprefix("tcp://").rpartition(":")
        self._upstream = (host, int(port))
        self.bytes_per_s = bytes_per_s
        self.accepted = 0
        self.passed_bytes = 0
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def cut(self) -> None:
        """All connections; new ones may come."""
        for end in tuple(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _start(self, work: object, *args: socket.socket) -> None:
        assert callable(work)
        thread = threading.Thread(target=work, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                worker, _ = self._listener.accept()
            except OSError:
                return
            buffer = socket.socket()
            buffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            try:
                buffer.connect(self._upstream)
            except OSError:
                worker.close()
                buffer.close()
                continue
            self.accepted += 1
            self._open |= {worker, buffer}
            self._start(self._up, worker, buffer)
            self._start(self._down, buffer, worker)

    def _up(self, worker: socket.socket, buffer: socket.socket) -> None:
        with suppress(OSError):
            while data := worker.recv(1 << 16):
                buffer.sendall(data)
        self._end(buffer, worker)

    def _down(self, buffer: socket.socket, worker: socket.socket) -> None:
        with suppress(OSError):
            while data := buffer.recv(max(1, int(self.bytes_per_s * PIECE_S))):
                worker.sendall(data)
                self.passed_bytes += len(data)
                time.sleep(len(data) / self.bytes_per_s)
        self._end(buffer, worker)
        for end in (buffer, worker):
            self._open.discard(end)
            end.close()

    def _end(self, *ends: socket.socket) -> None:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def slow_link(upstream: str, bytes_per_s: int) -> Generator[SlowLink]:
    link = SlowLink(upstream, bytes_per_s)
    try:
        yield link
    finally:
        link.close()
