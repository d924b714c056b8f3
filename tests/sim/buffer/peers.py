"""Simulated peers of the buffer, and what they send: honest segments and scores, and spoilt ones."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from stillhouse.buffer.ledger import RejectReason
from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import WeightVersion

Array = npt.NDArray[Any]
VOCAB_SIZE = 50


@dataclass
class SimRollout:
    """One rollout at an actor."""

    ticket: m.Ticket
    prompt: Array
    length: int = 0
    index: int = 0


@dataclass
class SimSegment:
    message: m.Segment
    arrays: tuple[Array, ...]
    expected: RejectReason | None
    """The reason for which the buffer must reject it."""


class SimActor:
    """A process of an actor."""

    def __init__(self, name: str, incarnation: str, version: WeightVersion) -> None:
        self.name = name
        self.incarnation = incarnation
        self.connected = True
        self.version = version
        self.capacity = 4
        self.inbox: deque[tuple[m.Tickets, tuple[Array, ...]]] = deque()
        self.running: dict[str, SimRollout] = {}
        self.unacked: dict[tuple[str, int], SimSegment] = {}
        self.received_total = 0
        self.seq = 0
        self.exact = True
        """Nothing of the buffer's was lost or came late: the credit holds exactly."""

    def read(self) -> None:
        """Start what the buffer sent."""
        while self.inbox:
            tickets, prompts = self.inbox.popleft()
            self.received_total += len(tickets.tickets)
            for ticket, prompt in zip(tickets.tickets, prompts, strict=True):
                assert ticket.row == row_of(ticket.kind, ticket.task_id)
                self.running[ticket.rollout_id] = SimRollout(ticket, prompt)

    def file(self, rollout: SimRollout, segment: SimSegment) -> None:
        """The rollout has grown by this segment."""
        message = segment.message
        self.unacked[message.rollout_id, message.index] = segment
        rollout.index += 1
        rollout.length = message.end
        if message.final:
            del self.running[message.rollout_id]

    def end(self, rollout_id: str) -> None:
        """Forget the rollout: it was cancelled or is complete."""
        self.running.pop(rollout_id, None)
        for key in [key for key in self.unacked if key[0] == rollout_id]:
            del self.unacked[key]


Mood: TypeAlias = Literal["well", "slow", "sick", "stuck"]
"""How a teacher answers: at once; now and then; with failures only; never."""


class SimTeacher:
    """A process of a teacher."""

    def __init__(self, name: str, incarnation: str, pool: str) -> None:
        self.name = name
        self.incarnation = incarnation
        self.pool = pool
        self.connected = True
        self.mood: Mood = "well"
        self.leaving = False
        """It said so by a credit of nothing; it finishes what it has."""
        self.inbox: deque[tuple[m.ScoreWork, tuple[Array, ...]]] = deque()
        self.items: dict[int, tuple[m.ScoreItem, Array]] = {}
        self.received_total = 0
        self.seq = 0

    def read(self) -> None:
        """Take up what the buffer sent."""
        while self.inbox:
            work, arrays = self.inbox.popleft()
            self.received_total += len(work.items)
            for item, ids in zip(work.items, arrays, strict=True):
                self.items[item.lease_id] = (item, ids)


Sample: TypeAlias = tuple[int, int]
"""Task id and sample index."""


