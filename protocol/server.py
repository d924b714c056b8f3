"""The buffer's end of the wire: one ROUTER socket, handshakes, and liveness of peers. It knows nothing of rollouts.

    poll() -> [PeerUp | PeerDown | FromPeer ...]      send(role, name, message, arrays)

A peer is a (role, name); its process is an incarnation; its connection is a ROUTER identity, which ROUTER invents for
each new connection (so no peer can take over another's, and ROUTER_HANDOVER is not needed). A new connection of the
same incarnation resumes the session without an event; a new incarnation replaces the former: PeerDown, then PeerUp.
A message that cannot be read or is not allowed is answered with Refused and counted; it is never fatal.

Used by one thread. A Hello that replaces or adds a peer starts a batch of events, and a Goodbye ends one. So everything
sent in reaction to the events of one poll reaches the incarnation that caused them.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import zmq

from stillhouse.protocol.bundle import unbundled
from stillhouse.protocol.codec import MAX_TO_BUFFER_BYTES, Array, Frame, Received, claimed_version, decode, encode
from stillhouse.protocol.errors import RemoteProtocolError
from stillhouse.protocol.flow import SENDERS, UNNUMBERED
from stillhouse.protocol.handshake import Doorkeeper, PeerId, ahead_of_journal, wrong_version
from stillhouse.protocol.keys import ServerKeys, speaks_for
from stillhouse.protocol.messages import (
    PROTOCOL_VERSION,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Role,
    WeightVersion,
    Welcome,
)
from stillhouse.protocol.printable import in_one_line, printable_texts
from stillhouse.protocol.ratelimit import OncePerInterval, RateLimitedLog
from stillhouse.protocol.router import Router, address_of
from stillhouse.protocol.server_events import Event, FromPeer, PeerDown, PeerUp
from stillhouse.protocol.session import PeerSession, SessionBook
from stillhouse.protocol.sockets import FromRouter

POLL_MESSAGES = 256
POLL_BUDGET_S = 0.02
"""One poll ends after this many messages or seconds of reading, so that a flood cannot keep the owner from its timers.
ROUTER takes turns between connections, so a flood of one peer cannot starve the others either."""
MAX_UNCONFIRMED_BYTES = 2 << 30
"""Default bound on unconfirmed bytes per peer: twice the largest message. A peer further behind counts as lost."""
REFUSAL_INTERVAL_S = 1.0
"""Minimum interval between two Refused sent to one connection; all refusals are counted."""
REMEMBERED_CONNECTIONS = 4096

log = logging.getLogger(__name__)


class PeerServer:
    """Binds at once; `bind` may end in port 0, and `address` gives the real port. With `keys`, only peers that have a
    listed key are accepted, each under the names of its key; without, any peer that reaches the address.

    `vocab_fingerprint` None: the learner decides, and peers that came before it with another one are dropped.
    `max_unconfirmed_bytes` is per peer. `restored`: the sessions of the former buffer process; their peers have
    `peer_timeout_s` from now on to come back.
    """

    def __init__(
        self,
        bind: str,
        *,
        run_id: str,
        vocab_fingerprint: str | None,
        heartbeat_s: float,
        peer_timeout_s: float,
        keys: ServerKeys | None = None,
        max_unconfirmed_bytes: int = MAX_UNCONFIRMED_BYTES,
        clock: Callable[[], float] = time.monotonic,
        restored: SessionBook | None = None,
    ) -> None:
        self._heartbeat_s = heartbeat_s
        self._peer_timeout_s = peer_timeout_s
        self._max_unconfirmed_bytes = max_unconfirmed_bytes
        self._clock = clock
        self._version = WeightVersion(0, 0)
        self.book: Final = restored or SessionBook(Doorkeeper(run_id=run_id, vocab_fingerprint=vocab_fingerprint))
        """All sessions, to take an image of them. Only the server changes it."""
        for session in self.book.sessions.values():
            session.last_heard_s = clock()
        self._by_identity = {session.identity: session for session in self.book.sessions.values()}
        self._expected_back_until_s = -math.inf if restored is None else clock() + peer_timeout_s
        self._held: tuple[bytes, zmq.Frame, Hello] | None = None
        """A Hello that has been read but belongs to the next batch of events, with its connection and source."""
        self._bundle: deque[FromRouter] = deque()
        """The rest of the bundle in hand."""
        self._refused: Counter[str] = Counter()
        self._source: zmq.Frame | None = None
        """A frame of the message in hand, which carries the metadata of its connection."""
        self._retired: OrderedDict[bytes, None] = OrderedDict()
        self._refusals = OncePerInterval(REFUSAL_INTERVAL_S, at_most=REMEMBERED_CONNECTIONS, clock=clock)
        self._log = RateLimitedLog(log)
        self._peer_log = RateLimitedLog(log, lines=200)  # all peers of a large run come and go at once
        self._polled_at_s = clock()
        self._all_alive_until_s = -math.inf
        """Before this no peer can have been silent for too long."""
        self._someone_behind = False
        """A peer has too many unconfirmed bytes."""
        self.hellos: Final[list[Hello]] = []
        """Hellos of the peers that came up in the last poll, one for each PeerUp."""
        self.overtaken = 0
        """Messages, Hellos among them, that arrived on a connection which is over: its peer has opened a newer one, it
        led to a former buffer process, or a message on it was damaged. The peer sends again what matters."""
        self._router = Router(
            bind, keys=keys, log=RateLimitedLog(log), known_from_s=self._expected_back_until_s, clock=clock
        )

    def __repr__(self) -> str:
        encrypted = ", encrypted" if self._router.encrypted else ""
        return (
            f"Server({self.address}{encrypted}, peers={len(self.book.sessions)}, refused={sum(self.refused.values())})"
        )

    @property
    def address(self) -> str:
        return self._router.address

    @property
    def refused(self) -> dict[str, int]:
        """Messages refused since the start, by code of `Refused`, and connections, by `ConnectionFault`."""
        return {**self._refused, **self._router.refused}

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Peers that count as alive."""
        return tuple(self.book.sessions)

    def unconfirmed(self, role: Role, name: str) -> int:
        """Messages that a peer has not confirmed yet; 0 for an unknown peer."""
        session = self.book.sessions.get(PeerId(role, name))
        return 0 if session is None else session.unconfirmed

    def set_published(self, version: WeightVersion) -> None:
        """Set the version that future Welcomes announce."""
        self._version = version

    def close(self, linger_s: float = 1.0) -> None:
        """Free the socket, after at most `linger_s` for delivering messages under way. Idempotent."""
        self._router.close(linger_s)

    # -------------------------------------------------------------------------------------------------- sending

    def send(self, role: Role, name: str, message: Message, arrays: Sequence[Array] = ()) -> None:
        """Number and send a message, and keep it until the peer confirms it. Do not change the arrays afterwards.

        A message to a peer that has left is logged and dropped (its PeerDown settles its work).
        Raises EncodeError.
        """
        session = self.book.sessions.get(PeerId(role, name))
        frames = encode(message, arrays)
        if session is None:
            if not isinstance(message, UNNUMBERED):  # the reply to a last heartbeat is no loss
                self._log.warning(f"{type(message).__name__} for {role} {name} has no receiver: the peer has left")
            return
        if not isinstance(message, UNNUMBERED):
            session.keep(frames)
            self._someone_behind |= session.unconfirmed_bytes > self._max_unconfirmed_bytes
        self._put(session, frames)

    def _put(self, session: PeerSession, frames: list[Frame]) -> None:
        if session.reachable:  # if not, the message stays in the log until the next connection or the peer timeout
            session.reachable = self._router.send(session.identity, frames)

    # -------------------------------------------------------------------------------------------------- reading

    def poll(self, timeout_s: float) -> list[Event]:
        """The events since the last poll, in order; waits up to `timeout_s` for the first."""
        events: list[Event] = []
        self.hellos.clear()
        self._drop_lost_peers(events)
        if self._held is None and not self._bundle and not events:
            self._router.wait(timeout_s)
        until_s = self._clock() + POLL_BUDGET_S
        for _ in range(POLL_MESSAGES):
            if not self._take_next(events) or self._clock() > until_s:
                break
        self._polled_at_s = self._clock()
        return events

    def _drop_lost_peers(self, events: list[Event]) -> None:
        """Looks at the peers only when one may be lost: a poll costs the same however many there are."""
        now_s = self._clock()
        away_s = now_s - self._polled_at_s
        if away_s > self._heartbeat_s:  # the owner did not poll: that is not the peers' silence
            for session in self.book.sessions.values():
                session.last_heard_s += away_s
        if now_s <= self._all_alive_until_s and not self._someone_behind:
            return
        self._someone_behind = False
        for session in list(self.book.sessions.values()):
            silent_s = now_s - session.last_heard_s
            if silent_s > self._peer_timeout_s:
                self._drop(session, f"silent for {silent_s:.1f} s", events)
            elif session.unconfirmed_bytes > self._max_unconfirmed_bytes:
                self._drop(session, f"{session.unconfirmed_bytes} bytes behind", events)
        oldest_s = min((session.last_heard_s for session in self.book.sessions.values()), default=now_s)
        self._all_alive_until_s = oldest_s + self._peer_timeout_s

    def _drop(self, session: PeerSession, reason: str, events: list[Event]) -> None:
        self.book.close(session.peer)
        del self._by_identity[session.identity]
        self._peer_log.info(f"{session.peer} is gone: {reason}")
        events.append(PeerDown(*session.peer, reason))

    def _take_next(self, events: list[Event]) -> bool:
        """Read one message. Returns False when the batch of events ends here."""
        if self._held is not None:
            (identity, self._source, hello), self._held = self._held, None
            self._greet(identity, hello, events)
            return True
        got = self._receive()
        if got is None:
            return False
        identity, source, frames, damage = got
        self._source = source
        if identity in self._retired:  # a peer that still uses it must say Hello again
            self.overtaken += 1
            self._send_refusal(
                identity, Refused("not_hello_first", "this connection is over", "", "Hello on a new one")
            )
            return True
        if damage is not None:
            self._refuse_unreadable(identity, frames, damage)
            if identity in self._by_identity:  # nothing behind the damaged message may be read before it has come again
                self._retire(identity)
            return True
        session = self._by_identity.get(identity)
        if session is not None:
            session.last_heard_s = self._clock()
        try:
            message, arrays = decode(frames, max_bytes=MAX_TO_BUFFER_BYTES)
            received = Received(printable_texts(message), arrays)
        except RemoteProtocolError as error:
            self._refuse_unreadable(identity, frames, error)
            return True
        if isinstance(received.message, Hello):
            owner, hello = self._router.owner_of(source), received.message
            if owner is not None and not speaks_for(owner, hello.role, hello.name):
                got = f"the key of {owner} for {hello.role} {hello.name}"
                self._refuse(identity, Refused("key", "this key is another peer's", got, f"that of {hello.name}"))
                return True
            if events:
                self._held = (identity, source, received.message)
                return False
            self._greet(identity, received.message, events)
            return True
        return self._take(identity, session, received, events)

    def _receive(self) -> FromRouter | None:
        """The next message, which may be one of several in a bundle."""
        if not self._bundle:
            got = self._router.receive()
            if got is None or got.damage is not None:
                return got
            identity, source, frames, _ = got
            self._bundle.extend(FromRouter(identity, source, message, None) for message in unbundled(frames))
        return self._bundle.popleft()

    def _take(self, identity: bytes, session: PeerSession | None, received: Received, events: list[Event]) -> bool:
        message = received.message
        kind = type(message).__name__
        if session is None:
            refused = Refused("not_hello_first", "this connection has not said Hello", kind, "Hello")
            if self._clock() < self._expected_back_until_s:  # it said Hello to the former buffer process
                self.overtaken += 1
                self._send_refusal(identity, refused)
            else:
                self._refuse(identity, refused)
            return True
        role, name = session.peer
        if role not in SENDERS.get(type(message), ()):
            expected = f"a message of role {role}"
            self._refuse(identity, Refused("role", f"{session.peer} may not send this", kind, expected))
            return True
        if isinstance(message, Goodbye):
            events.append(FromPeer(role, name, received))
            self._drop(session, f"goodbye: {in_one_line(message.reason)}", events)
            return False
        if isinstance(message, Heartbeat):
            try:
                session.confirm(message.received_total)
            except ValueError as error:
                expected = "the number of messages received"
                self._refuse(identity, Refused("malformed", f"{session.peer} counts wrongly", str(error), expected))
                return True
        events.append(FromPeer(role, name, received))
        return True

    # ------------------------------------------------------------------------------------------------ handshake

    def _greet(self, identity: bytes, hello: Hello, events: list[Event]) -> None:
        peer = PeerId(hello.role, hello.name)
        refused = self.book.door.objection(hello)
        session = self._by_identity.get(identity)
        if refused is None and session is not None and session.peer != peer:
            refused = Refused("role", "this connection belongs to another peer", str(peer), str(session.peer))
        if refused is not None:
            self._refuse(identity, refused)
            return
        former = self.book.sessions.get(peer)
        if former is not None and former.hello.incarnation != hello.incarnation and hello.role == "launcher":
            # A launcher is never restarted within a run: another holder of a launcher key must not replace it.
            message = f"{peer} is here already; give each process its own name"
            self._refuse(identity, Refused("duplicate_name", message, hello.incarnation, "another name"))
            return
        if former is not None and former.hello.incarnation == hello.incarnation:
            if hello.connection < former.hello.connection:
                self.overtaken += 1
                return
            if former.identity == identity:  # Hello twice on one connection: nothing was lost
                self._welcome(former)
                return
            if former.can_confirm(hello.received_total):
                self._resume(former, identity, hello)
                return
            if former.restored and hello.received_total > former.sent_total:
                self._refuse(identity, ahead_of_journal(hello, former.sent_total))
                return
        if former is not None:
            self._drop(former, f"replaced by incarnation {hello.incarnation}", events)
        session = self.book.open(hello)
        session.reconnected(hello, identity=identity, now_s=self._clock())
        for other in [other for other in self.book.sessions.values() if self.book.door.misreads(other.hello)]:
            self._drop(other, "its vocabulary is not the learner's", events)
        self._by_identity[identity] = session
        self._welcome(session)
        self.hellos.append(hello)
        self._peer_log.info(f"{peer} is here, incarnation {hello.incarnation}")
        events.append(PeerUp(hello.role, hello.name, hello.incarnation, hello.pool))

    def _resume(self, session: PeerSession, identity: bytes, hello: Hello) -> None:
        del self._by_identity[session.identity]
        self._retire(session.identity)
        self._by_identity[identity] = session
        session.reconnected(hello, identity=identity, now_s=self._clock())
        self._peer_log.info(f"{session.peer} reconnected, {session.unconfirmed} messages to send again")
        self._welcome(session)
        for frames in session.unconfirmed_frames():
            self._put(session, frames)

    def _retire(self, identity: bytes) -> None:
        """Ignore this connection from now on."""
        self._retired[identity] = None
        if len(self._retired) > REMEMBERED_CONNECTIONS:
            self._retired.popitem(last=False)

    def _welcome(self, session: PeerSession) -> None:
        if self._source is not None:
            self._router.let_in(self._source)
        welcome = Welcome(self._heartbeat_s, self._peer_timeout_s, self._version, self.book.door.run_id)
        self._put(session, encode(welcome))

    # ------------------------------------------------------------------------------------------------- refusals

    def _refuse_unreadable(self, identity: bytes, frames: Sequence[Frame], error: RemoteProtocolError) -> None:
        bare = error.code == "damaged" and len(frames) == 1  # a Hello of a release without checksums is one frame
        version = claimed_version(frames[0]) if frames and (bare or error.code == "malformed") else None
        if version is not None and version != PROTOCOL_VERSION:
            self._refuse(identity, wrong_version(version))
        else:
            self._refuse(identity, Refused(error.code, error.message, error.got, error.expected))

    def _refuse(self, identity: bytes, refused: Refused) -> None:
        self._refused[refused.code] += 1
        session = self._by_identity.get(identity)
        who = f"{'a stranger' if session is None else session.peer} at {address_of(self._source)}"
        refused = msgspec.structs.replace(refused, got=in_one_line(refused.got))
        self._log.warning(
            f"refused ({refused.code}) {who}: {refused.message}; got {refused.got}, expected {refused.expected}"
        )
        self._send_refusal(identity, refused)

    def _send_refusal(self, identity: bytes, refused: Refused) -> None:
        if self._refusals.due(identity):
            self._router.send(identity, encode(refused))
