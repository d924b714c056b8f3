"""The buffer's memory of one peer: who it is, when it was heard, and what was sent to it. No I/O: the server drives it.

Every numbered message stays in `log` until the peer says that it has it (`received_total` in its heartbeats), so that
a broken connection loses nothing: the peer comes back with the same incarnation, and the rest of the log is sent.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from protocol.codec import Frame
from protocol.messages import Hello, Role


class PeerId(NamedTuple):
    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


class Session:
    """One incarnation of one peer, over all its connections."""

    def __init__(self, hello: Hello, *, number: int, identity: bytes, now_s: float) -> None:
        self.hello = hello
        self.peer = PeerId(hello.role, hello.name)
        self.number = number
        self.identity = identity
        """ROUTER's name of the newest connection."""
        self.reachable = True
        """False once that connection took no more messages. What it sent before may still be read."""
        self.restored = False
        """It was another process of the buffer that spoke to it, and it has not been heard since."""
        self.last_heard_s = now_s
        # Of a peer that was counted as lost, and comes back: numbering goes on where it stands.
        self._confirmed_total = hello.received_total
        self._log: deque[list[Frame]] = deque()
        self._log_bytes = 0

    def __repr__(self) -> str:
        link = "reachable" if self.reachable else "unreachable"
        return f"Session({self.peer}, {link}, unconfirmed={len(self._log)}, bytes={self._log_bytes})"

    @property
    def unconfirmed(self) -> int:
        """Messages sent, or waiting for a connection, that the peer has not said it received."""
        return len(self._log)

    @property
    def unconfirmed_bytes(self) -> int:
        return self._log_bytes

    @property
    def confirmed_total(self) -> int:
        """Messages that the peer has said it received."""
        return self._confirmed_total

    @property
    def sent_total(self) -> int:
        """Messages numbered so far."""
        return self._confirmed_total + len(self._log)

    def reconnected(self, hello: Hello, *, identity: bytes, now_s: float) -> None:
        """The same incarnation on a new connection. Raises ValueError for an impossible count of received messages."""
        self.confirm(hello.received_total)
        self.hello = hello
        self.identity, self.reachable, self.restored = identity, True, False
        self.last_heard_s = now_s

    def keep(self, frames: list[Frame]) -> None:
        """Number one more message."""
        self._log.append(frames)
        self._log_bytes += sum(map(len, frames))

    def can_confirm(self, received_total: int) -> bool:
        """Whether a count of received messages is possible."""
        return self._confirmed_total <= received_total <= self._confirmed_total + len(self._log)

    def confirm(self, received_total: int) -> None:
        """Forget what the peer has. Raises ValueError for an impossible count."""
        if not self.can_confirm(received_total):
            first, last = self._confirmed_total, self._confirmed_total + len(self._log)
            raise ValueError(f"{received_total} messages received, expected {first} to {last}")
        while self._confirmed_total < received_total:
            self._log_bytes -= sum(map(len, self._log.popleft()))
            self._confirmed_total += 1

    def restore(self, confirmed_total: int, log: list[list[Frame]]) -> None:
        """Into a session of which nothing was sent or confirmed here."""
        self._confirmed_total = confirmed_total
        self._log.extend(log)
        self._log_bytes = sum(sum(map(len, frames)) for frames in log)

    def unconfirmed_frames(self) -> list[list[Frame]]:
        """What to send on a new connection, oldest first."""
        return list(self._log)
