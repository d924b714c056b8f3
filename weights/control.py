"""The control channel of the weight groups: a ZeroMQ socket at rank 0, and one at each member
(weights.control_messages).

With it an idle member waits on a socket instead of in a collective: it can leave at once, and on a GPU no kernel spins.
Rank 0 also learns which member is missing; a collective only shows that some member is. Every message carries the
group's epoch. Both sides ignore messages of another group, and damaged ones (`protocol.sockets`): the silence that
follows breaks the group, and the next plan makes another. When a connection breaks, ZeroMQ makes another one. Then each
side says again what it said last, because the other may not have heard it, and ignores what it has heard before.

The WeightPlan carries the address of this channel and, in a run without keys, a pair of keys for it, so that only
members can connect. torch's TCP store would not do instead: its clients cannot wait for two things, cannot be woken,
and log every wait that times out; and an actor whose engine is a server has no torch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Self, cast

import msgspec
import zmq

from stillhouse.protocol.codec import Frame
from stillhouse.protocol.errors import DamagedMessage
from stillhouse.protocol.keys import ClientKeys, ServerKeys, encrypt_client, speaks_for
from stillhouse.protocol.messages import WeightPlan
from stillhouse.protocol.monitor import Reconnects
from stillhouse.protocol.printable import in_one_line, printable_texts
from stillhouse.protocol.ratelimit import RateLimitedLog
from stillhouse.protocol.router import WAITING_MESSAGES, ConnectionFault, Router, address_of
from stillhouse.protocol.sockets import FromRouter, new_socket, receive_frames, send_frames
from stillhouse.weights.control_messages import (
    FromMember,
    FromRankZero,
    Leave,
    MemberAnswer,
    MemberJoined,
    MemberReady,
    Want,
    WirePiece,
)

log = logging.getLogger(__name__)

MAX_CONTROL_BYTES: Final = 64 << 10
"""The largest frame of a member: a few numbers, and a reason of LONGEST_WORDS."""
LONGEST_WORDS: Final = 4000
"""Characters of a reason."""
MAX_UNREAD_BYTES: Final = 1 << 20
"""Bound on unread bytes of one member, and of all connections that have not joined together; above it they are cut."""
MESSAGES_PER_MEMBER: Final = 16
"""Messages that may wait for rank 0 per member, and requests for pieces likewise. A member sends three messages, and
one more each round."""
WATCH_S: Final = 0.1
_MEMBER: Final = "member"
"""Owner of the keys in a plan."""
_LINGER_MS: Final = 500
"""Time for delivering a last message (Leave, Answer) after `close`."""


_encode = msgspec.msgpack.Encoder().encode


class Request(NamedTuple):
    """A member's wish for pieces, and the connection on which it wants them."""

    route: bytes
    want: Want


