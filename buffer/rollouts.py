"""Records that the buffer holds: tasks, their samples, the attempts at a sample, and the segments of an attempt.

    TaskRecord  1 -- group_size  Slot  1 -- 0..1 at a time  Rollout (one attempt)  1 -- n  Segment  1 -- n  ScoreJob

Only `buffer.lifecycle` changes the state of a segment, a rollout or a slot. Life of a segment:

    UNSCORED --every pool's scores are in--> SCORED --leaves in a batch--> IN_BATCH --BatchTrained--> TRAINED
                                               ^----- learner lost its batch ----+
    UNSCORED, SCORED --every open token masked--> MASKED          UNSCORED, SCORED, IN_BATCH --attempt over--> DROPPED
"""

from __future__ import annotations

import enum
import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from stillhouse.buffer.blobs import KeptArrays
from stillhouse.buffer.config import ATTEMPTS_PER_EPOCH
from stillhouse.buffer.tokens import Array, Int32s, TokenStore
from stillhouse.protocol.branches import path_to
from stillhouse.protocol.messages import (
    Branch,
    Dropped,
    ScoreItem,
    Task,
    TaskKind,
    Ticket,
    TurnReward,
    VersionSpan,
    WeightVersion,
)
from stillhouse.protocol.messages import Segment as SegmentMessage


class Fate(NamedTuple):
    """Outcome of an attempt or a sample, as in `protocol.messages.Settled`."""

    fate: Literal["trained", "masked", "dropped"]
    reason: str


class SegmentState(enum.IntEnum):
    """State of a segment."""

    UNSCORED = 0
    """Waiting for teachers, or leased to some."""
    SCORED = 1
    """Ready to leave for the learner."""
    IN_BATCH = 2
    """Leased to the learner."""
    TRAINED = 3
    """Settled, as are the next two states: at least one token was trained."""
    MASKED = 4
    """No token was or will be trained, by decision."""
    DROPPED = 5
    """No token was or will be trained, by accident."""

    @property
    def settled(self) -> bool:
        return self >= SegmentState.TRAINED


@dataclass(slots=True, eq=False, repr=False)
class ScoreJob:
    """One segment to be scored by one pool. Leased to one teacher at a time, and to a second one as a hedge."""

    rollout: RolloutState
    segment: HeldSegment
    pool_index: int
    """Index into the task's `teachers`."""
    attempts: int = 0
    """Leases granted so far, not counting hedges."""
    lease_id: int | None = None
    """Id of the only lease, or of the older one of two."""
    hedge_id: int | None = None
    """Id of the younger one of two leases."""
    hedged: bool = False
    """True once a hedge was granted: there is at most one per job."""
    failed_by: set[str] = field(default_factory=set[str])
    """Teachers that reported a failure, sent bad scores, or let the lease run out."""
    failed_at_s: float = 0.0
    cancelled: bool = False
    """True if no longer wanted: the attempt ended, or another pool could not score the segment."""

    @property
    def pool(self) -> str:
        return self.rollout.slot.task.task.teachers[self.pool_index]

    @property
    def item(self) -> str:
        """Name of the segment to score, the same for all pools."""
        return f"{self.rollout.rollout_id}/{self.segment.index}"


@dataclass(slots=True, eq=False, repr=False)
class HeldSegment:
    """Tokens [start, end) of a rollout, as accepted."""

    index: int
    start: int
    end: int
    spans: tuple[VersionSpan, ...]
    n_sampled: int
    unscored_pools: int
    top_start: int
    top_end: int
    """Range for which top-k sets are requested: the narrowest with all tokens that may be trained, or an empty one."""
    other_tokens: int = 0
    """Tokens before `start` that are on other branches."""
    n_open: int = field(init=False)
    """Sampled tokens that are not trained, masked or dropped."""
    n_trained: int = 0
    masked_reason: str | None = None
    """Reason of its first masked token."""
    state: SegmentState = SegmentState.UNSCORED
    jobs: list[ScoreJob] = field(default_factory=list[ScoreJob])
    """Jobs while UNSCORED. They refer back to the segment: kept longer, they would leave every rollout to the cyclic
    garbage collector."""
    top_k: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Top-k payload of that range by pool index, if the teacher sent one, and by KEPT_IDS what its tokens were sampled
    from, if the actor did; kept until the segment is settled."""
    top_ids: bytes = b""
    """Payload of the student's likeliest tokens in that range, if the actor sent one; kept while UNSCORED."""
    experts: bytes = b""
    """Payload of the experts for its tokens, if the actor sent it. Kept as long as the tokens: later segments have them
    as context."""
    counted_place: int = 0
    """What `buffer.holdings` has counted of it, as in the next two fields."""
    counted_tokens: int = 0
    counted_bytes: int = 0

    def __post_init__(self) -> None:
        self.n_open = self.n_sampled

    def __repr__(self) -> str:
        return f"Segment({self.index}, [{self.start}, {self.end}), {self.state.name}, open={self.n_open})"

    @property
    def leased_to_teacher(self) -> bool:
        return any([job.lease_id is not None for job in self.jobs])  # noqa: C419 (half the time of a generator)


