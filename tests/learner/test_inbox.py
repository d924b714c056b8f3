"""What the buffer tells the learner is filed by kind, in order, and nothing of it gets lost; over a real connection."""

from __future__ import annotations

from stillhouse.learner.inbox import Inbox
from stillhouse.protocol import messages as m
from tests.wire import WAIT_S, ScriptedBuffer, connected


def test_messages_are_filed_by_kind_and_what_nobody_asked_for_is_counted() -> None:
    """The queue of evaluation tasks says nothing of train tasks."""
    with ScriptedBuffer() as peer, connected(peer.address, "learner") as client:
        inbox = Inbox(client, on_membership=lambda _: None, on_eval=lambda _, __: None)
        for message in (
            m.TasksAck((1,), "train", 5),
            m.TasksAck((9,), "eval", 99),
            m.CancelRollout("train-0-0-0", "not for a learner"),
            m.BatchTrainedAck(1, m.WeightVersion(0, 1)),
        ):
            peer.send(message, to=("learner", "learner-0"))
        for _ in range(int(WAIT_S / 0.05)):
            if inbox.last_trained_ack == 1:
                break
            inbox.pump(0.05)
    assert (inbox.last_trained_ack, inbox.tasks_wanted, inbox.unexpected) == (1, 5, {"CancelRollout": 1})
