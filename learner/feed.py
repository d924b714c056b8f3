"""Brings the loop its batches. That of the next step is asked for, received, read and packed while the present one
trains.

    loop's thread    next(n) .. ask_ahead(n + 1) .. trains n ........................ next(n + 1): it is here, or waits
    "next-batch"                                 receives n + 1, checks its items, decodes and packs them

A request names the version that its batch will be trained against, and the buffer masks and counts staleness by that
version. So a batch that is here early is no older when it is trained than one that is asked for when its step begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

from stillhouse.learner.batch import TrainItem, train_items
from stillhouse.learner.inbox import Delivered, Inbox, StopRequest, describe_queues
from stillhouse.learner.reports.wait_clock import WaitCause, WaitClock
from stillhouse.protocol.client import Client
from stillhouse.protocol.errors import LinkError
from stillhouse.protocol.messages import Batch, BatchWanted, Message, SnapshotWanted, WeightVersion
from stillhouse.tracing import events

PUMP_S: Final = 0.1
"""Longest single wait for the buffer. The cause of a longer wait is noticed with this delay."""
ASK_AGAIN_S: Final = 2.0
"""Interval between requests for the same batch; the buffer answers each with the same one."""
LOOK_EVERY_S: Final = 0.5
"""Interval at which a waiting learner requests a snapshot, to find out what it waits for."""


class LearnerStalled(RuntimeError):
    """No batch arrived within `stall_timeout_s`. The message says what the buffer holds."""


class ReadyBatch(NamedTuple):
    """A batch that can be trained."""

    delivered: Delivered
    items: list[TrainItem]


class BatchFeed:
    """Batches, one per version. `next` and `ask_ahead` are for the loop's thread."""

    def __init__(
        self,
        client: Client,
        inbox: Inbox,
        *,
        pack: Callable[[Sequence[TrainItem], int], None],
        clock: WaitClock,
        stop: StopRequest,
        publishing: Callable[[], bool],
        meanwhile: Callable[[], None],
        stall_timeout_s: float,
    ) -> None:
        """`pack(items, step)` is called on the other thread, for the step from `step` on. `publishing()`: weights are
        being sent. `meanwhile` is called every PUMP_S while the loop waits."""
        self._client = client
        self._inbox = inbox
        self._pack = pack
        self._clock = clock
        self._stop = stop
        self._publishing = publishing
        self._meanwhile = meanwhile
        self._stall_timeout_s = stall_timeout_s
        self._thread = ThreadPoolExecutor(1, "next-batch")
        self._ahead: WeightVersion | None = None
        """Version whose batch the other thread waits for."""
        self._fetched: Future[ReadyBatch | None] | None = None

    def ask_ahead(self, version: WeightVersion) -> None:
        """Ask for the batch of a later step."""
        self._client.send(BatchWanted(version))
        self._ahead = version
        self._fetched = self._thread.submit(self._fetch, version)
        self._fetched.add_done_callback(lambda _: self._client.wake())

    def next(self, version: WeightVersion) -> ReadyBatch:
        """The batch of this version. Attributes the time of waiting to what is waited for. Raises LearnerStalled,
        StopAsked, and what is wrong with the batch."""
        if (ready := self._looked(version, 0.0)) is not None:
            return ready
        began_s = asked_s = looked_s = time.monotonic()
        wanted = BatchWanted(version)
        self._client.send(wanted)
        with self._clock.waiting("data"):
            while True:
                if (ready := self._looked(version, PUMP_S)) is not None:
                    return ready
                now_s = time.monotonic()
                if now_s - asked_s > ASK_AGAIN_S:
                    asked_s = now_s
                    self._client.send(wanted)
                if now_s - began_s > PUMP_S:
                    self._clock.blame(self._cause_of_wait())
                if now_s - looked_s > LOOK_EVERY_S:
                    looked_s = now_s
                    self._client.send(SnapshotWanted())
                if now_s - began_s > self._stall_timeout_s:
                    raise LearnerStalled(
                        f"no batch for step {version.step} in {self._stall_timeout_s:.0f} s: "
                        f"{describe_queues(self._inbox.snapshot)}; see the actors' and teachers' logs"
                    )

    def close(self) -> None:
        """End the other thread, which takes PUMP_S, or the time to pack a batch. Idempotent."""
        self._ahead = None
        self._thread.shutdown()

    def _looked(self, version: WeightVersion, timeout_s: float) -> ReadyBatch | None:
        """Read what the buffer has sent, also if the batch is here already."""
        self._stop.check()
        self._inbox.pump(timeout_s)
        self._meanwhile()
        return self._arrived(version)

    def _arrived(self, version: WeightVersion) -> ReadyBatch | None:
        """The batch of this version, whichever thread received it. Others are late repeats."""
        fetched = self._fetched
        if fetched is not None and fetched.done():
            self._fetched = None
            ready = fetched.result()
            if ready is not None and ready.delivered.batch.version == version:
                return ready
        delivered, self._inbox.batch = self._inbox.batch, None
        if delivered is None or delivered.batch.version != version:
            return None
        self._ahead = None  # if the other thread still waits for it
        with events.span("learner", "decode", step=version.step + 1):
            return _ready(delivered)

    def _fetch(self, version: WeightVersion) -> ReadyBatch | None:
        """Runs on the other thread. None: the batch came to the loop's thread, or none will come. Takes no other batch,
        which would be lost here."""

        def sought(message: Message) -> bool:
            return isinstance(message, Batch) and message.version == version

        while self._ahead == version:
            try:
                received = self._client.recv(PUMP_S, only=sought)
            except LinkError:
                return None  # the loop's thread meets it, too
            if received is not None and isinstance(batch := received.message, Batch):
                with events.span("next batch", "decode", step=version.step + 1):
                    ready = _ready(Delivered(batch, received.arrays))
                    self._pack(ready.items, version.step)
                return ready
        return None

    def _cause_of_wait(self) -> WaitCause:
        """Weights still being sent; else scores, if everything generated so far waits for them; else data."""
        snapshot = self._inbox.snapshot
        if self._publishing():
            return "weights"
        if snapshot is None:
            return "data"
        queues = snapshot.queues
        unscored = queues.get("tokens_unscored", 0) + queues.get("tokens_scoring", 0)
        generating = queues.get("tickets_outstanding", 0)
        return "scoring" if unscored > 0 and generating == 0 else "data"


def _ready(delivered: Delivered) -> ReadyBatch:
    """Raises BatchError."""
    return ReadyBatch(delivered, train_items(delivered.batch.items, delivered.arrays))
