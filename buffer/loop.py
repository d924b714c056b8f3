"""The buffer's loop: connects the wire (`protocol.server`), the core (`buffer.core`) and the journal.

    poll the server -> entries   \\
    every TICK_S    -> a tick     }  one turn -> core.apply -> journal.write -> server.send
    SIGTERM         -> give up   /      (once the learner has left, or stays too long)

Nothing is sent before the turn that caused it is in the journal. While the journal cannot be written, the loop waits:
its peers keep what is not acknowledged, and send it again. After ROOM_S the buffer gives up.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from stillhouse.buffer.core import Core, Entry, GivenUp, Joined, Left, Turn, encode_turn
from stillhouse.buffer.journal.database import StoreUnwritable
from stillhouse.buffer.journal.freezer import no_garbage_collection
from stillhouse.buffer.journal.image import make_checked_image
from stillhouse.buffer.journal.imaging import ImageOutcome
from stillhouse.buffer.journal.journal import Journal
from stillhouse.buffer.journal.recovery import CoreClock, Started
from stillhouse.buffer.journal.store import Blob
from stillhouse.buffer.peers import Outgoing
from stillhouse.protocol.messages import (
    Batch,
    Message,
    Refused,
    ScoresAck,
    SegmentAck,
    Shutdown,
    Snapshot,
)
from stillhouse.protocol.printable import in_one_line
from stillhouse.protocol.ratelimit import RateLimitedLog
from stillhouse.protocol.server import PeerServer
from stillhouse.protocol.server_events import Event, FromPeer, PeerDown, PeerUp
from stillhouse.protocol.sigterm import SigtermCount
from stillhouse.tracing import events as trace

TICK_S: Final = 0.05
"""Time between two checks for overdue leases, overdue tickets and idle release."""
DRAIN_S: Final = 30.0
"""Time for workers to say goodbye after the end: they may have a checkpoint to finish or an engine to stop."""
DRAIN_TERMINATED_S: Final = 5.0
"""The same after SIGTERM, whose sender waits and finally kills."""
LEARNER_LEAVES_S: Final = 60.0
"""After SIGTERM, a connected learner has this much time to leave first: where a whole process group is terminated
(systemd, Slurm), it needs the buffer for its last checkpoint. A second SIGTERM ends the wait."""
REPLAY_S: Final = 5.0
"""CPU seconds that a restart may need to replay the journal's turns. After as many, a new image takes their place."""
RETRY_S: Final = 0.5
ROOM_S: Final = 10.0
"""Longest time for which the journal may not be writable, e.g. on a full disk. Then the run ends: less than the
launcher's patience with a buffer that does nothing."""
IMAGE_SHARE: Final = 10
"""Images take at most a tenth of the time spent on turns: where they are large, they are made less often."""
STATUS_EVERY_S: Final = 30.0
"""Seconds between two status lines in the log."""
COUNT_EVERY_S: Final = 0.5
"""Seconds between two readings of the queues, for the trace."""
COUNTED: Final = {
    "tokens": ("tokens_unscored", "tokens_scoring", "tokens_scored", "tokens_in_batch"),
    "admission": ("tickets_outstanding", "tickets_free", "rollouts_live", "rollouts_allowed"),
}
"""Counters of the trace, and the queues that each shows."""

log = logging.getLogger(__name__)


def refusal_in(message: Message) -> str:
    """Describe what this answer refuses of a peer's data, and why; empty if nothing is refused."""
    match message:
        case SegmentAck(rollout_id, index, "rejected", reason):
            return f"segment {index} of {rollout_id}: {reason}"
        case ScoresAck(leases, statuses, reasons) if "rejected" in statuses:
            refused = [f"{lease}: {why}" for lease, why in zip(leases, reasons, strict=True) if why is not None]
            return f"scores of leases {', '.join(refused)}"
        case Refused(code, text, got, expected):
            return f"{code}: {text}; got {got}, expected {expected}"
        case _:
            return ""