@dataclass
class Stream:
    """The learner's task stream, and all that was ever trained and settled on its branch: what a checkpoint holds."""

    next_task_id: int = 0
    outstanding: dict[int, m.Task] = field(default_factory=dict[int, m.Task])
    offer_again: list[int] = field(default_factory=list[int])
    trained: dict[Sample, tuple[str, set[int]]] = field(default_factory=dict[Sample, tuple[str, set[int]]])
    """The one rollout of which tokens were trained, and their offsets."""
    settled: dict[Sample, str] = field(default_factory=dict[Sample, str])
    """How each settled sample ended."""

    def copy(self) -> Stream:
        trained = {sample: (rollout_id, set(offsets)) for sample, (rollout_id, offsets) in self.trained.items()}
        return Stream(self.next_task_id, dict(self.outstanding), list(self.outstanding), trained, dict(self.settled))

    def train(self, item: m.BatchItem, mask: Array) -> None:
        """Tokens of a batch: of no other attempt at the sample, and none of them before."""
        offsets = {int(at) for at in np.flatnonzero(mask)}
        if not offsets:
            return
        sample = item.task_id, item.sample_index
        assert sample not in self.settled, f"{item.rollout_id}: its sample is settled: {self.settled[sample]}"
        rollout_id, before = self.trained.setdefault(sample, (item.rollout_id, set()))
        assert rollout_id == item.rollout_id, f"{sample}: of {rollout_id} and of {item.rollout_id}"
        assert not before & offsets, f"{item.rollout_id}: tokens {sorted(before & offsets)} are trained twice"
        before |= offsets

    def settle(self, samples: Iterable[m.Settled]) -> None:
        """Each once; a task of which all are settled is done."""
        for one in samples:
            sample = one.task_id, one.sample_index
            assert sample not in self.settled, f"{one} is settled twice, before as {self.settled[sample]}"
            self.settled[sample] = one.fate
            task = self.outstanding.get(one.task_id)
            if task is not None and all((one.task_id, i) in self.settled for i in range(task.group_size)):
                del self.outstanding[one.task_id]

    def started(self, version: WeightVersion, parent: WeightVersion) -> m.LearnerStarted:
        """The first message of a learner that goes on from this."""
        ahead = {task_id for task_id, _ in (*self.settled, *self.trained) if task_id >= self.next_task_id}
        tasks: list[m.OpenTask] = []
        for task_id in sorted({*self.outstanding, *ahead}):
            settled = tuple(sorted(i for known, i in self.settled if known == task_id))
            partial = tuple(
                m.PartialSample(i, rollout_id, len(offsets))
                for (known, i), (rollout_id, offsets) in sorted(self.trained.items())
                if known == task_id and i not in settled
            )
            tasks.append(m.OpenTask(task_id, settled, partial))
        return m.LearnerStarted(version, parent, self.next_task_id, tuple(tasks))


@dataclass
class SimEvaluation:
    """The answers that the learner waits for under one eval_id."""

    expected: int
    received: dict[str, None] = field(default_factory=dict[str, None])
    failed: int = 0

    @property
    def complete(self) -> bool:
        return len(self.received) + self.failed >= self.expected


class SimLearner:
    """A process of the learner."""

    def __init__(self, incarnation: str, version: WeightVersion, stream: Stream) -> None:
        self.incarnation = incarnation
        self.connected = True
        self.version = version
        self.first_step = version.step
        self.stream = stream
        self.tasks_wanted = 4
        self.batch: m.Batch | None = None
        self.batch_arrays: tuple[Array, ...] = ()
        self.asked_ahead: WeightVersion | None = None
        """Version that it does not have yet, for which it asked for a batch."""
        self.ahead: tuple[m.Batch, tuple[Array, ...]] | None = None
        """The batch of the next step, once it is here."""
        self.unacked: dict[int, m.BatchTrained] = {}
        self.evaluations: dict[str, SimEvaluation] = {}
        self.empty_answers = 0
        self._batch_ids: dict[WeightVersion, int] = {}

    def sees_whole_groups(self, batch: m.Batch) -> None:
        """No sample of a task in the batch is left for later (release `rollout`)."""
        known = {(one.task_id, one.sample_index) for one in batch.settled} | self.stream.settled.keys()
        for item in batch.items:
            left = [i for i in range(item.group_size) if (item.task_id, i) not in known]
            assert not left, f"task {item.task_id} leaves without its samples {left}"

    def receives(self, batch: m.Batch, arrays: tuple[Array, ...]) -> None:
        """A batch for a step that it asked for, and for each step no other one."""
        assert batch.version <= self.version or batch.version == self.asked_ahead, f"{batch.version} for {self.version}"
        first = self._batch_ids.setdefault(batch.version, batch.batch_id)
        assert first == batch.batch_id, f"batches {first} and {batch.batch_id} for the step of {batch.version}"
        if batch.version == self.version:
            self.batch, self.batch_arrays = batch, arrays
        elif batch.version > self.version:
            self.ahead = (batch, arrays)

    def step(self, batch: m.Batch, arrays: Sequence[Array], masked: Collection[str]) -> None:
        """Record what the batch trained and settled, except the rollouts that were left out of it."""
        for i, item in enumerate(batch.items):
            if item.rollout_id not in masked:
                self.stream.train(item, arrays[4 * i + 2])
        self.stream.settle(batch.settled)


