"""One message of every kind, with every optional field filled."""

from __future__ import annotations

import msgspec
import numpy as np

from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import Array

VERSION = m.WeightVersion(1, 7)
WEIGHTS = m.WeightsRef(VERSION, "weights/1.7.safetensors", "ab" * 32)
SPANS = (m.VersionSpan(m.WeightVersion(1, 6), 2, 3), m.VersionSpan(VERSION, 3, 5))
SAMPLING = m.Sampling(temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=32, seed=2**63 - 1)
ROW = b'{"prompt":"8293+4758="}'
TASK = m.Task(3, "train", 8, SAMPLING, "calculator", "add", ("default", "math"), "13051", "e1", 0, ROW)
TICKET = m.Ticket("train-3-0-1", 3, 0, "train", SAMPLING, "calculator", "add", "13051", VERSION, ROW)
REWARDS = (m.TurnReward(3, 0.25), m.TurnReward(5, 0.75))
ITEM = m.BatchItem(
    "train-3-0-1", 3, 0, 8, "add", ("default", "math"), 5, SPANS, True, "stop", 1.0, 2, turn_rewards=REWARDS
)
UNTAUGHT = msgspec.structs.replace(ITEM, teachers=(), reward=None, turn_rewards=())
COUNTS = m.LedgerCounts(9, 4, {"stale": 1}, {"actor_lost": 2}, 1, 1)
LEDGER = m.Ledger(COUNTS, COUNTS, COUNTS, {"malformed": 3}, COUNTS)
PEER = m.PeerView("actor", "actor-0", True, VERSION, 0.5, {"tokens_total": 12.0}, 2, 3, 4)
SETTLED = (m.Settled(3, 1, "masked", "stale"),)
SNAPSHOT = m.Snapshot(1.5, "running", "", VERSION, VERSION, LEDGER, {"tasks_queued": 1}, {0: 5, 3: 2}, 4, (PEER, PEER))
PLAN = m.WeightPlan(2, "127.0.0.1", 29500, "gloo", ("actor-0", "actor-1"), 3, 5.0)


def ids(n: int) -> Array:
    return np.arange(n, dtype=np.int32)


def logprobs(*shape: int) -> Array:
    return -np.ones(shape, dtype=np.float32)


def mask(n: int) -> Array:
    return np.ones(n, dtype=np.uint8)


SEGMENT = (
    m.Segment("train-3-0-1", 1, 2, 5, SPANS, True, "stop", 1.0, 2, 2, turn_rewards=REWARDS),
    (ids(3), logprobs(3), mask(3)),
)
FOUR = (ids(5), logprobs(5), mask(5), logprobs(2, 5))
FOUR_UNTAUGHT = (ids(5), logprobs(5), mask(5), logprobs(0, 5))
EXAMPLES: list[tuple[m.Message, tuple[Array, ...]]] = [
    (m.Hello("teacher", "teacher-0", "f00", "run", "ab" * 32, "math", 17), ()),
    (m.Welcome(1.0, 10.0, VERSION), ()),
    (m.Refused("run_id", "another run", "a", "b"), ()),
    (m.Heartbeat(VERSION, {"tokens_total": 12.0}, 9), ()),
    (m.HeartbeatReply(VERSION), ()),
    (m.Goodbye("done"), ()),
    (m.Shutdown(True, "done"), ()),
    (m.TicketCredit(3, 2, 1), ()),
    (m.Tickets((TICKET, TICKET)), (ids(4), ids(2))),
    SEGMENT,
    (m.SegmentAck("train-3-0-1", 1, "rejected", "nan_logprob"), ()),
    (m.SegmentsAck({"train-3-0-1": [1, 2], "train-3-0-2": [0]}), ()),
    (m.RolloutFailed("train-3-0-1", "env_error", "KeyError", "step: 'tool'"), ()),
    (m.RolloutFailedAck("train-3-0-1"), ()),
    (m.CancelRollout("train-3-0-1", "stale"), ()),
    (m.SegmentsWanted(), ()),
    (m.ScoreCredit(4096, 2, 1), ()),
    (
        m.ScoreWork(
            (
                m.ScoreItem(1, "a", 0, 5, 2, 5, top_ids=True),
                m.ScoreItem(2, "b", 1, 5, prompt_tokens=2, teacher_prompt_tokens=9),
            )
        ),
        (ids(5), mask(21), ids(12)),
    ),
    (m.Scores((1, 2), True), (logprobs(5), mask(9), logprobs(1), mask(13))),
    (m.ScoreFailed((1, 2), "out of memory"), ()),
    (m.ScoresAck((1, 2), ("accepted", "rejected"), (None, "nan_logprob")), ()),
    (m.LearnerStarted(VERSION, VERSION, 4, (m.OpenTask(3, (0,), (m.PartialSample(1, "train-3-1-0", 9),)),)), ()),
    (m.TasksOffered((TASK, TASK), True), (ids(4), ids(1))),
    (m.TasksAck((3, 4), "train", 5), ()),
    (m.BatchWanted(VERSION), ()),
    (
        m.Batch(1, VERSION, (ITEM, UNTAUGHT), {0: 5, 3: 2}, SETTLED, SNAPSHOT),
        FOUR + FOUR_UNTAUGHT,
    ),
    (m.BatchTrained(1, VERSION), ()),
    (m.BatchTrainedAck(1, VERSION), ()),
    (m.EvalWanted("e1", ("eval-1-0-0",)), ()),
    (m.EvalResult("e1", (ITEM,), 0, 3), FOUR),
    (m.VersionPublished(VERSION), ()),
    (m.TeacherWeights("default", WEIGHTS), ()),
    (PLAN, ()),
    (m.PostWeightPlan(PLAN), ()),
    (m.Membership(("actor-0",), ("f00",)), ()),
    (m.RunFinished(False, "learner failed"), ()),
    (m.SnapshotWanted(), ()),
    (SNAPSHOT, ()),
]
