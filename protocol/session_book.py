"""All sessions of a server, apart from its socket: what a buffer that is started again must know of its peers.

The server opens, confirms and closes sessions as it reads the wire. `SessionBook` does the same from the account of
what was read (`buffer.journal.recovery` replays it), so that both come to the same logs: a peer that says Hello with
the same incarnation goes on behind the messages it has received, whichever process of the buffer sent them.
"""

from __future__ import annotations

import msgspec

from protocol.codec import Frame
from protocol.handshake import Doorkeeper
from protocol.messages import Hello
from protocol.session import PeerId, Session


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
    """Who is there, who was replaced by whom, and what each has not confirmed."""

    def __init__(self, door: Doorkeeper) -> None:
        self.door = door
        self.sessions: dict[PeerId, Session] = {}
        self.opened_total = 0

    def __repr__(self) -> str:
        return f"SessionBook({list(self.sessions.values())})"

    def open(self, hello: Hello) -> None:
        """A peer was let in as a new session; the one it had, if any, was closed before."""
        self.door.admitted(hello)
        self.opened_total += 1
        session = restored_session(hello, self.opened_total)
        self.sessions[session.peer] = session

    def close(self, peer: PeerId) -> Session | None:
        return self.sessions.pop(peer, None)

    def confirm(self, peer: PeerId, received_total: int) -> None:
        """A heartbeat said so. Raises ValueError for an impossible count."""
        session = self.sessions.get(peer)
        if session is not None:
            session.confirm(received_total)

    def keep(self, peer: PeerId, frames: list[Frame]) -> None:
        """A numbered message was sent; to a peer that had left, none."""
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
        """Into a book of no sessions."""
        self.opened_total = image.opened_total
        self.door.restore(image.vocab_fingerprint, image.incarnations)
        for one in image.sessions:
            session = restored_session(one.hello, one.number)
            session.restore(one.confirmed_total, [list[Frame](frames) for frames in one.log])
            self.sessions[session.peer] = session


def restored_session(hello: Hello, number: int) -> Session:
    """Without a connection: under a name that ROUTER gives to none (its own begin with a zero byte)."""
    session = Session(hello, number=number, identity=b"restored-%d" % number, now_s=0.0)
    session.reachable = False
    session.restored = True
    return session


def _image(session: Session) -> SessionImage:
    log = [[bytes(frame) for frame in frames] for frames in session.unconfirmed_frames()]
    return SessionImage(session.hello, session.number, session.confirmed_total, log)