def make_segment(
    actor: SimActor, rollout: SimRollout, rng: Random, *, final: bool, newest: WeightVersion
) -> SimSegment:
    """The rollout's next segment; in the middle of it `newest` weights may reach the actor."""
    prompt = rollout.prompt if rollout.index == 0 else rollout.prompt[:0]
    own = rollout.index == 0 and rng.random() < 0.2
    if own:  # the environment's
        prompt = np.array([rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 4)))], np.int32)
    n_sampled = rng.choice((0, 1, 2, 3, 5) if rollout.index else (0, 1, 1, 2, 2, 4, 4))
    n_context = rng.choice((0, 0, 0, 1)) + (0 if n_sampled or final or len(prompt) else 1)
    n = len(prompt) + n_sampled + n_context
    ids = np.array([*prompt, *(rng.randrange(VOCAB_SIZE) for _ in range(n - len(prompt)))], np.int32)
    sampled = np.zeros(n, np.uint8)
    sampled[len(prompt) : len(prompt) + n_sampled] = 1
    logprobs = np.where(sampled, -0.5 - 0.01 * ids, 0.0).astype(np.float32)
    first = rollout.length + len(prompt)
    spans: list[m.VersionSpan] = []
    if n_sampled:
        cut = rng.randrange(1, n_sampled + 1)
        spans.append(m.VersionSpan(actor.version, first, first + cut))
        if cut < n_sampled:
            if rng.random() < 0.5:
                actor.version = max(actor.version, newest)
            spans.append(m.VersionSpan(actor.version, first + cut, first + n_sampled))
    follows = rng.randrange(rollout.length) if rollout.index and n and rng.random() < 0.25 else None
    if follows == 0 and sampled[0]:
        follows = 1 if rollout.length > 1 else None  # the first token of a root has nothing that predicts it
    reward = rng.choice((0.0, 1.0, 1.0, None)) if final else None
    message = m.Segment(
        rollout_id=rollout.ticket.rollout_id,
        index=rollout.index,
        start=rollout.length,
        end=rollout.length + n,
        spans=tuple(spans),
        final=final,
        finish_reason=rng.choice(("stop", "stop", "length")) if final else None,
        reward=reward,
        turn_rewards=_turn_rewards(rollout.length + n, rng) if reward is not None and rng.random() < 0.3 else (),
        follows=follows,
        dropped=_dropped(rollout.length + n, rng) if final and rng.random() < 0.3 else (),
        own_prompt_tokens=len(prompt) if own else 0,
    )
    return SimSegment(message, (ids, logprobs, sampled), None)


def _dropped(length: int, rng: Random) -> tuple[m.Dropped, ...]:
    """One or two ranges of the rollout."""
    edges = sorted(rng.randrange(length + 1) for _ in range(rng.choice((2, 4))))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple(m.Dropped(start, end, rng.choice(("retried", "undelivered"))) for start, end in pairs if start < end)


def _turn_rewards(length: int, rng: Random) -> tuple[m.TurnReward, ...]:
    """Of some responses; the buffer does not know which of its tokens end one."""
    ends = sorted(rng.sample(range(1, length + 1), min(length, rng.choice((1, 2, 3)))))
    return tuple(m.TurnReward(end, rng.choice((-0.5, 0.0, 1.0))) for end in ends)


