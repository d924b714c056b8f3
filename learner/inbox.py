"""Input of the learner's loop: the buffer's messages, sorted by kind until they are read, and SIGTERM.

One thread only (the loop's). No message is dropped: one that the loop did not expect is logged and counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stillhouse.protocol.client import Client
from stillhouse.protocol.messages import Batch, BatchTrainedAck, EvalResult, Membership, Shutdown, Snapshot, TasksAck
from stillhouse.protocol.sigterm import SigtermCount

log = logging.getLogger(__name__)


class RunStopped(Exception):
    """The buffer sent Shutdown before the learner was done."""

    def __init__(self, shutdown: Shutdown) -> None:
        super().__init__(f"the run was stopped: {shutdown.reason}")
        self.shutdown = shutdown


@dataclass(frozen=True, slots=True)
class Delivered:
    """A batch and its frames (`protocol.messages.BatchItem`)."""

    batch: Batch
    arrays: tuple[np.ndarray, ...]


class Inbox:
    """Receives and keeps messages. `on_membership` and `on_eval` are called at once, from inside `pump`."""

    def __init__(
        self,
        client: Client,
        *,
        on_membership: Callable[[Membership], None],
        on_eval: Callable[[EvalResult, tuple[np.ndarray, ...]], None],
    ) -> None:
        self._client = client
        self._on_membership = on_membership
        self._on_eval = on_eval
        self.tasks_wanted = 0
        self.batch: Delivered | None = None
        self.last_trained_ack = -1
        """Highest batch id that the buffer acknowledged as trained. Batches are trained in the order of their ids."""
        self.snapshot: Snapshot | None = None
        """The newest answer to a request. That of a batch is no newer than the batch's oldest piece."""
        self.unexpected: Counter[str] = Counter()
        self.shutdown: Shutdown | None = None

    def pump(self, timeout_s: float) -> None:
        """Receive all waiting messages; wait up to `timeout_s` for the first one. Raises RunStopped after a Shutdown,
        and PeerLost when the buffer is gone."""
        received = self._client.recv(timeout_s)
        while received is not None:
            self._file(received.message, received.arrays)
            received = self._client.recv(0.0)
        if self.shutdown is not None:
            raise RunStopped(self.shutdown)

    def _file(self, message: object, arrays: tuple[np.ndarray, ...]) -> None:
        match message:
            case TasksAck():
                if message.kind == "train":
                    self.tasks_wanted = message.tasks_wanted
            case Batch():
                if self.batch is None or self.batch.batch.version <= message.version:  # not a late repeat
                    self.batch = Delivered(message, arrays)
            case BatchTrainedAck():
                self.last_trained_ack = max(self.last_trained_ack, message.batch_id)
            case EvalResult():
                self._on_eval(message, arrays)
            case Membership():
                self._on_membership(message)
            case Snapshot():
                self.snapshot = message
            case Shutdown():
                self.shutdown = message
            case _:
                self.unexpected[type(message).__name__] += 1
                log.warning("the learner did not expect a %s", type(message).__name__)


def describe_queues(snapshot: Snapshot | None) -> str:
    """One line for an error: what the buffer holds, and which workers are connected."""
    if snapshot is None:
        return "the buffer has not reported what it holds"
    held = ", ".join(f"{name} {n}" for name, n in snapshot.queues.items())
    alive = [peer.name for peer in snapshot.peers if peer.alive]
    return f"the buffer holds {held}; connected workers: {', '.join(sorted(alive)) or 'none'}"


class StopAsked(Exception):
    """The learner received SIGTERM. Raised between two steps only."""


class StopRequest(SigtermCount):
    """While entered, SIGTERM is a request: the learner finishes the step under way, writes a checkpoint and leaves.
    Once SIGTERM has come, it is not obeyed after exit either, because the process is about to end."""

    @property
    def asked(self) -> bool:
        return self.count > 0

    def __exit__(self, *_: object) -> None:
        if not self.asked:
            super().__exit__()

    def check(self) -> None:
        """Raises StopAsked after SIGTERM."""
        if self.asked:
            raise StopAsked("asked to leave by SIGTERM")
