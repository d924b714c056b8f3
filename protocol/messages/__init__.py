"""Every message that crosses a wire: one Struct each, with its sender, its receiver, and the frames that follow it.

A message is one ZeroMQ multipart: the first frame is MessagePack of the tagged Struct, the others are raw little-endian
arrays in the order and dtype that the docstring names (see `protocol.codec`), and the last is a checksum
(`protocol.sockets`). Small ones to the buffer share a multipart (`protocol.bundle`). Lengths are in tokens.

Every peer talks to the buffer only; the buffer is a ROUTER, all others are DEALERs:

    any      Hello -> Welcome | Refused;  Heartbeat <-> HeartbeatReply;  Goodbye ->;  <- Shutdown
    actor    TicketCredit -> .. <- Tickets;  Segment -> <- SegmentsAck | SegmentAck;
             RolloutFailed -> <- RolloutFailedAck;  <- CancelRollout;  <- WeightPlan;
             <- SegmentsWanted
    teacher  ScoreCredit -> .. <- ScoreWork;  Scores -> <- ScoresAck;  ScoreFailed -> <- ScoresAck;
             <- TeacherWeights
    learner  LearnerStarted ->;  TasksOffered -> <- TasksAck;  BatchWanted -> .. <- Batch;
             BatchTrained -> <- BatchTrainedAck;
             EvalWanted -> .. <- EvalResult;  VersionPublished ->;  PostWeightPlan ->;  <- Membership;  RunFinished ->;
             TeacherWeights ->
    anyone   SnapshotWanted -> <- Snapshot

Offsets: token offsets are absolute within the rollout, half-open. Offset 0 is the first prompt token.
"Sampled" tokens (loss mask 1) are those the student wrote; the ledger counts sampled tokens.
"""

from __future__ import annotations

# ruff: noqa: F403, F405 - all names of the three modules are this package's, so that callers need not know the files
from typing import TypeAlias

from stillhouse.protocol.messages.learner import *
from stillhouse.protocol.messages.shared import *
from stillhouse.protocol.messages.workers import *

FromAny: TypeAlias = Hello | Heartbeat | Goodbye | SnapshotWanted
FromActor: TypeAlias = TicketCredit | Segment | RolloutFailed
FromTeacher: TypeAlias = ScoreCredit | Scores | ScoreFailed
LearnersWork: TypeAlias = LearnerStarted | TasksOffered | BatchWanted | BatchTrained | EvalWanted | RunFinished
FromLearner: TypeAlias = LearnersWork | VersionPublished | PostWeightPlan | TeacherWeights
ToAny: TypeAlias = Welcome | Refused | HeartbeatReply | Shutdown | Snapshot
ToActor: TypeAlias = Tickets | SegmentAck | SegmentsAck | RolloutFailedAck | CancelRollout | SegmentsWanted | WeightPlan
ToTeacher: TypeAlias = ScoreWork | ScoresAck
ToLearner: TypeAlias = TasksAck | Batch | BatchTrainedAck | EvalResult | Membership
Message: TypeAlias = FromAny | FromActor | FromTeacher | FromLearner | ToAny | ToActor | ToTeacher | ToLearner
"""`TeacherWeights` also goes from the buffer to the teachers of its pool."""
