"""A worker's end of the wire: send and receive from one object while a background thread keeps the link alive.

    with Client(address, hello) as client:
        welcome = client.connect()
        client.send(Segment(...), (token_ids, logprobs, loss_mask))
        received = client.recv(timeout_s=0.1)

All methods may be called from any thread. No ZeroMQ object exists before `connect`, so a Client may be created before a
fork and connected after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from stillhouse.protocol.codec import MAX_MESSAGE_BYTES, MAX_TO_BUFFER_BYTES, Array, Received, encode
from stillhouse.protocol.context import RoleContext
from stillhouse.protocol.errors import LocalProtocolError, NotConnected, SendTimeout
from stillhouse.protocol.flow import UNTRACKED, ack_keys
from stillhouse.protocol.keys import ClientKeys, run_client_keys
from stillhouse.protocol.link import ClientLink
from stillhouse.protocol.messages import GPU_S, Hello, Message, WeightVersion, Welcome
from stillhouse.protocol.outbox import ClientOutbox, LinkState

MAX_UNCONFIRMED_BYTES = 256 << 20
"""Default bound on unconfirmed bytes: about 28 million tokens of segments, which is minutes of one actor's work."""


class Client:
    """Connects one worker to the buffer.

    `keys`: from `protocol.keys.run_client_keys`; None = not encrypted. `hello.received_total` is filled in here. A
    message is sent again if its acknowledgement (`protocol.flow.ack_keys`) does not come within `resend_s`, and after a
    reconnect if it is not known to have arrived. When the buffer is silent for half of its own peer timeout, the client
    reconnects with the same incarnation, for at most `reconnect_timeout_s` (default: `connect_timeout_s`).
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        keys: ClientKeys | None = None,
        connect_timeout_s: float = 30.0,
        reconnect_timeout_s: float | None = None,
        resend_s: float = 5.0,
        send_timeout_s: float = 60.0,
        max_unconfirmed_bytes: int = MAX_UNCONFIRMED_BYTES,
        max_inbox_bytes: int = MAX_MESSAGE_BYTES,
        gpus: float = 0.0,
        began_s: float = 0.0,
    ) -> None:
        """`gpus`, `began_s`: see RoleContext."""
        self._gpus, self._began_s = gpus, began_s
        self._address = address
        self._hello = hello
        self._keys = keys
        self._connect_timeout_s = connect_timeout_s
        self._reconnect_timeout_s = connect_timeout_s if reconnect_timeout_s is None else reconnect_timeout_s
        self._send_timeout_s = send_timeout_s
        self._max_unconfirmed_bytes = max_unconfirmed_bytes
        self._state = LinkState(ClientOutbox(resend_s=resend_s), threading.Condition(), max_inbox_bytes=max_inbox_bytes)
        self._link: ClientLink | None = None
        self._woken = False

    def __repr__(self) -> str:
        with self._state.changed:
            phase = "failed" if self._state.failure else "connected" if self._state.welcome else "not connected"
            return f"Client({self._hello.name}, {phase}, inbox={len(self._state.inbox)}, {self._state.outbox})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close("done" if error is None else f"{type(error).__name__}: {error}"[:500])

    @property
    def unacked(self) -> int:
        """Number of messages whose acknowledgement has not come."""
        with self._state.changed:
            return self._state.outbox.unacked

    @property
    def published(self) -> WeightVersion | None:
        """The newest published version according to the buffer, from Welcome or a heartbeat reply."""
        with self._state.changed:
            return self._state.published

    @property
    def connects_total(self) -> int:
        """Welcomes received: 1 plus the number of reconnects."""
        with self._state.changed:
            return self._state.connects_total

    def connect(self) -> Welcome:
        """Start the link and wait for the handshake. Raises HandshakeRefused or ConnectTimeout; close the client
        then."""
        if self._link is not None:
            raise LocalProtocolError("connect was called twice; make a new Client for a new connection")
        self._link = ClientLink(
            self._address,
            self._hello,
            self._state,
            keys=self._keys,
            connect_timeout_s=self._connect_timeout_s,
            reconnect_timeout_s=self._reconnect_timeout_s,
        )
        self._link.start()
        with self._state.changed:
            while self._state.welcome is None:
                self._raise_if_ended()
                self._state.changed.wait()
            return self._state.welcome

    def send(self, message: Message, arrays: Sequence[Array] = ()) -> None:
        """Queue a message. Do not change the arrays afterwards: they may have to be sent again.

        Blocks while too many bytes are unconfirmed, and raises SendTimeout if that lasts too long. Also raises
        EncodeError, and the errors of `recv` when the link has failed.
        """
        if isinstance(message, UNTRACKED):
            raise LocalProtocolError(f"{type(message).__name__} is sent by the client itself")
        frames = encode(message, arrays, max_bytes=MAX_TO_BUFFER_BYTES)
        n_bytes = sum(map(len, frames))
        deadline_s = time.monotonic() + self._send_timeout_s
        with self._state.changed:
            self._raise_if_ended()
            outbox = self._state.outbox
            # A message larger than the bound may be sent when nothing else is unconfirmed.
            while not outbox.empty and outbox.unconfirmed_bytes + n_bytes > self._max_unconfirmed_bytes:
                if not self._state.changed.wait(deadline_s - time.monotonic()) and time.monotonic() >= deadline_s:
                    raise SendTimeout(
                        f"no room for {n_bytes} bytes in {self._send_timeout_s:.1f} s: {outbox}, at most "
                        f"{self._max_unconfirmed_bytes} bytes may be unconfirmed; the buffer does not keep up"
                    )
                self._raise_if_ended()
            outbox.put(frames, ack_keys(message))
            self._wake()

    def wake(self) -> None:
        """End the `recv` that waits now, or the next one that would wait. For threads that give the worker other things
        to do than the buffer's messages (new weights, an environment's answer)."""
        with self._state.changed:
            self._woken = True
            self._state.changed.notify_all()

    def recv(self, timeout_s: float, *, only: Callable[[Message], bool] | None = None) -> Received | None:
        """The next message for the worker; None after `timeout_s`, and at once after `wake`. Handshakes, heartbeat
        replies and acknowledgements that only confirm arrival are left out (`protocol.flow.concerns_caller`).

        `only`: the next message for which it is true; all others stay, in their order, for another thread's `recv`,
        whose wait alone `wake` ends.

        When the messages received so far are read, raises the error that ended the link: PeerLost, HandshakeRefused
        (after a reconnect), MessageRefused, a RemoteProtocolError, or NotConnected after `close`.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._state.changed:
            while (place := self._place(only)) is None:
                self._raise_if_ended()
                if self._woken and only is None:
                    self._woken = False
                    return None
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._state.changed.wait(left_s)
            received, n_bytes = self._state.inbox[place]
            was_full = self._state.inbox_full
            del self._state.inbox[place]
            self._state.inbox_bytes -= n_bytes
            if was_full:
                self._wake()
            return received

    def set_heartbeat(
        self, version: WeightVersion | None, stats: Mapping[str, float], *, at_once: bool = False
    ) -> None:
        """Set the contents of future heartbeats; this process's CPU and GPU seconds are added. `at_once`: send
        one right after the messages queued now."""
        with self._state.changed:
            self._state.heartbeat_version = version
            self._state.heartbeat_stats = {**stats, "cpu_s_total": time.process_time()}
            if self._gpus:
                self._state.heartbeat_stats[GPU_S] = self._gpus * (time.monotonic() - self._began_s)
            if at_once:
                self._state.heartbeat_at_once = True
                self._wake()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything sent is known to have arrived; False after `timeout_s`. Raises the errors of `recv`
        when the link fails meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        with self._state.changed:
            self._state.heartbeat_at_once = True  # its reply confirms messages without an acknowledgement
            self._wake()
            while not self._state.outbox.empty:
                self._raise_if_ended()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._state.changed.wait(left_s)
        return True

    def close(self, reason: str) -> None:
        """Send the queued messages and a Goodbye, end the thread, free the sockets. Takes at most about a second. Does
        not wait for acknowledgements, as `flush` does. Idempotent."""
        with self._state.changed:
            if self._state.goodbye is None:
                self._state.goodbye = reason
            self._state.changed.notify_all()
            self._wake()
        if self._link is not None:
            self._link.join()

    def _place(self, only: Callable[[Message], bool] | None) -> int | None:
        """Place in the inbox of the first message, or of the first that `only` takes. Call it holding `changed`."""
        inbox = self._state.inbox
        if only is None:
            return 0 if inbox else None
        return next((i for i, (received, _) in enumerate(inbox) if only(received.message)), None)

    def _wake(self) -> None:
        """Call it holding `changed`."""
        if self._link is not None:
            self._link.wake()

    def _raise_if_ended(self) -> None:
        """Call it holding `changed`."""
        if self._state.failure is not None:
            raise self._state.failure
        if self._state.goodbye is not None:
            raise NotConnected("the client was closed; make a new one")
        if self._link is None:
            raise NotConnected("not connected; call connect() first")


def worker_client(ctx: RoleContext[object], vocab_fingerprint: str, *, pool: str = "") -> Client:
    """A client for this worker process, with its own keys, that is not connected yet. Raises KeysUnusable."""
    hello = worker_hello(ctx, vocab_fingerprint, pool=pool)
    keys = run_client_keys(ctx.run_dir, hello.role, hello.name)
    return Client(
        ctx.buffer_address, hello, keys=keys, reconnect_timeout_s=ctx.buffer_away_s, gpus=ctx.gpus, began_s=ctx.began_s
    )


def worker_hello(ctx: RoleContext[object], vocab_fingerprint: str, *, pool: str = "") -> Hello:
    """What this worker process says first."""
    if ctx.role == "buffer":
        raise LocalProtocolError("the buffer is what workers connect to; it has no client")
    return Hello(
        role=ctx.role,
        name=ctx.name,
        incarnation=ctx.incarnation,
        run_id=ctx.run_id,
        vocab_fingerprint=vocab_fingerprint,
        pool=pool,
    )