class BufferLoop:
    """One thread; the only caller of server, core and journal."""

    def __init__(self, server: PeerServer, started: Started, sigterms: SigtermCount) -> None:
        self._server = server
        self._core: Core = started.core
        self._journal: Journal = started.journal
        self._clock = CoreClock(started.newest_s)
        self._sigterms = sigterms
        self._next_tick_s = 0.0
        self._next_status_s = time.monotonic() + STATUS_EVERY_S
        self._next_count_s = 0.0
        self._refused_before = dict(started.core.refused)
        self._refused_here: dict[str, int] = {}
        self._refusals = RateLimitedLog(log)
        self._unwritable = RateLimitedLog(log)
        self._held_back: dict[str, str] = {}
        """Teachers with an open circuit breaker, as last logged."""
        self._applied_s = 0.0
        """CPU time that the core has spent since the last image was started."""
        self._image_s = 0.0
        """CPU time that the last image took, in its process."""
        self._give_up_s: float | None = None
        """Deadline after SIGTERM for a learner that is still connected."""
        self.terminated = False
        """SIGTERM came before the learner had finished the run."""

    def __repr__(self) -> str:
        return f"BufferLoop({self._server!r}, {self._core!r}, {self._journal!r})"

    def run(self) -> None:
        """Run until the run is over and all peers have left."""
        # The collector now and then looks at everything that is held: a second for 400,000 segments. The loop collects
        # what is new at each tick. What has become old is in no cycle when it is let go (tests/buffer/test_memory.py).
        with no_garbage_collection():
            self._run()

    def _run(self) -> None:
        while self._core.state.phase == "running":
            self._turn()
            if self._sigterms.count and self._core.state.phase == "running" and not self._learner_may_leave():
                self.terminated = True
                self._take(Turn(self._clock(), (GivenUp("SIGTERM"),)))
        self._drain()

    def _learner_may_leave(self) -> bool:
        """Return True while there is a learner to wait for before the run is given up."""
        if self._sigterms.count > 1 or all(peer.role != "learner" for peer in self._server.peers):
            return False
        now_s = time.monotonic()
        self._give_up_s = self._give_up_s or now_s + LEARNER_LEAVES_S
        return now_s < self._give_up_s

    def snapshot(self) -> Snapshot:
        """Snapshot of the core at this moment."""
        return self._core.snapshot(self._clock())

    def shut_down_peers(self, shutdown: Shutdown) -> None:
        """Send all peers a Shutdown without the core, which may be broken."""
        for role, name in self._server.peers:
            self._server.send(role, name, shutdown)

    def _drain(self) -> None:
        expected_sigterms = 1 if self.terminated else 0
        deadline_s = time.monotonic() + (DRAIN_TERMINATED_S if self.terminated else DRAIN_S)
        while self._server.peers and time.monotonic() < deadline_s and self._sigterms.count <= expected_sigterms:
            self._turn()
        if self._server.peers:
            log.warning("leaving while these are still connected: %s", ", ".join(map(str, self._server.peers)))

    def _turn(self) -> None:
        """One poll and, when it is time, one tick."""
        self._server.set_published(self._core.state.published)
        events = self._server.poll(max(0.0, self._next_tick_s - time.monotonic()))
        now_s = self._clock()
        entries = self._entries(events)
        tick_s = None
        if time.monotonic() >= self._next_tick_s:
            self._next_tick_s = time.monotonic() + TICK_S
            tick_s = now_s
            gc.collect(1)
        self._take(Turn(now_s, tuple(entries), tick_s, self._new_refusals()))
        if time.monotonic() >= self._next_status_s:
            self._next_status_s = time.monotonic() + STATUS_EVERY_S
            log.info("%r", self)
        if tick_s is not None:
            self._log_breakers()
        if trace.tracing() and time.monotonic() >= self._next_count_s:
            self._next_count_s = time.monotonic() + COUNT_EVERY_S
            queues = self.snapshot().queues
            for counter, names in COUNTED.items():
                trace.counter(counter, **{name: queues[name] for name in names})

    def _log_breakers(self) -> None:
        former, self._held_back = self._held_back, self._core.state.held_back
        for name in self._held_back.keys() - former.keys():
            log.warning(
                "%s: circuit open, the teacher receives no work for a while: it failed %s",
                name,
                in_one_line(self._held_back[name]),
            )
        for name in former.keys() - self._held_back.keys():
            log.info("%s: circuit closed, the teacher receives work again (or has left)", name)

    def _take(self, turn: Turn) -> None:
        if turn.empty:
            return
        began_s, began_ns = time.thread_time(), trace.now_ns()
        blobs_total = self._core.state.blobs_total
        outgoing = self._core.apply(turn)
        self._applied_s += time.thread_time() - began_s
        for _, _, message, _ in outgoing if trace.tracing() else ():
            if isinstance(message, Batch) and message.items:
                trace.done("buffer", "batch", began_ns, step=message.version.step + 1, rollouts=len(message.items))
        self._commit(*encode_turn(turn, blobs_total))
        self._send(outgoing)
        self._tend_image(turn.newest_s)

    def _commit(self, body: bytes, blobs: Sequence[Blob]) -> None:
        """Write a turn to the journal, as soon as that is possible. Raises StoreUnwritable if it is not within ROOM_S,
        or if the run is to end."""
        began_s = time.monotonic()
        while True:
            try:
                return self._journal.write(body, blobs)
            except StoreUnwritable as error:
                waited_s = time.monotonic() - began_s
                if waited_s > ROOM_S or self._sigterms.count:
                    raise StoreUnwritable(
                        f"the journal could not be written for {waited_s:.0f} s: {error}; make room on the disk of the "
                        "run's folder (expected some buffer.journal_log_mb), and use --resume"
                    ) from error
                self._unwritable.warning(f"the journal cannot be written: {error}; the buffer waits until it can")
                time.sleep(RETRY_S)

    def _tend_image(self, now_s: float) -> None:
        """Start an image when it is time, and log what became of it."""
        journal = self._journal
        finished = journal.tend_image()
        if finished is not None:
            self._image_s = finished.cpu_s
            log.info(
                "an image of %d KiB: %s after %.2f s (%.2f s of CPU); the loop stood still for %.3f s",
                *(finished.n_bytes >> 10, finished.outcome.name.lower(), finished.seconds, finished.cpu_s),
                finished.paused_s,
            )
            if finished.outcome is ImageOutcome.MISCOUNTED:
                raise AssertionError("the counts of what the buffer holds differ from a recount of all that it holds")
        long_replay = self._applied_s > max(REPLAY_S, IMAGE_SHARE * self._image_s)
        if journal.wants_image or (long_replay and journal.may_start_image):
            with trace.span("buffer", "image of the journal: fork"):
                journal.start_image(partial(make_checked_image, self._core, self._server.book, now_s))
            self._applied_s = 0.0

    def _send(self, messages: Sequence[Outgoing]) -> None:
        for role, name, message, arrays in messages:
            self._server.send(role, name, message, arrays)
            if refused := refusal_in(message):
                self._refusals.warning(f"refused a message of {role} {name}: {in_one_line(refused)}")

    # -------------------------------------------------------------------------------------------------- entries

    def _entries(self, events: Sequence[Event]) -> list[Entry]:
        entries: list[Entry] = []
        hellos = iter(self._server.hellos)
        for event in events:
            match event:
                case PeerUp():
                    entries.append(Joined(next(hellos)))
                case PeerDown(role, name):
                    entries.append(Left(role, name))
                case FromPeer():
                    entries.append(event)
        return entries

    def _new_refusals(self) -> dict[str, int] | None:
        refused = self._server.refused
        if refused == self._refused_here:
            return None
        self._refused_here = refused
        codes = dict.fromkeys((*self._refused_before, *refused))
        return {code: self._refused_before.get(code, 0) + refused.get(code, 0) for code in codes}
