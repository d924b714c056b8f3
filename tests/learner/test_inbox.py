"""What the buffer tells the learner is filed by kind, in order, and nothing of it gets lost; over a real connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from stillhouse.learner.inbox import Inbox
from stillhouse.protocol import messages as m
from stillhouse.protocol.client import Client
from tests.wire import WAIT_S, ScriptedBuffer, connected

LEARNER: tuple[m.Role, str] = ("learner", "learner-0")
V0, V1 = m.WeightVersion(0, 0), m.WeightVersion(0, 1)


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


def test_the_queue_of_evaluation_tasks_says_nothing_of_train_tasks(desk: Desk) -> None:
    desk.send(m.TasksAck((1,), "train", 5), m.TasksAck((9,), "eval", 99), m.BatchTrainedAck(1, V1))
    desk.pump_until(lambda: desk.inbox.last_trained_ack >= 0)
    assert desk.inbox.tasks_wanted == 5


def test_what_nobody_asked_for_is_counted(desk: Desk) -> None:
    desk.send(m.CancelRollout("train-0-0-0", "not for a learner"))
    desk.pump_until(lambda: bool(desk.inbox.unexpected))
    assert desk.inbox.unexpected == {"CancelRollout": 1}
