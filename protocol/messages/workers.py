"""The work of actors and teachers: tickets become segments, leased items become scores."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from stillhouse.protocol.messages.shared import Dropped, Sampling, TaskKind, TurnReward, VersionSpan, WeightVersion

FailureReason: TypeAlias = Literal[
    "env_error", "env_timeout", "env_unknown", "engine_error", "engine_aborted", "engine_refused"
]
"""env_error: the environment raised, or broke a rule; env_timeout: it took too long; env_unknown: the ticket names an
environment that the configuration lacks; engine_error, engine_aborted: the engine gave up the request; engine_refused:
it did not accept the request."""


class Ticket(msgspec.Struct, frozen=True):
    """Permission to run one rollout. Frame when listed: prompt token ids, int32 [n_prompt]."""

    rollout_id: str
    """`<kind>-<task_id>-<sample>-<attempt>`; unique within the run, over all restarts."""
    task_id: int
    sample_index: int
    kind: TaskKind
    sampling: Sampling
    """`seed` is this rollout's own."""
    env: str
    tag: str
    ground_truth: str | None
    min_version: WeightVersion
    """The engine must have at least this version before the first token is sampled."""
    row: bytes = b""
    """As in Task."""


def is_training(rollout_id: str) -> bool:
    """True for a rollout that is to be trained, false for one of an evaluation."""
    return rollout_id.startswith("train-")


class TicketCredit(msgspec.Struct, frozen=True, tag=True):
    """actor -> buffer: it can run `n` more rollouts than it runs now. Absolute, not additive: the newest credit
    replaces the former one, and the buffer subtracts tickets that are still on their way."""

    n: int
    seq: int
    """Rises within an incarnation; a credit with a lower number than seen before is ignored."""
    tickets_received_total: int
    """Tickets that this incarnation has received so far."""


class Tickets(msgspec.Struct, frozen=True, tag=True):
    """buffer -> actor. Frames: one int32 [n_prompt] per ticket, in order."""

    tickets: tuple[Ticket, ...]


class Segment(msgspec.Struct, frozen=True, tag=True):
    """actor -> buffer, acknowledged. A contiguous run of tokens of one rollout.

    Frames: token ids int32 [n]; behaviour log-probs float32 [n] (0 where not sampled); loss mask uint8 [n];
    n = end - start. Segment 0 starts at offset 0 and begins with the whole prompt. With `top_ids` a fourth: the sets
    that `Sampling.top_ids` or `Sampling.kept` asks for, from the first sampled token to the last, as a payload of
    `protocol.payloads.student_sets`, uint8 [m]. The set of a token between them that was not sampled is
    the token itself. With `experts` one more: what the engine's routers chose in the forward passes that predicted
    these n tokens, as far as it reported it, as a payload of `protocol.payloads.expert_ids`, uint8 [m].

    A rollout with branches (a sub-agent, a retry, a changed history) is still one row of tokens: each is sent once, and
    a segment that continues another place than the end of the row says so in `follows`."""

    rollout_id: str
    index: int
    start: int
    end: int
    spans: tuple[VersionSpan, ...]
    final: bool
    finish_reason: str | None = None
    """On the final one: "stop", "length", "env_done", "env_error", "aborted"."""
    reward: float | None = None
    """On the final one, if the environment gave one: the sum over the episode."""
    n_turns: int = 1
    own_prompt_tokens: int = 0
    """Segment 0 only. 0: it begins with the ticket's prompt. Above 0: the environment made the prompt; as many tokens
    stand before the student's first one."""
    follows: int | None = None
    """None: the segment continues the one before it. Otherwise it begins a branch (see `Branch`)."""
    dropped: tuple[Dropped, ...] = ()
    """On the final one: responses that are not trained. Sorted, disjoint."""
    turn_rewards: tuple[TurnReward, ...] = ()
    """On the final one: the parts of `reward` that belong to a response, by ascending `end`, one per response. What was
    given for responses that are not on the row is in `reward` alone."""
    top_ids: bool = False
    """There is a fourth frame. If the ticket's sampling asks for them, every segment with a sampled token has one."""
    experts: bool = False
    """The last frame is one of experts. Only if the ticket's sampling asks for them."""


class SegmentAck(msgspec.Struct, frozen=True, tag=True):
    """buffer -> actor. With any status the actor forgets the segment; `rejected` ends the rollout."""

    rollout_id: str
    index: int
    status: Literal["accepted", "duplicate", "rejected"]
    reason: str | None = None
    """For rejected: a `RejectReason` of buffer.ledger, e.g. "nan_logprob", "unknown_rollout"."""


