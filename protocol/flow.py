"""Who may send what, what acknowledges what, and what is numbered: the tables that client and server share.

How messages survive a broken link:

    peer -> buffer    at least once. The client keeps every message until it is known to have arrived: those with an
                      acknowledgement of their own until that comes; the others until the buffer answers a Heartbeat
                      sent after them (one connection is first in, first out). What is not known to have arrived is
                      sent again after a reconnect. All messages may therefore come twice, and are understood so.
    buffer -> peer    exactly once per incarnation. The server numbers what it sends; the peer says how many it has
                      received in Heartbeat (the server forgets those) and Hello (the server goes on behind those).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias

from protocol import messages as m
from protocol.messages import Role

AckKey: TypeAlias = tuple[Hashable, ...]

_EVERYONE: frozenset[Role] = frozenset(("actor", "teacher", "learner", "launcher"))
_ACTOR: frozenset[Role] = frozenset(("actor",))
_TEACHER: frozenset[Role] = frozenset(("teacher",))
_LEARNER: frozenset[Role] = frozenset(("learner",))

SENDERS: dict[type[Any], frozenset[Role]] = {
    m.Hello: _EVERYONE,
    m.Heartbeat: _EVERYONE,
    m.Goodbye: _EVERYONE,
    m.SnapshotWanted: _EVERYONE,
    m.TicketCredit: _ACTOR,
    m.Segment: _ACTOR,
    m.RolloutFailed: _ACTOR,
    m.ScoreCredit: _TEACHER,
    m.Scores: _TEACHER,
    m.ScoreFailed: _TEACHER,
    m.LearnerStarted: _LEARNER,
    m.TasksOffered: _LEARNER,
    m.BatchWanted: _LEARNER,
    m.BatchTrained: _LEARNER,
    m.EvalWanted: _LEARNER,
    m.VersionPublished: _LEARNER,
    m.PostWeightPlan: _LEARNER,
    m.TeacherWeights: _LEARNER,
    m.RunFinished: _LEARNER,
}
"""Roles that may send a message to the buffer. What is not listed only the buffer sends."""

UNNUMBERED: tuple[type[Any], ...] = (m.Welcome, m.Refused, m.HeartbeatReply)
"""Messages of the buffer that belong to one connection: not counted in `received_total`, never sent again."""

UNTRACKED: tuple[type[Any], ...] = (m.Hello, m.Heartbeat, m.Goodbye)
"""The same for messages of the peer."""


def ack_keys(message: m.Message) -> frozenset[AckKey]:
    """What must be acknowledged before `message` counts as arrived; empty for messages without acknowledgement."""
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
    """What `message` acknowledges; empty when it is no acknowledgement."""
    match message:
        case m.SegmentAck(rollout_id=rollout_id, index=index):
            return frozenset((("segment", rollout_id, index),))
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
    """Whether a worker needs to see `message`: all but replies that say no more than "it arrived"."""
    match message:
        case m.HeartbeatReply() | m.RolloutFailedAck():
            return False
        case m.SegmentAck(status=status):
            return status == "rejected"
        case m.ScoresAck(statuses=statuses):
            return any(status != "accepted" for status in statuses)
        case _:
            return True
