"""ZeroMQ's monitor: what happens to the connections under a socket."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.tcp import bytes_received, tcp_socket

HANDSHAKE_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Monitor:
    """Of one socket, from before it binds or connects. Owned by the socket's thread."""

    def __init__(self, watched: zmq.Socket[bytes], events: int) -> None:
        self._watched = watched
        self.socket: Final = watched.context.socket(zmq.PAIR)
        """To be polled."""
        self.socket.linger = 0
        self.socket.set(zmq.RCVHWM, 0)  # ZeroMQ's I/O thread must never wait for us to read
        endpoint = f"inproc://monitor-{id(self)}"
        watched.monitor(endpoint, events)
        self.socket.connect(endpoint)

    def events(self) -> Iterator[tuple[int, int]]:
        """(event, value) of all that happened since."""
        with contextlib.suppress(zmq.Again):  # that is how ZeroMQ says that nothing more is there
            while True:
                told = recv_monitor_message(self.socket, zmq.NOBLOCK)
                yield told["event"], told["value"]

    def close(self) -> None:
        """Before the watched socket is closed. May be called again."""
        if not self.socket.closed:
            self._watched.disable_monitor()
            self.socket.close()


class DoorReport:
    """A connecting end's view of its connection: is there somebody who does not let us in, and does anything come?"""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self._monitor = Monitor(watched, HANDSHAKE_EVENTS | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._failed = 0
        self._fd: int | None = None
        self.unknown_key = False
        """The other end said that it does not know our key."""

    def read(self) -> None:
        for event, value in self._monitor.events():
            if event in (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED):
                self._fd = value if event == zmq.EVENT_CONNECTED else None
                continue
            self._failed += event != zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.unknown_key |= event == zmq.EVENT_HANDSHAKE_FAILED_AUTH

    def arrived_bytes(self) -> int:
        """What the present connection has brought, the beginnings of unfinished messages included: ZeroMQ shows a
        message only when it is whole. 0 where that cannot be told (not Linux, no connection)."""
        self.read()
        if self._fd is None or sys.platform != "linux":
            return 0
        with tcp_socket(self._fd) as tcp:
            return 0 if tcp is None else bytes_received(tcp)

    @property
    def complaint(self) -> str:
        """What may be wrong; empty when no handshake failed."""
        if not self._failed:
            return ""
        return (
            f"; somebody is there, but {self._failed} handshakes failed: one end encrypts and the other does not, or "
            "the folder `keys` is another run's"
        )

    def close(self) -> None:
        self._monitor.close()
