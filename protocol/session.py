"""The buffer's record of its peers: who is connected, when each was heard, and what was sent to it. No I/O.

Every numbered message stays in its session's log until the peer confirms it (`received_total` in its heartbeats), so a
broken connection loses nothing: the peer comes back with the same incarnation, and the rest of the log is sent again.

The server opens, confirms and closes sessions as it reads the wire. After a restart of the buffer,
`buffer.journal.recovery` replays the journal of what was read into a `SessionBook`, which thus ends with the same logs:
a peer with the same incarnation continues after the messages it has received, whichever buffer process sent them.
"""

from __future__ import annotations

from collections import deque

import msgspec

from stillhouse.protocol.codec import Frame
from stillhouse.protocol.handshake import Doorkeeper, PeerId
from stillhouse.protocol.messages import Hello


class PeerSession:
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
        """A former process of the buffer spoke to this peer, which has not been heard since."""
        self.last_heard_s = now_s
        # Not 0 for a peer that was counted as lost and comes back: its numbering continues.
        self.confirmed_total = hello.received_total
        """Messages that the peer has confirmed."""
        self._log: deque[list[Frame]] = deque()
        self.unconfirmed_bytes = 0

    def __repr__(self) -> str:
        link = "reachable" if self.reachable else "unreachable"
        return f"Session({self.peer}, {link}, unconfirmed={len(self._log)}, bytes={self.unconfirmed_bytes})"

    @property
    def unconfirmed(self) -> int:
        """Messages sent, or waiting for a connection, that the peer has not confirmed."""
        return len(self._log)

    @property
    def sent_total(self) -> int:
        """Messages numbered so far."""
        return self.confirmed_total + len(self._log)

    def reconnected(self, hello: Hello, *, identity: bytes, now_s: float) -> None:
        """The same incarnation on a new connection. Raises ValueError for an impossible count of received messages."""
        self.confirm(hello.received_total)
        self.hello = hello
        self.identity, self.reachable, self.restored = identity, True, False
        self.last_heard_s = now_s

    def keep(self, frames: list[Frame]) -> None:
        """Number one more message and keep it until it is confirmed."""
        self._log.append(frames)
        self.unconfirmed_bytes += sum(map(len, frames))

    def can_confirm(self, received_total: int) -> bool:
        """Whether a count of received messages is possible."""
        return self.confirmed_total <= received_total <= self.sent_total

    def confirm(self, received_total: int) -> None:
        """Forget messages that the peer has received. Raises ValueError for an impossible count."""
        if not self.can_confirm(received_total):
            raise ValueError(
                f"{received_total} messages received, expected {self.confirmed_total} to {self.sent_total}"
            )
        while self.confirmed_total < received_total:
            self.unconfirmed_bytes -= sum(map(len, self._log.popleft()))
            self.confirmed_total += 1

    def restore(self, confirmed_total: int, log: list[list[Frame]]) -> None:
        """Fill a session that has sent and confirmed nothing yet."""
        self.confirmed_total = confirmed_total
        for frames in log:
            self.keep(frames)

    def unconfirmed_frames(self) -> list[list[Frame]]:
        """The messages to send on a new connection, oldest first."""
        return list(self._log)


class SessionImage(msgspec.Struct, frozen=True, array_like=True):
    """One session at one moment."""

    hello: Hello
    number: int
    confirmed_total: int
    log: list[list[bytes]]


class BookImage(msgspec.Struct, frozen=True, array_like=True):
    """A SessionBook at one moment."""

    sessions: list[SessionImage]
    opened_total: int
    vocab_fingerprint: str
    incarnations: list[tuple[PeerId, list[str]]]


class SessionBook:
    """All sessions of a server, the incarnations they replaced, and the messages each peer has not confirmed."""

    def __init__(self, door: Doorkeeper) -> None:
        self.door = door
        self.sessions: dict[PeerId, PeerSession] = {}
        self.opened_total = 0

    def __repr__(self) -> str:
        return f"SessionBook({list(self.sessions.values())})"

    def open(self, hello: Hello) -> PeerSession:
        """A new session for an admitted peer, without a connection yet; a former session must be closed before."""
        self.door.admitted(hello)
        self.opened_total += 1
        session = restored_session(hello, self.opened_total)
        self.sessions[session.peer] = session
        return session

    def close(self, peer: PeerId) -> PeerSession | None:
        return self.sessions.pop(peer, None)

    def confirm(self, peer: PeerId, received_total: int) -> None:
        """Record what a heartbeat confirms; ignores peers that have left. Raises ValueError for an impossible count."""
        session = self.sessions.get(peer)
        if session is not None:
            session.confirm(received_total)

    def keep(self, peer: PeerId, frames: list[Frame]) -> None:
        """Record a numbered message that was sent; ignored for a peer that has left."""
        session = self.sessions.get(peer)
        if session is not None:
            session.keep(frames)

    def image(self) -> BookImage:
        return BookImage(
            sessions=[_image(session) for session in self.sessions.values()],
            opened_total=self.opened_total,
            vocab_fingerprint=self.door.vocab_fingerprint,
            incarnations=self.door.incarnations(),
        )

    def restore(self, image: BookImage) -> None:
        """Fill a book that has no sessions yet."""
        self.opened_total = image.opened_total
        self.door.restore(image.vocab_fingerprint, image.incarnations)
        for one in image.sessions:
            session = restored_session(one.hello, one.number)
            session.restore(one.confirmed_total, [list[Frame](frames) for frames in one.log])
            self.sessions[session.peer] = session


def restored_session(hello: Hello, number: int) -> PeerSession:
    """A session without a connection, under a name that ROUTER never gives (its own begin with a zero byte)."""
    session = PeerSession(hello, number=number, identity=b"restored-%d" % number, now_s=0.0)
    session.reachable = False
    session.restored = True
    return session


def _image(session: PeerSession) -> SessionImage:
    log = [[bytes(frame) for frame in frames] for frames in session.unconfirmed_frames()]
    return SessionImage(session.hello, session.number, session.confirmed_total, log)