class SegmentsAck(msgspec.Struct, frozen=True, tag=True):
    """buffer -> actor. All these segments are accepted, or were before. Refusals are a SegmentAck each."""

    segments: dict[str, list[int]]
    """Indices by rollout id."""


class RolloutFailed(msgspec.Struct, frozen=True, tag=True):
    """actor -> buffer, acknowledged: this rollout will not finish."""

    rollout_id: str
    reason: FailureReason
    error: str = ""
    """For env_error: the class of the exception."""
    detail: str = ""
    """A description for people. Nothing is counted by it."""


class RolloutFailedAck(msgspec.Struct, frozen=True, tag=True):
    """buffer -> actor."""

    rollout_id: str


class CancelRollout(msgspec.Struct, frozen=True, tag=True):
    """buffer -> actor: stop generating this rollout, its tokens are no longer wanted. No reply is expected."""

    rollout_id: str
    reason: str


class SegmentsWanted(msgspec.Struct, frozen=True, tag=True):
    """buffer -> actor: a batch is about to leave. Send what is sampled of train rollouts, without waiting for whole
    segments. No reply is expected."""


class ScoreCredit(msgspec.Struct, frozen=True, tag=True):
    """teacher -> buffer: it can take `tokens` more context tokens than it holds. Absolute, like TicketCredit. An item
    larger than the credit is sent by itself to a teacher that holds nothing."""

    tokens: int
    seq: int
    items_received_total: int
    """ScoreItems that this incarnation has received so far."""


class ScoreItem(msgspec.Struct, frozen=True):
    """Score tokens [start, end) of a rollout given the tokens before them. Frame: token ids int32 [context_tokens],
    which are the rollout's first `end` tokens without those of other branches. If the teacher has a prompt of its own,
    that prompt replaces the first `prompt_tokens` of them."""

    lease_id: int
    rollout_id: str
    start: int
    end: int
    top_start: int = 0
    """Top-k sets are useful at [top_start, top_end), inside [start, end): from the first token that may be trained to
    the last. Empty if there is none."""
    top_end: int = 0
    prompt_tokens: int = 0
    """Tokens of the student's prompt that the frame does not hold, and that get no score. 0: the teacher reads the
    student's prompt."""
    teacher_prompt_tokens: int = 0
    """Tokens of the teacher's own prompt, with which the frame then begins."""
    other_tokens: int = 0
    """Tokens of other branches before `start`, which the frame does not hold."""
    last: bool = False
    """True if no segment of this rollout follows, so that nothing need be kept for it."""
    known_tokens: int = 0
    """Tokens at the beginning of the frame that this teacher was sent with the rollout's former item, and may have
    kept. They do not count towards its credit."""
    top_ids: bool = False
    """The actor sent the student's likeliest tokens at [top_start, top_end), and they follow in a frame."""

    @property
    def new_tokens(self) -> int:
        """The credit that the item takes."""
        return self.context_tokens - self.known_tokens

    @property
    def shift(self) -> int:
        """The position of a token of [start, end) in the frame minus its position in the rollout."""
        return self.teacher_prompt_tokens - self.prompt_tokens - self.other_tokens

    @property
    def context_tokens(self) -> int:
        """Length of the frame."""
        return self.end + self.shift

    @property
    def first(self) -> int:
        """The first token of [start, end) that can be scored: it is in the frame and has a token before it."""
        return min(self.end, max(self.start, self.prompt_tokens, 1 - self.shift))


class ScoreWork(msgspec.Struct, frozen=True, tag=True):
    """buffer -> teacher. Frames per item, in order: int32 [context_tokens]; with the item's `top_ids`, the payload of
    `protocol.payloads.student_sets` that the actor sent, uint8 [m]."""

    items: tuple[ScoreItem, ...]


class Scores(msgspec.Struct, frozen=True, tag=True):
    """teacher -> buffer, acknowledged. Frames: one float32 [end - start] per lease, in order: log-probs of the given
    tokens (any finite number where the token was not sampled; 0 before `first`). With `top_k` there are two frames per
    lease: the second holds what else the teacher sends at [top_start, top_end), as one of `protocol.payloads`,
    uint8 [n]."""

    leases: tuple[int, ...]
    top_k: bool = False


class ScoreFailed(msgspec.Struct, frozen=True, tag=True):
    """teacher -> buffer, acknowledged with ScoresAck: these leases could not be scored."""

    leases: tuple[int, ...]
    reason: str


class ScoresAck(msgspec.Struct, frozen=True, tag=True):
    """buffer -> teacher, one status per lease: accepted; expired (another teacher has it now, or was asked as well and
    answered first, or the scores are no longer wanted); rejected."""

    leases: tuple[int, ...]
    statuses: tuple[Literal["accepted", "expired", "rejected"], ...]
    reasons: tuple[str | None, ...]