def spoil(segment: SimSegment, rng: Random) -> SimSegment:
    """Make one thing wrong with an honest segment; `expected` says what."""
    message, (ids, logprobs, sampled) = segment.message, (a.copy() for a in segment.arrays)
    start, end, spans = message.start, message.end, message.spans
    n = len(ids)
    at = rng.randrange(n) if n else 0
    written = [int(i) for i in np.flatnonzero(sampled)]
    choices = ["offset", "frame", "version"] + (["id", "nan", "inf", "mask"] if n else [])
    choices += ["positive", "span_missing", "span_outside"] if written else []
    choices += ["branch", "own"] if message.index else ["own"]
    choices += ["reward"]
    kind = rng.choice(choices)
    expected = RejectReason.OFFSET_GAP
    if kind == "offset":
        start, end = start + 1, end + 1
    elif kind == "frame":
        logprobs, expected = np.append(logprobs, np.float32(0)), RejectReason.LENGTH_MISMATCH
    elif kind == "version":
        future = WeightVersion(rng.choice((0, 1, 9)), 10**6)
        spans = (m.VersionSpan(future, spans[0].start, spans[0].end), *spans[1:]) if spans else spans
        expected = RejectReason.FUTURE_VERSION if spans else None
    elif kind == "id":
        ids[at], expected = rng.choice((-1, VOCAB_SIZE)), RejectReason.TOKEN_ID_OUT_OF_RANGE
    elif kind == "nan":
        logprobs[at], expected = np.nan, RejectReason.NAN_LOGPROB
    elif kind == "inf":
        logprobs[at], expected = rng.choice((-np.inf, np.inf)), RejectReason.INF_LOGPROB
    elif kind == "mask":
        sampled[at], expected = 2, RejectReason.BAD_MASK
    elif kind == "positive":
        logprobs[rng.choice(written)], expected = 0.01, RejectReason.POSITIVE_LOGPROB
    elif kind == "branch":
        message = msgspec.structs.replace(message, follows=rng.choice((-1, start, end)))
        expected = RejectReason.BAD_BRANCH
    elif kind == "reward":
        reward, parts = rng.choice(
            (
                (1.0, (m.TurnReward(end + 1, 1.0),)),
                (1.0, (m.TurnReward(0, 1.0),)),
                (float("nan"), ()),
                (None, (m.TurnReward(1, 1.0),)),
            )
        )
        message, expected = (
            msgspec.structs.replace(message, reward=reward, turn_rewards=parts),
            RejectReason.BAD_REWARD,
        )
    elif kind == "own":
        own = 1 if message.index else rng.choice((-1, n + 1))
        message, expected = msgspec.structs.replace(message, own_prompt_tokens=own), RejectReason.OWN_PROMPT
    elif kind == "span_missing":
        spans, expected = spans[1:], RejectReason.BAD_SPANS
    else:
        spans, expected = (m.VersionSpan(spans[0].version, start - 1, spans[0].end), *spans[1:]), RejectReason.BAD_SPANS
    spoilt = msgspec.structs.replace(message, start=start, end=end, spans=spans)
    return SimSegment(spoilt, (ids, logprobs, sampled), expected)


def row_of(kind: m.TaskKind, task_id: int) -> bytes:
    """The row of a task, which each of its tickets carries."""
    return f'{{"task": "{kind}-{task_id}"}}'.encode()


def poisonous(rollout_id: str) -> bool:
    """One rollout in 30 is more than any teacher can take."""
    return zlib.crc32(rollout_id.encode()) % 30 == 0


def spoil_scores(scores: Array, rng: Random) -> Array:
    """Log-probs that no teacher may send."""
    if rng.random() < 0.25:
        return np.append(scores, np.float32(-1))
    scores = scores.copy()
    scores[rng.randrange(len(scores))] = rng.choice((np.nan, -np.inf, np.inf))
    return scores
