"""What the buffer tells the learner is filed by kind, in order, and nothing of it gets lost; over a real connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from stillhouse.learner.inbox import Inbox, RunStopped
from stillhouse.protocol import messages as m
from stillhouse.protocol.client import Client
from tests.wire import WAIT_S, ScriptedBuffer, connected

LEARNER: tuple[m.Role, str] = ("learner", "learner-0")
V0, V1 = m.WeightVersion(0, 0), m.WeightVersion(0, 1)
NONE = m.LedgerCounts(0, 0, {}, {}, 0, 0)
LEDGER = m.Ledger(NONE, NONE, NONE, {}, NONE)


def snapshot(time_s: float = 0.0) -> m.Snapshot:
    return m.Snapshot(time_s, "running", "", V0, V0, LEDGER, {}, {}, 4, ())


def batch(batch_id: int = 1, version: m.WeightVersion = V0) -> tuple[m.Batch, list[np.ndarray[Any, Any]]]:
    item = m.BatchItem("train-0-0-0", 0, 0, 1, "", ("default",), 3, (), True, "stop", None, 1)
    frames: list[np.ndarray[Any, Any]] = [
        np.array([5, 6, 7], np.int32),
        np.full(3, -0.5, np.float32),
        np.array([0, 1, 1], np.uint8),
        np.full((1, 3), -1.0, np.float32),
    ]
    return m.Batch(batch_id, version, (item,), {0: 2}, (m.Settled(0, 0, "trained"),), snapshot(batch_id)), frames


class Desk:
    """An inbox at the end of a connection, and what it handed on."""

    def __init__(self, peer: ScriptedBuffer, client: Client) -> None:
        self.peer = peer
        self.memberships: list[m.Membership] = []
        self.evals: list[tuple[m.EvalResult, tuple[np.ndarray[Any, Any], ...]]] = []
        self.inbox = Inbox(client, on_membership=self.memberships.append, on_eval=self._on_eval)

    def _on_eval(self, result: m.EvalResult, arrays: tuple[np.ndarray[Any, Any], ...]) -> None:
        self.evals.append((result, arrays))

    def send(self, *messages: m.Message) -> None:
        for message in messages:
            self.peer.send(message, to=LEARNER)

    def pump_until(self, met: Callable[[], bool]) -> None:
        for _ in range(int(WAIT_S / 0.05)):
            if met():
                return
            self.inbox.pump(0.05)
        raise AssertionError("it never came")


@pytest.fixture
def desk() -> Iterator[Desk]:
    with ScriptedBuffer() as peer, connected(peer.address, "learner") as client:
        yield Desk(peer, client)


def test_everything_is_filed_under_its_kind(desk: Desk) -> None:
    message, frames = batch()
    membership = m.Membership(("actor-0",), ("first",))
    desk.peer.send(message, frames, to=LEARNER)
    desk.send(m.BatchTrainedAck(7, V1), membership, m.TasksAck((0, 1), "train", 30))
    desk.peer.send(m.EvalResult("000000-greedy", message.items, 1, 2), frames, to=LEARNER)
    desk.pump_until(lambda: bool(desk.evals))
    inbox = desk.inbox
    assert inbox.batch is not None and inbox.batch.batch == message
    for got, sent in zip(inbox.batch.arrays, frames, strict=True):
        np.testing.assert_array_equal(got, sent)
    assert (inbox.snapshot, inbox.last_trained_ack, inbox.tasks_wanted) == (None, 7, 30)
    assert desk.memberships == [membership]
    assert (desk.evals[0][0].failed, len(desk.evals[0][1])) == (1, 4)
    assert not inbox.unexpected


def test_the_queue_of_evaluation_tasks_says_nothing_of_train_tasks(desk: Desk) -> None:
    desk.send(m.TasksAck((1,), "train", 5), m.TasksAck((9,), "eval", 99), m.BatchTrainedAck(1, V1))
    desk.pump_until(lambda: desk.inbox.last_trained_ack >= 0)
    assert desk.inbox.tasks_wanted == 5


def test_membership_and_results_are_handed_on_in_their_order(desk: Desk) -> None:
    crowds = [m.Membership(tuple(f"actor-{i}" for i in range(n)), ("x",) * n) for n in range(4)]
    desk.send(*crowds)
    desk.pump_until(lambda: len(desk.memberships) == 4)
    assert desk.memberships == crowds


def test_shutdown_stops_the_run_after_what_came_before_it(desk: Desk) -> None:
    desk.send(m.BatchTrainedAck(7, V1), m.Shutdown(False, "SIGTERM"))
    with pytest.raises(RunStopped, match="the run was stopped: SIGTERM") as stopped:
        desk.pump_until(lambda: False)
    assert stopped.value.shutdown == m.Shutdown(False, "SIGTERM")
    assert desk.inbox.last_trained_ack == 7
    with pytest.raises(RunStopped):
        desk.inbox.pump(0.0)


def test_what_nobody_asked_for_is_counted(desk: Desk) -> None:
    desk.send(m.CancelRollout("train-0-0-0", "not for a learner"))
    desk.pump_until(lambda: bool(desk.inbox.unexpected))
    assert desk.inbox.unexpected == {"CancelRollout": 1}


def test_a_late_repeat_does_not_replace_a_newer_batch(desk: Desk) -> None:
    for one in (batch(2, V1), batch(1, V0)):
        desk.peer.send(one[0], one[1], to=LEARNER)
    desk.send(m.Membership((), ()))
    desk.pump_until(lambda: bool(desk.memberships))
    assert desk.inbox.batch is not None and desk.inbox.batch.batch.batch_id == 2
