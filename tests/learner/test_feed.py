"""The feed of batches: what the loop must hear though its next batch is here already, and which batch is which."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from stillhouse.learner.batch import BatchError, TrainItem
from stillhouse.learner.feed import BatchFeed
from stillhouse.learner.inbox import Inbox, RunStopped, StopAsked, StopRequest
from stillhouse.learner.reports.wait_clock import WaitClock
from stillhouse.protocol import messages as m
from tests.wire import WAIT_S, ScriptedBuffer, acknowledgement, connected

LEARNER: tuple[m.Role, str] = ("learner", "learner-0")
V0, V1, V2 = (m.WeightVersion(0, step) for step in range(3))
NONE = m.LedgerCounts(0, 0, {}, {}, 0, 0)
SNAPSHOT = m.Snapshot(1.0, "running", "", V0, V0, m.Ledger(NONE, NONE, NONE, {}, NONE), {}, {}, 4, ())


@dataclass
class Fed:
    feed: BatchFeed
    stop: StopRequest
    clock: WaitClock
    packed: list[int] = field(default_factory=list[int])
    has_packed: threading.Event = field(default_factory=threading.Event)
    meanwhile: int = 0


def _ignored(*_: object) -> None: ...


@contextmanager
def feeding(address: str) -> Generator[Fed]:
    with connected(address, "learner") as client:

        def pack(_: Sequence[TrainItem], step: int) -> None:
            made.packed.append(step)
            made.has_packed.set()

        def meanwhile() -> None:
            made.meanwhile += 1

        stop, clock = StopRequest(), WaitClock()
        feed = BatchFeed(
            client,
            Inbox(client, on_membership=_ignored, on_eval=_ignored),
            pack=pack,
            clock=clock,
            stop=stop,
            publishing=lambda: False,
            meanwhile=meanwhile,
            stall_timeout_s=WAIT_S,
        )
        made = Fed(feed, stop, clock)
        try:
            yield made
        finally:
            feed.close()


def batch(batch_id: int, version: m.WeightVersion) -> tuple[m.Batch, list[np.ndarray[Any, Any]]]:
    item = m.BatchItem(str(batch_id), batch_id, 0, 1, "", ("default",), 3, (), True, "stop", None, 1)
    frames = [np.arange(3, dtype=np.int32), -np.ones(3, np.float32), np.array([0, 1, 1], np.uint8)]
    return m.Batch(batch_id, version, (item,), {0: 2}, (), SNAPSHOT), [*frames, -np.ones((1, 3), np.float32)]


def test_a_batch_asked_for_ahead_is_packed_before_it_is_wanted_and_late_repeats_are_not_taken() -> None:
    with ScriptedBuffer(acknowledgement) as peer, feeding(peer.address) as fed:
        fed.feed.ask_ahead(V1)
        assert peer.expect(m.BatchWanted)[0].message.version == V1
        peer.send(*batch(1, V0), to=LEARNER)
        peer.send(*batch(2, V1), to=LEARNER)
        assert fed.has_packed.wait(WAIT_S)
        ready = fed.feed.next(V1)
        assert (ready.delivered.batch.batch_id, len(ready.items), fed.packed) == (2, 1, [1])
        assert len(peer.got(m.BatchWanted)) == 1, "what is here is not asked for"
        assert fed.meanwhile == 1


@contextmanager
def repeated(act: Callable[[], object]) -> Generator[None]:
    """Do it every 50 ms, from another thread, as a buffer that is asked again."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.05):
            act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("ahead", [V0, V2], ids=["a step back", "a step ahead"])
def test_a_batch_of_another_version_is_never_given(ahead: m.WeightVersion) -> None:
    """Whichever thread has received it: one asked for ahead, and one that comes while the loop waits."""
    with ScriptedBuffer(acknowledgement) as peer, feeding(peer.address) as fed:
        fed.feed.ask_ahead(ahead)
        peer.expect(m.BatchWanted)
        peer.send(*batch(1, ahead), to=LEARNER)
        assert fed.has_packed.wait(WAIT_S)
        peer.send(*batch(2, ahead), to=LEARNER)
        with repeated(lambda: peer.send(*batch(3, V1), to=LEARNER)):  # what is read with a newer one is a late repeat
            assert fed.feed.next(V1).delivered.batch.batch_id == 3


def test_the_end_of_the_run_is_heard_though_the_next_batch_is_here() -> None:
    with ScriptedBuffer(acknowledgement) as peer, feeding(peer.address) as fed:
        fed.feed.ask_ahead(V1)
        peer.expect(m.BatchWanted)
        peer.send(m.Shutdown(False, "enough"), to=LEARNER)
        peer.send(*batch(1, V1), to=LEARNER)
        assert fed.has_packed.wait(WAIT_S)
        with pytest.raises(RunStopped, match="enough"):
            fed.feed.next(V1)


def test_a_request_to_leave_is_heard_though_the_next_batch_is_here() -> None:
    with ScriptedBuffer(acknowledgement) as peer, feeding(peer.address) as fed:
        fed.feed.ask_ahead(V1)
        peer.expect(m.BatchWanted)
        peer.send(*batch(1, V1), to=LEARNER)
        assert fed.has_packed.wait(WAIT_S)
        fed.stop.count = 1
        with pytest.raises(StopAsked):
            fed.feed.next(V1)


def test_a_bad_batch_is_the_loops_error_and_not_lost_on_the_other_thread() -> None:
    with ScriptedBuffer(acknowledgement) as peer, feeding(peer.address) as fed:
        fed.feed.ask_ahead(V1)
        peer.expect(m.BatchWanted)
        message, frames = batch(1, V1)
        frames[1] = np.ones(3, np.float32)
        peer.send(message, frames, to=LEARNER)
        with pytest.raises(BatchError, match="log-probs of 'behaviour'"):
            fed.feed.next(V1)