@dataclass(slots=True, eq=False, repr=False)
class RolloutState:
    """One attempt at a slot: a ticket given to an actor, and what came back."""

    slot: Slot
    ticket: Ticket
    """Without its row, which the task holds."""
    actor: str
    deadline_s: float = 0.0
    """Time at which the ticket is taken back, unless a segment arrives."""
    tokens: TokenStore = field(init=False)
    branches: list[Branch] = field(default_factory=list[Branch])
    """By ascending start. Empty: the tokens are one row."""
    segments: list[HeldSegment] = field(default_factory=list[HeldSegment])
    held: dict[int, tuple[SegmentMessage, tuple[Array, ...]]] = field(
        default_factory=dict[int, tuple[SegmentMessage, tuple[Array, ...]]]
    )
    """Segments that arrived ahead of a missing one, by index: neither acknowledged nor counted yet."""
    affinity: list[str | None] = field(init=False)
    """For each pool, the teacher that scored this rollout last."""
    closed: bool = False
    """True if no more segments follow: final, or cut off where it stands."""
    cut_reason: str = ""
    """Reason why it was cut off."""
    final: bool = False
    finish_reason: str | None = None
    reward: float | None = None
    turn_rewards: tuple[TurnReward, ...] = ()
    n_turns: int = 1
    n_sampled: int = 0
    n_trained_tokens: int = 0
    n_unsettled: int = 0
    """Number of segments, as in the next two fields."""
    n_unscored: int = 0
    n_in_batch: int = 0
    dropped: tuple[Dropped, ...] = ()
    """Responses that are not to be trained, as its final segment names them."""
    masked_reason: str | None = None
    """Reason of its first masked token."""
    drop_reason: str | None = None
    front: int = 0
    """Number of leading segments none of which is UNSCORED."""
    offer_from: int = 0
    """No segment before this one is SCORED."""
    n_offered_tokens: int = 0
    """Open tokens of SCORED segments before `front`: those that could leave now."""
    offered_versions: set[WeightVersion] = field(default_factory=set[WeightVersion])
    """Versions of those tokens. May contain more."""
    n_leased: int = 0
    """Segments leased to a teacher or the learner, as counted by `buffer.holdings`, as are the next two fields."""
    counted_progress: int = 0
    counted_ownership: int = 0

    def __post_init__(self) -> None:
        n_pools = len(self.slot.task.task.teachers)
        self.tokens = TokenStore(n_pools)
        self.affinity = [None] * n_pools

    def __repr__(self) -> str:
        return (
            f"Rollout({self.rollout_id}, actor={self.actor}, closed={self.closed}, length={self.length},"
            f" segments={self.segments})"
        )

    @property
    def rollout_id(self) -> str:
        return self.ticket.rollout_id

    def score_item(self, lease_id: int, segment: HeldSegment, known_tokens: int) -> tuple[ScoreItem, tuple[Array, ...]]:
        """Item and frames that are sent to a teacher to score a segment; `known_tokens` as in the item."""
        start, end = segment.start, segment.end
        last = self.closed and end == self.length
        item = ScoreItem(
            *(lease_id, self.rollout_id, start, end, segment.top_start, segment.top_end),
            last=last,
            known_tokens=known_tokens,
            top_ids=bool(segment.top_ids),
        )
        more = (np.frombuffer(segment.top_ids, np.uint8),) if segment.top_ids else ()
        ids_N, record = self._path_ids(end), self.slot.task
        if segment.other_tokens:
            item = msgspec.structs.replace(item, other_tokens=segment.other_tokens)
        if record.teacher_prompt_T is None:
            return item, (ids_N, *more)
        n_prompt, n_teacher_prompt = len(record.prompt_T), len(record.teacher_prompt_T)
        item = msgspec.structs.replace(item, prompt_tokens=n_prompt, teacher_prompt_tokens=n_teacher_prompt)
        return item, (np.concatenate([record.teacher_prompt_T, ids_N[n_prompt:]]), *more)

    def context_tokens(self, segment: HeldSegment) -> int:
        """Length of the first frame of `score_item`."""
        record = self.slot.task
        other = 0 if record.teacher_prompt_T is None else len(record.teacher_prompt_T) - len(record.prompt_T)
        return segment.end - segment.other_tokens + other

    def known_tokens(self, segment: HeldSegment, pool_index: int, teacher: str) -> int:
        """Tokens of the frame that this teacher was sent with the former item. A branch may share fewer; then it
        computes more than it was asked for."""
        if self.affinity[pool_index] != teacher or segment.start == 0:
            return 0
        return self.context_tokens(segment) - (segment.end - segment.start)

    def _path_ids(self, end: int) -> Int32s:
        """[n] The tokens that are read up to token `end` - 1. A view where the rollout has no branches."""
        parts = [self.tokens.ids(e)[s:] for s, e in path_to(self.branches, end)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def continues_prompt(self, follows: int) -> bool:
        """The path to token `follows` - 1 begins with the whole prompt of the task."""
        first = next(iter(path_to(self.branches, follows)), (0, 0))
        return first[0] == 0 and first[1] >= len(self.slot.task.prompt_T)

    @property
    def kind(self) -> TaskKind:
        return self.ticket.kind

    @property
    def length(self) -> int:
        return self.tokens.length

    @property
    def whole(self) -> bool:
        """True if nothing more will arrive from its actor or from teachers."""
        return self.closed and self.n_unscored == 0

    @property
    def untouched(self) -> bool:
        """True if no token was trained or is in a batch."""
        return self.n_trained_tokens == 0 and self.n_in_batch == 0

    @property
    def fate(self) -> Fate:
        """Outcome, once nothing is open."""
        reason = self.drop_reason or self.masked_reason or self.cut_reason
        if self.n_trained_tokens > 0:
            return Fate("trained", reason)
        return Fate("dropped", reason) if self.drop_reason else Fate("masked", reason)

    def offered_segments(self) -> list[HeldSegment]:
        """Scored segments at the front that hold open tokens, in order."""
        return [s for s in self.segments[self.offer_from : self.front] if s.state is SegmentState.SCORED]

    def spans(self, n_segments: int) -> tuple[VersionSpan, ...]:
        """Version spans of the first segments. Adjacent spans of one version are joined."""
        joined: list[VersionSpan] = []
        for segment in self.segments[:n_segments]:
            for span in segment.spans:
                if joined and joined[-1].version == span.version and joined[-1].end == span.start:
                    joined[-1] = VersionSpan(span.version, joined[-1].start, span.end)
                else:
                    joined.append(span)
        return tuple(joined)


@dataclass(slots=True, eq=False, repr=False)
class Slot:
    """One sample of a task, through all attempts at it."""

    task: TaskRecord
    sample_index: int
    order: int
    """Number in the order of first tickets. Later attempts keep it, and batches take the lowest first."""
    n: int
    """Place in the learner's schedule (`buffer.pacing`); 0 for evaluation."""
    epoch: int
    """Epoch of the learner when the first ticket was issued."""
    attempt: int = 0
    rollout: RolloutState | None = None
    """The attempt that runs or waits; None while a new ticket is to be issued, and when settled."""
    ready: bool = False
    """True if its rollout is whole."""
    settled: bool = False
    """True if trained, masked or dropped for good."""
    fate: Fate | None = None
    """Outcome of its last attempt, once that is over."""
    witness: RolloutState | None = None
    """Release `rollout` only: the rollout, if it was masked as a whole. It goes along with its group without a token to
    train, because its reward belongs to the group's mean."""

    def __lt__(self, other: Slot) -> bool:
        return self.order < other.order


class TaskRecord:
    """A task that was offered and is not settled."""

    __slots__ = (
        *("_blob", "_last_order", "min_version", "n_settled", "prompt_T", "slots", "task", "teacher_prompt_T"),
        "to_issue",
    )

    def __init__(self, task: Task, prompts_T: Int32s, *, min_version: WeightVersion, blob: int = 0) -> None:
        """`prompts_T`: the task's frame: the student's prompt, then the teachers' prompt if they have another. `blob`:
        number of the blob in which it came."""
        self.task = task
        self._blob = blob
        self._set_prompts(prompts_T)
        self.min_version = min_version
        """Evaluation tasks only: the version that was published when the task was offered."""
        self.to_issue = deque(range(task.group_size))
        """Samples that never had a ticket, ascending."""
        self.slots: list[Slot] = []
        """Samples that had one, in the order of their tickets."""
        self.n_settled = 0
        """Settled samples, including those that were settled before a restart and have no slot here."""
        self._last_order = -1

    def _set_prompts(self, prompts_T: Int32s) -> None:
        n_prompt = len(prompts_T) - self.task.teacher_prompt_tokens
        self.prompt_T = prompts_T[:n_prompt]
        self.teacher_prompt_T = prompts_T[n_prompt:] if self.task.teacher_prompt_tokens else None
        """Prompt that teachers read instead of the student's; None if they read the same."""

    def contents(self) -> tuple[Any, ...]:
        """Contents for an image, which refers to the prompts' blob."""
        own = () if self.teacher_prompt_T is None else (self.teacher_prompt_T,)
        prompts = KeptArrays(self._blob) if self._blob else np.concatenate([self.prompt_T, *own])
        return prompts, self.task, self.min_version, self.to_issue, self.slots, self.n_settled, self._last_order

    def fill(self, contents: Sequence[Any]) -> None:
        """Fill a record that was made without `__init__` with what `contents` returned."""
        prompts, self.task, self.min_version, self.to_issue, self.slots, self.n_settled, self._last_order = contents
        self._blob = prompts.number if isinstance(prompts, KeptArrays) else 0
        self._set_prompts(np.frombuffer(prompts.arrays[0], np.int32) if isinstance(prompts, KeptArrays) else prompts)

    @property
    def order(self) -> int:
        """Order of its first slot, which is that of the task as a group; the last one known once it has no slots."""
        return self.slots[0].order if self.slots else self._last_order

    def let_go(self) -> None:
        """Forget the slots of a task that is over. They refer back to it: what nobody else holds is then freed at once,
        and need not be searched for among everything that is held (`buffer.loop`)."""
        self._last_order = self.order
        for slot in self.slots:
            slot.witness = None
        self.slots.clear()

    @property
    def all_issued(self) -> bool:
        return not self.to_issue

    @property
    def settled(self) -> bool:
        return self.n_settled == self.task.group_size


def make_ticket(slot: Slot, min_version: WeightVersion) -> Ticket:
    """The ticket for the slot's next attempt."""
    task = slot.task.task
    sampling = task.sampling
    return Ticket(
        rollout_id=f"{task.kind}-{task.task_id}-{slot.sample_index}-{slot.epoch * ATTEMPTS_PER_EPOCH + slot.attempt}",
        task_id=task.task_id,
        sample_index=slot.sample_index,
        kind=task.kind,
        sampling=msgspec.structs.replace(sampling, seed=ticket_seed(sampling.seed, slot.sample_index, slot.attempt)),
        env=task.env,
        tag=task.tag,
        ground_truth=task.ground_truth,
        min_version=min_version,
        row=task.row,
    )


def ticket_seed(task_seed: int, sample_index: int, attempt: int) -> int:
    """Seed of one rollout, 0 <= seed < 2**31 (engines take 32-bit signed ones): BLAKE2b of the three numbers."""
    text = f"{task_seed}:{sample_index}:{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") & 0x7FFF_FFFF
