"""The state shared by a client's caller and its link thread: received messages, and sent ones not yet known to have
arrived. No I/O.

An entry is queued -> on the wire -> known to have arrived (then forgotten). It returns to the queue when its
acknowledgement is overdue or the connection is replaced. `unconfirmed_bytes` is the sum over all entries held.
"""

# Why it is so: docs/decisions/delivery.md

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from stillhouse.protocol.bundle import BUNDLE_BYTES, BUNDLE_MESSAGES, SMALL_BYTES
from stillhouse.protocol.codec import MAX_MESSAGE_BYTES, Frame, Received
from stillhouse.protocol.flow import AckKey
from stillhouse.protocol.messages import WeightVersion, Welcome

MAX_RESEND_FACTOR = 8
"""The wait before each resend of a message doubles, up to this factor, so that a slow buffer is not flooded."""
FRAME_LENGTH_BYTES = 5
"""The most that MessagePack writes before the bytes of a frame."""


@dataclass(slots=True, eq=False)
class Entry:
    """One message. `awaiting` is empty if only a heartbeat reply confirms it."""

    frames: list[Frame]
    n_bytes: int
    awaiting: set[AckKey]
    reliable: bool
    queued: bool = True
    done: bool = False
    times_sent: int = 0
    resend_at_s: float = 0.0
    after_heartbeat: int = 0
    """Number of heartbeats sent on this connection before it."""


class ClientOutbox:
    """The sent messages that are held. Not thread-safe: its owner must hold a lock."""

    def __init__(self, *, resend_s: float) -> None:
        self._resend_s = resend_s
        self._entries: dict[int, Entry] = {}  # by id(), in the order of `put`
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
        """Number of messages that wait for an acknowledgement of their own."""
        return self._unacked

    @property
    def empty(self) -> bool:
        """Everything is known to have arrived."""
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

    @property
    def any_queued(self) -> bool:
        """Whether there is anything to send."""
        while self._queue and self._queue[0].done:  # acknowledged while it waited to be sent again
            self._queue.popleft()
        return bool(self._queue)

    def next_queued(self) -> list[Entry]:
        """The entries to send next: several small ones go together (`protocol.bundle`). They stay queued until `sent`
        is called."""
        entries: list[Entry] = []
        together_bytes = 0
        for entry in self._queue:
            if entry.done:
                continue
            together_bytes += entry.n_bytes + FRAME_LENGTH_BYTES * len(entry.frames)
            small = entry.n_bytes <= SMALL_BYTES and together_bytes <= BUNDLE_BYTES
            if entries and not small:
                break
            entries.append(entry)
            if not small or len(entries) == BUNDLE_MESSAGES:
                break
        return entries

    def sent(self, entries: list[Entry], *, now_s: float, heartbeats_sent: int) -> None:
        """Record that `entries`, from `next_queued`, were given to the socket."""
        for entry in entries:
            while self._queue.popleft() is not entry:  # one that is done stood before it
                pass
            entry.queued = False
            entry.resend_at_s = now_s + self._resend_s * min(2**entry.times_sent, MAX_RESEND_FACTOR)
            entry.times_sent += 1
            if entry.reliable:
                self._next_due_s = min(self._next_due_s, entry.resend_at_s)
            entry.after_heartbeat = heartbeats_sent

    def acknowledged(self, keys: Iterable[AckKey]) -> None:
        """Keys that nothing waits for are ignored: an acknowledgement may come twice."""
        for key in keys:
            for entry in self._by_key.pop(key, ()):
                entry.awaiting.discard(key)
                if not entry.awaiting:
                    self._forget(entry)

    def heartbeat_answered(self, heartbeats_answered: int) -> None:
        """The n-th heartbeat of this connection was answered, so the buffer has read all messages sent before it."""
        arrived = [
            entry
            for entry in self._entries.values()
            if not entry.reliable and not entry.queued and entry.after_heartbeat < heartbeats_answered
        ]
        for entry in arrived:
            self._forget(entry)

    def requeue_overdue(self, now_s: float) -> float:
        """Queue messages whose acknowledgement is overdue. Returns when to call again (inf: no need)."""
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
        """Queue everything again, in the order of `put`: what the former connection lost is not known."""
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


@dataclass
class LinkState:
    """Shared by caller and thread; touch it only while holding `changed`."""

    outbox: ClientOutbox
    changed: threading.Condition = field(default_factory=threading.Condition)
    inbox: deque[tuple[Received, int]] = field(default_factory=deque[tuple[Received, int]])
    """Messages for the caller, with the size of each in bytes."""
    inbox_bytes: int = 0
    max_inbox_bytes: int = MAX_MESSAGE_BYTES
    """When the inbox is this full nothing is read until the caller takes a message; the buffer keeps the rest."""
    welcome: Welcome | None = None
    published: WeightVersion | None = None
    failure: Exception | None = None
    """Set once, by the thread, which then ends."""
    goodbye: str | None = None
    """Set once, by the caller: send this reason and end."""
    heartbeat_version: WeightVersion | None = None
    heartbeat_stats: dict[str, float] = field(default_factory=dict[str, float])
    heartbeat_at_once: bool = False
    asleep: bool = False
    """The thread sleeps, or is about to: anything put now needs a wake-up."""
    connects_total: int = 0

    @property
    def inbox_full(self) -> bool:
        return self.inbox_bytes >= self.max_inbox_bytes
