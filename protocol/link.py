"""The I/O thread of a client: one DEALER socket, its handshake, heartbeats, resends and reconnects.

    caller   -- outbox, wake() -->   thread   -- DEALER -->   buffer
    caller   <-- inbox, changed --   thread   <-- DEALER --   buffer

The thread sleeps in one poll on the socket and a wake-up pipe, until something is due next. Everything that both
threads use is in `LinkState`, under its condition `changed`.

Phases:  greeting (Hello sent, waiting for Welcome) -> serving -> greeting again when the buffer fell silent or does not
know this client (it was restarted, or counted it as lost) -> ... until `close`, a refusal, or the reconnect deadline.
"""

from __future__ import annotations

import logging
import math
import socket as stdlib_socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from stillhouse.protocol.bundle import bundled
from stillhouse.protocol.codec import Received, decode, encode
from stillhouse.protocol.errors import (
    ConnectTimeout,
    DamagedMessage,
    HandshakeRefused,
    LinkError,
    MessageRefused,
    PeerLost,
    RemoteProtocolError,
    UnexpectedMessage,
)
from stillhouse.protocol.flow import UNNUMBERED, acked_keys, concerns_caller
from stillhouse.protocol.keys import ClientKeys, encrypt_client
from stillhouse.protocol.messages import (
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Refused,
    Shutdown,
    Welcome,
)
from stillhouse.protocol.monitor import DoorReport
from stillhouse.protocol.outbox import LinkState
from stillhouse.protocol.sockets import new_socket, receive_frames, send_frames

FIRST_GREETING_S = 1.0
"""Wait for the answer to the first Hello before trying again on a new socket; doubles with every attempt."""
LONGEST_GREETING_S = 4.0
AFTER_A_STOP_S = 0.2
"""After this process was stopped for a while, ZeroMQ's thread needs a moment to deliver what arrived meanwhile."""
UNREADABLE_IN_WINDOW = 5
"""More unreadable messages than this, of both sides within `UNREADABLE_WINDOW_S`, and the link gives up."""
UNREADABLE_WINDOW_S = 30.0
BATCH = 64
"""After this many messages sent or read, the other of the two has its turn."""
LINGER_S = 1.0
"""At close: how long ZeroMQ may still deliver messages sent before, the Goodbye among them."""

log = logging.getLogger(__name__)


