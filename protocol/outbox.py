"""What a client has been asked to send and does not yet know to have arrived. No I/O: the link drives it.

An entry's life: queued -> on the wire -> known to have arrived (forgotten). It goes back to queued when its
acknowledgement is overdue or the connection is replaced. `unconfirmed_bytes` is the sum over all entries held.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.codec import Frame
from protocol.flow import AckKey

MAX_RESEND_FACTOR = 8
"""Each resend of a message waits twice as long as the former, up to this: a slow buffer must not be buried."""


@dataclass(slots=True, eq=False)
class Entry:
    """One message. `awaiting` is empty for messages that only a heartbeat reply confirms."""

    frames: list[Frame]
    n_bytes: int
    awaiting: set[AckKey]
    reliable: bool
    queued: bool = True
    done: bool = False
    times_sent: int = 0
    resend_at_s: float = 0.0
    after_heartbeat: int = 0
    """Heartbeats that had been sent on this connection before it."""


class Outbox:
    """Not thread-safe: its owner holds a lock."""

    def __init__(self, *, resend_s: float) -> None:
        self._resend_s = resend_s
        self._entries: dict[int, Entry] = {}  # by id(), in the order of putting
        self._queue: deque[Entry] = deque()
        self._by_key: dict[AckKey, list[Entry]] = {}
        self._unconfirmed_bytes = 0
        self._unacked = 0
        self._next_due_s = math.inf  # never later than the first overdue moment, so that scans are rare

    def __repr__(self) -> str:
        held, queued = len(self._entries), len(self._queue)
        return f"Outbox(held={held}, queued={queued}, unacked={self._unacked}, bytes={self._unconfirmed_bytes})"

    @property
    def unconfirmed_bytes(self) -> int:
        return self._unconfirmed_bytes

    @property
    def unacked(self) -> int:
        """Messages that wait for an acknowledgement of their own."""
        return self._unacked

    @property
    def empty(self) -> bool:
        """Whether everything is known to have arrived."""
        return not self._entries

    def put(self, frames: list[Frame], keys: Iterable[AckKey]) -> None:
        awaiting = set(keys)
        entry = Entry(frames, sum(map(len, frames)), awaiting, reliable=bool(awaiting))
        self._entries[id(entry)] = entry
        for key in awaiting:
            self._by_key.setdefault(key, []).append(entry)
        self._unconfirmed_bytes += entry.n_bytes
        self._unacked += entry.reliable
        self._queue.append(entry)

    def next_queued(self) -> Entry | None:
        """The entry to send next. It stays queued until `sent` is called."""
        while self._queue and self._queue[0].done:  # acknowledged while it waited for its second sending
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def sent(self, entry: Entry, *, now_s: float, heartbeats_sent: int) -> None:
        """`entry`, the one of `next_queued`, was given to the socket."""
        self._queue.popleft()
        entry.queued = False
        entry.resend_at_s = now_s + self._resend_s * min(2**entry.times_sent, MAX_RESEND_FACTOR)
        entry.times_sent += 1
        if entry.reliable:
            self._next_due_s = min(self._next_due_s, entry.resend_at_s)
        entry.after_heartbeat = heartbeats_sent

    def acknowledged(self, keys: Iterable[AckKey]) -> None:
        """Keys that are not awaited (any longer) are fine: an acknowledgement may come twice."""
        for key in keys:
            for entry in self._by_key.pop(key, ()):
                entry.awaiting.discard(key)
                if not entry.awaiting:
                    self._forget(entry)

    def heartbeat_answered(self, heartbeats_answered: int) -> None:
        """The buffer answered the n-th heartbeat of this connection: it has read what was sent before that one."""
        arrived = [
            entry
            for entry in self._entries.values()
            if not entry.reliable and not entry.queued and entry.after_heartbeat < heartbeats_answered
        ]
        for entry in arrived:
            self._forget(entry)

    def requeue_overdue(self, now_s: float) -> float:
        """Queue what should have been acknowledged by now. Returns when to ask again (inf: no need to)."""
        if now_s >= self._next_due_s:
            self._next_due_s = math.inf
            for entry in self._entries.values():
                if not entry.reliable or entry.queued:
                    continue
                if entry.resend_at_s <= now_s:
                    entry.queued = True
                    self._queue.append(entry)
                else:
                    self._next_due_s = min(self._next_due_s, entry.resend_at_s)
        return self._next_due_s

    def connection_replaced(self) -> None:
        """Queue everything again, in the order of putting: what the former connection swallowed is not known."""
        self._next_due_s = math.inf
        self._queue = deque(self._entries.values())
        for entry in self._queue:
            entry.queued = True
            entry.times_sent = 0

    def _forget(self, entry: Entry) -> None:
        entry.done = True
        del self._entries[id(entry)]
        self._unconfirmed_bytes -= entry.n_bytes
        self._unacked -= entry.reliable
