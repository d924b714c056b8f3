"""Tables that client and server share: who may send a message, what acknowledges it, and whether it is numbered.

How messages survive a broken link:

    peer -> buffer    at least once. The client keeps every message until it is known to have arrived: a message with an
                      acknowledgement of its own until that comes, others until the buffer answers a Heartbeat that was
                      sent after them (a connection is first in, first out). After a reconnect, messages not known to
                      have arrived are sent again. So any message may come twice, and the buffer tolerates that.
    buffer -> peer    exactly once per incarnation. The server numbers its messages. The peer reports how many it has
                      received in Heartbeat (the server forgets those) and in Hello (the server continues after those).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias, get_args

from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import Role

AckKey: TypeAlias = tuple[Hashable, ...]

SENDERS: dict[type[Any], frozenset[Role]] = {
    **dict.fromkeys(get_args(m.FromAny), frozenset[Role](get_args(Role))),
    **dict.fromkeys(get_args(m.FromActor), frozenset[Role](("actor",))),
    **dict.fromkeys(get_args(m.FromTeacher), frozenset[Role](("teacher",))),
    **dict.fromkeys(get_args(m.FromLearner), frozenset[Role](("learner",))),
}
"""The roles that may send a message to the buffer. Messages that are not listed come from the buffer only."""

UNNUMBERED: tuple[type[Any], ...] = (m.Welcome, m.Refused, m.HeartbeatReply)
"""Messages of the buffer that belong to one connection: they are not in `received_total`, and never sent again."""

UNTRACKED: tuple[type[Any], ...] = (m.Hello, m.Heartbeat, m.Goodbye)
"""Messages of the peer that belong to one connection."""


def ack_keys(message: m.Message) -> frozenset[AckKey]:
    """Keys that must be acknowledged before `message` counts as arrived; empty if it has no acknowledgement."""
    match message:
        case m.Segment(rollout_id=rollout_id, index=index):
            return frozenset((("segment", rollout_id, index),))
        case m.RolloutFailed(rollout_id=rollout_id):
            return frozenset((("rollout_failed", rollout_id),))
        case m.Scores(leases=leases) | m.ScoreFailed(leases=leases):
            return frozenset(("lease", lease) for lease in leases)
        case m.TasksOffered(tasks=tasks):
            return frozenset(("task", task.kind, task.task_id) for task in tasks)
        case m.BatchTrained(batch_id=batch_id):
            return frozenset((("batch", batch_id),))
        case _:
            return frozenset()


def acked_keys(message: m.Message) -> frozenset[AckKey]:
    """Keys that `message` acknowledges; empty if it is not an acknowledgement."""
    match message:
        case m.SegmentAck(rollout_id=rollout_id, index=index):
            return frozenset((("segment", rollout_id, index),))
        case m.SegmentsAck(segments=segments):
            return frozenset(
                ("segment", rollout_id, index) for rollout_id in segments for index in segments[rollout_id]
            )
        case m.RolloutFailedAck(rollout_id=rollout_id):
            return frozenset((("rollout_failed", rollout_id),))
        case m.ScoresAck(leases=leases):
            return frozenset(("lease", lease) for lease in leases)
        case m.TasksAck(task_ids=task_ids, kind=kind):
            return frozenset(("task", kind, task_id) for task_id in task_ids)
        case m.BatchTrainedAck(batch_id=batch_id):
            return frozenset((("batch", batch_id),))
        case _:
            return frozenset()


def concerns_caller(message: m.Message) -> bool:
    """Whether a worker needs to see `message`. Replies that only confirm arrival are left out."""
    match message:
        case m.HeartbeatReply() | m.RolloutFailedAck() | m.SegmentsAck():
            return False
        case m.SegmentAck(status=status):
            return status == "rejected"
        case m.ScoresAck(statuses=statuses):
            return any(status != "accepted" for status in statuses)
        case _:
            return True