class ControlHost:
    """Rank 0's end, for all its groups. A thread of its own reads it all the time, so that it cannot fill up while rank
    0 does other things, and drops messages that do not belong to the present group. One other thread uses it."""

    def __init__(self, host: str, port: int, keys: ServerKeys | None = None) -> None:
        """Listens on `host` (port 0: the system chooses) for holders of `keys`. None: the run has no keys; this channel
        then makes a pair for its members, which each plan carries (`plan_keys`). Raises AddressUnusable."""
        bracketed = f"[{host}]" if ":" in host else socket.gethostbyname(host)
        self._log = RateLimitedLog(log)
        self.plan_keys: tuple[str, str, str] | None = None
        """For WeightPlan.control_keys."""
        if keys is None:
            (public, secret), (server, server_secret) = zmq.curve_keypair(), zmq.curve_keypair()
            self.plan_keys = (public.decode(), secret.decode(), server.decode())
            keys = ServerKeys(server, server_secret, {public: _MEMBER})
        self._router = Router(
            f"tcp://{bracketed}:{port or '*'}",
            keys=keys,
            log=self._log,
            max_frame_bytes=MAX_CONTROL_BYTES,
            max_unread_bytes=MAX_UNREAD_BYTES,
            max_strangers_unread_bytes=MAX_UNREAD_BYTES,
        )
        port_taken = self._router.address.rpartition(":")[2]
        self.endpoint: Final = f"tcp://{f'[{host}]' if ':' in host else host}:{port_taken}"
        """For WeightPlan.control."""
        self._decoder = msgspec.msgpack.Decoder(FromMember | Want)
        self._changed = threading.Condition()
        # Under `changed`:
        self._group_epoch = 0
        self._members: tuple[str, ...] = ()
        self._routes: dict[int, bytes] = {}
        self._said: Frame | None = None
        """What all members of the group were told last."""
        self._heard: list[FromMember] = []
        self._wanted: list[Request] = []
        self._to_send: list[tuple[bytes, list[Frame]]] = []
        self._closing = False
        self._failure: Exception | None = None
        self.unreadable_total = 0
        """Messages that did not come from a member, or could not be read."""
        self._waker = Waker()
        self._router.also_wait_for(self._waker.fileno())
        self._thread = threading.Thread(target=self._serve, name="weight-control", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> dict[ConnectionFault, int]:
        """Connections refused or cut, by reason."""
        return self._router.refused

    def begin(self, group_epoch: int, members: Sequence[str]) -> None:
        """From now on only messages of this group count. `members`: their names, by rank from 1 on."""
        with self._changed:
            self._group_epoch, self._members = group_epoch, tuple(members)
            self._routes, self._heard, self._wanted, self._said = {}, [], [], None

    def poll(self, timeout_s: float) -> list[FromMember]:
        """Messages of the present group; waits up to `timeout_s` for the first. Raises the error that ended the
        thread."""
        with self._changed:
            if not self._heard and self._failure is None:
                self._changed.wait(max(0.0, timeout_s))
            if self._failure is not None:
                raise self._failure
            heard, self._heard = self._heard, []
            return heard

    def send(self, message: FromRankZero) -> None:
        """Send to every member that has joined."""
        frame = _encode(message)
        with self._changed:
            self._said = frame
            self._to_send.extend((route, [frame]) for route in self._routes.values())
        self._waker.wake()

    def requests(self, timeout_s: float) -> list[Request]:
        """Pieces that members of the present group want; waits up to `timeout_s` for the first request or message.
        Raises the error that ended the thread."""
        with self._changed:
            if not self._wanted and not self._heard and self._failure is None:
                self._changed.wait(max(0.0, timeout_s))
            if self._failure is not None:
                raise self._failure
            wanted, self._wanted = self._wanted, []
            return wanted

    def send_piece(self, request: Request, index: int, piece_b: Frame) -> zmq.MessageTracker:
        """Answer a request. The bytes must not change until the tracker says that they have left this process."""
        frame = _encode(WirePiece(request.want.group_epoch, request.want.number, index))
        tracked = zmq.Frame(piece_b, track=True, copy=False)
        assert isinstance(tracked.tracker, zmq.MessageTracker)
        with self._changed:
            self._to_send.append((request.route, [frame, cast(memoryview, tracked)]))
        self._waker.wake()
        return tracked.tracker

    def close(self) -> None:
        """Waits briefly until messages sent before are delivered. Idempotent."""
        with self._changed:
            self._closing = True
        if self._thread.is_alive():
            self._waker.wake()
            self._thread.join()
            self._waker.close()

    # ------------------------------------------------------------------------------------------- its own thread

    def _serve(self) -> None:
        closing = False
        try:
            while not closing:
                self._router.wait(WATCH_S)
                self._waker.clear()
                with self._changed:
                    closing, to_send, self._to_send = self._closing, self._to_send, []
                for route, frames in to_send:
                    self._router.send(route, frames)  # if the member is gone, its silence will show that
                self._take()
        except Exception as error:  # `poll` raises it
            log.exception("the weight control channel broke")
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._router.close(_LINGER_MS / 1000)

    def _take(self) -> None:
        for _ in range(WAITING_MESSAGES):
            if (received := self._router.receive()) is None:
                return
            message = self._read(received)
            with self._changed:
                if message is None or message.group_epoch != self._group_epoch:
                    continue
                if not self._speaks_for_its_rank(message, received):
                    self._pass_over(received, f"a message of rank {message.rank}, which is not the sender's rank")
                elif len(self._wanted if isinstance(message, Want) else self._heard) >= self._most_waiting:
                    self._pass_over(received, "more messages than a group sends")
                elif isinstance(message, Want):
                    self._router.let_in(received.source)
                    self._wanted.append(Request(received.identity, message))
                    self._changed.notify_all()
                else:
                    if isinstance(message, MemberJoined):
                        self._join(message.rank, received.identity)
                    self._router.let_in(received.source)
                    self._heard.append(message)
                    self._changed.notify_all()

    def _join(self, rank: int, route: bytes) -> None:
        """With `changed` held. A member that joins again may not have heard what was said last."""
        if rank in self._routes and self._said is not None:
            self._to_send.append((route, [self._said]))
            self._waker.wake()
        self._routes[rank] = route

    @property
    def _most_waiting(self) -> int:
        return MESSAGES_PER_MEMBER * len(self._members)

    def _speaks_for_its_rank(self, message: FromMember | Want, received: FromRouter) -> bool:
        if not 0 < message.rank <= len(self._members):
            return False
        owner = self._router.owner_of(received.source)
        return owner is None or owner == _MEMBER or speaks_for(owner, "actor", self._members[message.rank - 1])

    def _read(self, received: FromRouter) -> FromMember | Want | None:
        try:
            if received.damage is not None:
                raise received.damage
            return printable_texts(self._decoder.decode(b"".join(received.frames)))
        except (
            ValueError,
            OverflowError,
            RecursionError,
            DamagedMessage,
        ) as error:  # UnicodeDecodeError, msgspec's too
            self._pass_over(received, f"unreadable: {error}")
            return None

    def _pass_over(self, received: FromRouter, why: str) -> None:
        self.unreadable_total += 1
        who = address_of(received.source)
        self._log.warning(f"a message from {who} on the weight control channel is ignored: {in_one_line(why)}")


def member_keys(plan: WeightPlan, own: ClientKeys | None) -> ClientKeys | None:
    """The keys with which a member connects. `own`: its keys of the run, if the run has keys."""
    if plan.control_keys is None:
        return own
    public, secret, server = (key.encode() for key in plan.control_keys)
    return ClientKeys(public, secret, server)


class ControlMember:
    """A member's end, for one group. Used by one thread."""

    def __init__(self, endpoint: str, keys: ClientKeys | None, on_reconnect: Callable[[], None] = lambda: None) -> None:
        """`endpoint`: WeightPlan.control; `keys`: from `member_keys`. Connects in the background."""
        self._on_reconnect = on_reconnect
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = new_socket(self._context, zmq.DEALER)
        self._socket.set(zmq.IPV6, "[" in endpoint)
        self._socket.set(zmq.LINGER, _LINGER_MS)
        if keys is not None:
            encrypt_client(self._socket, keys)
        self._reconnects = Reconnects(self._socket)
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(FromRankZero)
        self._joined: MemberJoined | None = None
        self._said: MemberReady | MemberAnswer | None = None
        self._held: deque[FromRankZero] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: FromMember) -> None:
        """Long reasons are cut."""
        match message:
            case MemberAnswer(reason=str(words)) if len(words) > LONGEST_WORDS:
                message = msgspec.structs.replace(message, reason=words[:LONGEST_WORDS])
            case MemberReady(error=str(words)) if len(words) > LONGEST_WORDS:
                message = msgspec.structs.replace(message, error=words[:LONGEST_WORDS])
            case _:
                pass
        if isinstance(message, MemberJoined):
            self._joined = message
        else:
            self._said = message
        send_frames(self._socket, [_encode(message)])

    def recv(self, timeout_s: float | None, waker: Waker) -> FromRankZero | None:
        """The next message; None after `timeout_s` (None = no limit) or when woken. Raises msgspec.DecodeError for a
        message of another protocol."""
        if self._held:
            return self._held.popleft()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(waker.fileno(), zmq.POLLIN)
        poller.register(self._reconnects.socket, zmq.POLLIN)
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            ready = dict(poller.poll(None if left_s == math.inf else max(0, round(left_s * 1000))))
            self._mend()
            if waker.fileno() in ready or not ready:
                return None
            if self._socket in ready:
                return self._take()

    def must_leave(self) -> bool:
        """True if a Leave has arrived; `recv` will still return it. For use inside a collective."""
        self._mend()
        while (message := self._take()) is not None:
            self._held.append(message)
        return any(isinstance(message, Leave) for message in self._held)

    def _mend(self) -> None:
        """On a new connection, say again what rank 0 may not have heard, and be known by this connection from now
        on."""
        if self._reconnects.news() and self._joined is not None:
            self._on_reconnect()
            for message in (self._joined, self._said):
                if message is not None:
                    send_frames(self._socket, [_encode(message)])

    def _take(self) -> FromRankZero | None:
        """A message that has arrived; None if there is none, or the link has damaged it."""
        try:
            frames = receive_frames(self._socket)
        except DamagedMessage as error:
            log.warning("a damaged message of rank 0 is ignored: %s", error)
            return None
        return None if frames is None else self._decoder.decode(b"".join(frames))

    def close(self) -> None:
        self._reconnects.close()
        self._socket.close()
        self._context.term()


class Waker:
    """Ends a wait in another thread. Stays set until `clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is set many times over
            self._writer.send(b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # empty
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