class ClientLink(threading.Thread):
    """The thread. It never raises: an error that ends it is in `state.failure`."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        state: LinkState,
        *,
        keys: ClientKeys | None,
        connect_timeout_s: float,
        reconnect_timeout_s: float,
    ) -> None:
        super().__init__(name=f"link-{hello.name}", daemon=True)
        self._address = address
        self._hello = hello
        self._state = state
        self._keys = keys
        self._connect_timeout_s = connect_timeout_s
        self._reconnect_timeout_s = reconnect_timeout_s
        self._received_total = 0
        self._connections = 0
        self._last_heard_s = 0.0
        self._shutdown: Shutdown | None = None
        self._unreadable_s: list[float] = []
        # About the present connection:
        self._socket: zmq.Socket[bytes] | None = None
        self._door: DoorReport | None = None
        self._heartbeats_sent = 0
        self._heartbeats_answered = 0
        self._next_heartbeat_s = 0.0
        self._unanswered_s = math.inf
        """When the oldest heartbeat without any message after it was sent. Silence counts from there, not from the last
        message received, so a thread that was not scheduled does not mistake its own pause for the buffer's silence."""
        self._known = False
        self._wake_in, self._wake_out = stdlib_socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_out, zmq.POLLIN)

    def wake(self) -> None:
        """Make the thread look at the state again. Callable from any thread that holds `changed`."""
        if self._state.asleep:
            self._state.asleep = False
            self._wake_in.send(b"!")  # at most one byte is on its way, so there is always room

    # ------------------------------------------------------------------------------------------- the thread

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # made here, because it must not cross a fork
        try:
            self._greet(context, self._connect_timeout_s, ConnectTimeout)
            while not self._closing():
                try:
                    self._serve()
                except RemoteProtocolError as error:
                    self._note_unreadable(error)
                if not self._closing():
                    self._reconnect(context)
        except Exception as error:  # the caller must see any error: recv and send raise it
            with self._state.changed:
                self._state.failure = error
                self._state.changed.notify_all()
        finally:
            self._leave(context)

    def _note_unreadable(self, error: RemoteProtocolError) -> None:
        """Unreadable messages are not counted as received, so a new connection brings them again, in either direction.
        Raises `error` when there are many of them: then it is not just a passing fault of the network."""
        now_s = time.monotonic()
        self._unreadable_s = [at_s for at_s in self._unreadable_s if now_s - at_s < UNREADABLE_WINDOW_S] + [now_s]
        log.warning("%s: a message cannot be read, a new connection follows: %s", self._hello.name, error)
        if len(self._unreadable_s) > UNREADABLE_IN_WINDOW:
            raise error

    def _closing(self) -> bool:
        with self._state.changed:
            return self._state.goodbye is not None

    def _leave(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        try:
            if self._door is not None:
                self._door.close()
            if self._socket is not None:
                with self._state.changed:
                    reason = self._state.goodbye
                if reason is not None and self._known:
                    self._send_queued(sys.maxsize)
                    self._try_send(encode(Goodbye(reason)))
                    self._socket.close(linger=int(LINGER_S * 1000))
                else:
                    self._socket.close(linger=0)
        finally:
            context.term()  # bounded by the linger
            with self._state.changed:
                self._state.asleep = False
                self._wake_in.close()
                self._wake_out.close()

    # --------------------------------------------------------------------------------------------- greeting

    def _reconnect(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        silent_s = time.monotonic() - self._last_heard_s
        if self._shutdown is not None:
            raise PeerLost(f"the buffer ended the run ({self._shutdown.reason}) and is gone")
        log.warning("%s: reconnecting to the buffer, heard of it %.1f s ago", self._hello.name, silent_s)
        self._greet(context, self._reconnect_timeout_s, PeerLost)

    def _greet(
        self, context: zmq.Context[zmq.Socket[bytes]], timeout_s: float, too_late: Callable[[str], LinkError]
    ) -> None:
        """Send Hellos, each on a new socket, until one is welcomed. Raises `too_late` or HandshakeRefused."""
        started_s = time.monotonic()
        deadline_s = started_s + timeout_s
        patience_s = FIRST_GREETING_S
        attempts = 0
        while not self._closing():
            if time.monotonic() >= deadline_s:
                raise too_late(
                    f"no answer from the buffer at {self._address} to {attempts} Hellos in {timeout_s:.1f} s; "
                    f"is it running, and is this its address?{self._door.complaint if self._door else ''}"
                )
            attempts += 1
            self._open_socket(context)
            if self._await_welcome(min(time.monotonic() + patience_s, deadline_s)):
                return
            patience_s = min(2 * patience_s, LONGEST_GREETING_S)

    def _open_socket(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        if self._socket is not None and self._door is not None:
            if self._socket in self._poller:
                self._poller.unregister(self._socket)
            self._door.close()
            self._socket.close(linger=0)
        self._socket = new_socket(context, zmq.DEALER)
        self._door = DoorReport(self._socket)
        self._socket.set(zmq.IPV6, "[" in self._address)
        if self._keys is not None:
            encrypt_client(self._socket, self._keys)
        self._poller.register(self._socket, zmq.POLLIN)
        self._socket.connect(self._address)
        self._known = False
        self._heartbeats_sent = self._heartbeats_answered = 0
        with self._state.changed:
            self._state.outbox.connection_replaced()
        self._connections += 1
        hello = msgspec.structs.replace(self._hello, received_total=self._received_total, connection=self._connections)
        self._try_send(encode(hello))

    def _await_welcome(self, until_s: float) -> bool:
        while not self._known and not self._closing() and (left_s := until_s - time.monotonic()) > 0:
            self._sleep(left_s, want_room=False)
            try:
                self._read()
            except RemoteProtocolError as error:
                if not self._known and not isinstance(error, DamagedMessage):
                    raise
                self._note_unreadable(error)  # the Hello, the Welcome or a message after it was damaged
                return False
            self._look_at_door()
        return self._known

    def _look_at_door(self) -> None:
        assert self._door is not None
        self._door.read()
        if self._door.unknown_key:
            message = "the buffer does not know the key of this process"
            raise HandshakeRefused(Refused("key", message, f"a {self._hello.role}'s key", "one of the run's own keys"))

    # ---------------------------------------------------------------------------------------------- serving

    def _serve(self) -> None:
        """Runs until the caller closes, the buffer no longer knows this client, or it was silent for too long."""
        with self._state.changed:
            welcome = self._state.welcome
        assert welcome is not None
        # Half of the buffer's own timeout, so that there is time to reconnect before it counts this client as lost.
        silence_s = max(welcome.peer_timeout_s / 2, welcome.heartbeat_s * 1.5)
        while self._known and not self._closing():
            now_s = time.monotonic()
            if now_s - self._unanswered_s > silence_s:
                self._sleep(AFTER_A_STOP_S, want_room=False)
                self._read()
                if now_s - self._unanswered_s > silence_s and not self._more_arrives():
                    return
            with self._state.changed:
                due_s = self._state.outbox.requeue_overdue(now_s)
            room = self._send_queued(BATCH)
            self._send_heartbeat(now_s, welcome.heartbeat_s)  # after the queue, because its reply confirms the queue
            wake_at_s = min(due_s, self._next_heartbeat_s, self._unanswered_s + silence_s)
            self._sleep(wake_at_s - time.monotonic(), want_room=not room)
            self._read()

    def _more_arrives(self) -> bool:
        """A large message on a slow link is not silence: a new connection would start it from the beginning again."""
        assert self._door is not None
        if not self._door.more_arrived():
            return False
        self._unanswered_s = time.monotonic()
        return True

    def _send_heartbeat(self, now_s: float, heartbeat_s: float) -> None:
        with self._state.changed:
            if now_s < self._next_heartbeat_s and not self._state.heartbeat_at_once:
                return
            self._state.heartbeat_at_once = False
            version, stats = self._state.heartbeat_version, self._state.heartbeat_stats
        if self._try_send(encode(Heartbeat(version, stats, self._received_total))):
            self._heartbeats_sent += 1
        if self._unanswered_s == math.inf:
            assert self._door is not None
            self._unanswered_s = now_s  # also if the socket had no room: that counts as silence, too
            self._door.more_arrived()  # from here on it reports new bytes
        self._next_heartbeat_s = now_s + heartbeat_s

    def _send_queued(self, at_most: int) -> bool:
        """Returns False when the socket has no room left."""
        n_sent = 0
        while n_sent < at_most:
            with self._state.changed:
                entries = self._state.outbox.next_queued()
            if not entries:
                return True
            if not self._try_send(bundled([entry.frames for entry in entries])):
                return False
            with self._state.changed:
                self._state.outbox.sent(entries, now_s=time.monotonic(), heartbeats_sent=self._heartbeats_sent)
            n_sent += len(entries)
        return True

    def _try_send(self, frames: list[bytes | memoryview]) -> bool:
        assert self._socket is not None
        try:
            send_frames(self._socket, frames)
        except zmq.Again:
            return False
        return True

    def _sleep(self, timeout_s: float, *, want_room: bool) -> None:
        """Sleep until the socket or the caller has something, or the time is over."""
        with self._state.changed:
            at_work = self._known and not want_room and self._state.outbox.any_queued
            if self._state.goodbye is not None or self._state.heartbeat_at_once or at_work:
                timeout_s = 0.0
            self._state.asleep = timeout_s > 0
            full = self._known and self._state.inbox_full
        if full:
            self._unanswered_s = math.inf  # nothing is read now, so silence cannot be measured
        self._poller.register(self._socket, (0 if full else zmq.POLLIN) | (zmq.POLLOUT if want_room else 0))
        ready = dict(self._poller.poll(math.ceil(max(0.0, timeout_s) * 1000)))
        with self._state.changed:
            self._state.asleep = False
        if self._wake_out.fileno() in ready:
            self._wake_out.recv(4096)

    # ---------------------------------------------------------------------------------------------- reading

    def _read(self) -> None:
        assert self._socket is not None
        numbered: list[tuple[Received, int]] = []
        numbered_bytes = 0
        with self._state.changed:
            room_bytes = self._state.max_inbox_bytes - self._state.inbox_bytes
        try:
            for _ in range(BATCH):
                if self._known and numbered_bytes >= room_bytes:
                    return
                frames = receive_frames(self._socket)
                if frames is None:
                    return
                received = decode(frames)
                self._last_heard_s, self._unanswered_s = time.monotonic(), math.inf
                if isinstance(received.message, UNNUMBERED):
                    self._take_unnumbered(received.message)
                else:
                    if not self._known:
                        got = type(received.message).__name__
                        raise UnexpectedMessage("before the handshake", got=got, expected="Welcome or Refused")
                    self._received_total += 1
                    if isinstance(received.message, Shutdown):
                        self._shutdown = received.message
                    n_bytes = sum(map(len, frames))
                    numbered_bytes += n_bytes
                    numbered.append((received, n_bytes))
        finally:  # messages that came before an error count, too
            self._hand_over(numbered)

    def _hand_over(self, numbered: list[tuple[Received, int]]) -> None:
        if not numbered:
            return
        with self._state.changed:
            for received, n_bytes in numbered:
                self._state.outbox.acknowledged(acked_keys(received.message))
                if concerns_caller(received.message):
                    self._state.inbox.append((received, n_bytes))
                    self._state.inbox_bytes += n_bytes
            self._state.changed.notify_all()

    def _take_unnumbered(self, message: object) -> None:
        match message:
            case Refused(code="not_hello_first"):
                self._known = False
            case Refused(code="damaged"):  # the link's fault: unacknowledged messages are sent again on a new one
                raise DamagedMessage("a message reached the buffer damaged", got=message.got, expected=message.expected)
            case Refused(code=code) if self._known and code not in ("duplicate_name", "key"):
                raise MessageRefused(message)
            case Refused():
                raise HandshakeRefused(message)
            case Welcome():
                self._known = True
                self._next_heartbeat_s = self._last_heard_s
                with self._state.changed:
                    self._state.welcome = message
                    self._state.published = message.version
                    self._state.connects_total += 1
                    self._state.changed.notify_all()
            case HeartbeatReply():
                self._heartbeats_answered += 1
                with self._state.changed:
                    self._state.published = message.version
                    self._state.outbox.heartbeat_answered(self._heartbeats_answered)
                    self._state.changed.notify_all()
            case _:
                raise AssertionError(f"{type(message).__name__} is numbered")
