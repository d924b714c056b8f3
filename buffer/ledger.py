"""The ledger: what was accepted and what happened to it, in three units, for train and for evaluation rollouts.

Conservation law, in each unit and at every moment (see `protocol.messages.LedgerCounts.balanced`):

    accepted = trained + sum(masked) + sum(dropped) + waiting + in_flight

The first four are counted here, one transition at a time, by `buffer.lifecycle` only. The last two come from
`buffer.holdings`, which counts where each stored segment is. At the end of the run they are recounted from the stored
segments, so that a lost or doubled segment shows as an imbalance.

Failed attempts are counted by reason, with a few of their texts. The set of reasons is bounded, whatever comes over the
wire: those of `protocol.messages.FailureReason`, and for env_error the class of the exception, `env_error_KeyError`,
for the first MAX_CLASSES classes. Others, and what is not the name of a class, are counted as env_error_other. Texts
never become a reason.
"""

from __future__ import annotations

import enum
import re
from typing import Final, NamedTuple

from stillhouse.protocol.messages import Ledger, LedgerCounts, RolloutFailed, RolloutFailures, TaskKind


class RejectReason(enum.StrEnum):
    """Reason why a message was refused. It was never counted as accepted, and its sender is notified."""

    UNKNOWN_ROLLOUT = "unknown_rollout"
    """No ticket with this id is known."""
    ROLLOUT_ENDED = "rollout_ended"
    """The attempt is over: its ticket was lost, failed, timed out, or an earlier segment was rejected."""
    WRONG_ACTOR = "wrong_actor"
    """The ticket belongs to another actor."""
    AFTER_FINAL = "after_final"
    OUT_OF_ORDER = "out_of_order"
    """Too many segments ahead of a missing one (`max_held_segments`), or a negative index."""
    OFFSET_GAP = "offset_gap"
    """`start` is not where the segment before it ended."""
    BAD_BRANCH = "bad_branch"
    """It follows, or names as dropped, tokens that the rollout does not have."""
    BAD_REWARD = "bad_reward"
    """A reward that is not finite, or on a segment that is not the final one, or rewards of turns that are not in
    order, that end where the rollout has no token, or that a rollout without a reward has."""
    LENGTH_MISMATCH = "length_mismatch"
    """Frames missing, or not as long as `end - start`."""
    EMPTY_SEGMENT = "empty_segment"
    """No token, and not the final one."""
    SEGMENT_TOO_LONG = "segment_too_long"
    ROLLOUT_TOO_LONG = "rollout_too_long"
    PROMPT_MISMATCH = "prompt_mismatch"
    """Segment 0 does not begin with the ticket's prompt."""
    OWN_PROMPT = "own_prompt"
    """The environment's own prompt is not wholly in segment 0, or a later segment claims one."""
    OWN_PROMPT_PRIVILEGED = "own_prompt_privileged"
    """The environment made the prompt, and teachers would read a privileged one, which belongs to the ticket's."""
    BAD_MASK = "bad_mask"
    """A loss mask other than 0 and 1, or 1 within the prompt."""
    TOKEN_ID_OUT_OF_RANGE = "token_id_out_of_range"
    NAN_LOGPROB = "nan_logprob"
    INF_LOGPROB = "inf_logprob"
    POSITIVE_LOGPROB = "positive_logprob"
    ABSURD_LOGPROB = "absurd_logprob"
    BAD_SPANS = "bad_spans"
    """Version spans unsorted, overlapping, empty, outside the segment, or not covering every sampled token."""
    UNKNOWN_VERSION = "unknown_version"
    """A version that this run never had: an epoch before its start, or a step before the epoch's fork."""
    FUTURE_VERSION = "future_version"
    """A version that the learner cannot have reached yet."""
    SCORE_LENGTH = "score_length"
    NAN_SCORE = "nan_score"
    INF_SCORE = "inf_score"
    POSITIVE_SCORE = "positive_score"
    ABSURD_SCORE = "absurd_score"
    TOP_K_SIZE = "top_k_size"
    """More than `max_top_k_bytes` per token."""
    TOP_K_MALFORMED = "top_k_malformed"
    """Not a payload, or one for another number of tokens."""
    TOP_IDS_MISSING = "top_ids_missing"
    """Sampled tokens without the student's likeliest tokens, which the ticket asks for; or such without being asked."""
    TOP_IDS_SIZE = "top_ids_size"
    """More than `max_top_k_bytes` per token."""
    TOP_IDS_MALFORMED = "top_ids_malformed"
    """Not a payload, or one for another number of tokens."""
    EXPERTS_UNASKED = "experts_unasked"
    """Experts of routers that the ticket does not ask for."""
    EXPERTS_SIZE = "experts_size"
    """More than `max_top_k_bytes` per token."""
    EXPERTS_MALFORMED = "experts_malformed"
    """Not a payload, one for other tokens or another model, or ids that no router can have chosen."""
    UNKNOWN_BATCH = "unknown_batch"
    """BatchTrained for a batch that is not leased and was never trained."""
    WRONG_VERSION = "wrong_version"
    """BatchTrained for another step than the batch was formed for."""
    NOT_IN_BATCH = "not_in_batch"
    """BatchTrained that leaves out rollouts which were not in the batch."""
    RUN_OVER = "run_over"
    """It arrived after RunFinished."""


RUN_ENDED = "run_ended"
"""Dropped: still waiting or in flight when the run finished."""
LOST_AT_RESTART = "lost_at_restart"
"""Dropped: waiting or in flight when the buffer of an earlier start of this run ended."""
LEARNER_RESTART = "learner_restart"
"""Dropped: the learner went back to a checkpoint, and what happened after that does not count. A sample of which the
checkpoint has nothing trained is run again; of one that is trained in part, this is the rest."""
STALE = "stale"
"""Masked: further than `max_staleness` from the batch it would have been in."""
UNSCORABLE = "unscorable"
"""Masked (evaluation: dropped): `max_score_attempts` leases of one pool failed."""
NON_FINITE = "non_finite"
"""Masked: the learner left the rollout out of its step, because its loss or gradient is not finite or its top-k sets
cannot be read. The learner's log says which."""
TOO_LARGE = "too_large"
"""Masked: the rollout (release `rollout`: its group) fits into no message to the learner."""
EQUAL_REWARDS = "equal_rewards"
"""Dropped: all rollouts of the group have the same reward (`buffer.dynamic_sampling`)."""
TRUNCATED = "truncated"
"""Masked: the rollout ended at a length limit (`buffer.mask_truncated`)."""
CONTEXT = "context"
"""Masked: a segment or rollout without any sampled token."""

MAX_REASONS = 256
"""Distinct reasons kept per unit. Later ones are counted as `other`, so that free text cannot fill the memory."""


class Held(NamedTuple):
    """Amount that is stored and not settled, in one unit."""

    waiting: int
    in_flight: int


class UnitCounts:
    """Counters of one unit, changed at each transition."""

    def __init__(self, carried: LedgerCounts | None = None) -> None:
        self.accepted = 0
        self.trained = 0
        self.masked: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        if carried is not None:
            self.accepted = carried.accepted
            self.trained = carried.trained
            self.masked.update(carried.masked)
            self.dropped.update(carried.dropped)
            self.drop(carried.waiting + carried.in_flight, LOST_AT_RESTART)

    def __repr__(self) -> str:
        return (
            f"UnitCounts(accepted={self.accepted}, trained={self.trained}, masked={self.masked},"
            f" dropped={self.dropped})"
        )

    def accept(self, n: int = 1) -> None:
        self.accepted += n

    def train(self, n: int = 1) -> None:
        self.trained += n

    def mask(self, n: int, reason: str) -> None:
        _add(self.masked, reason, n)

    def drop(self, n: int, reason: str) -> None:
        _add(self.dropped, reason, n)

    def frozen(self, held: Held) -> LedgerCounts:
        return LedgerCounts(
            accepted=self.accepted,
            trained=self.trained,
            masked=dict(self.masked),
            dropped=dict(self.dropped),
            waiting=held.waiting,
            in_flight=held.in_flight,
        )


class KindCounts:
    """Rollouts, segments and sampled tokens of one task kind."""

    def __init__(
        self,
        rollouts: LedgerCounts | None = None,
        segments: LedgerCounts | None = None,
        tokens: LedgerCounts | None = None,
    ) -> None:
        self.rollouts = UnitCounts(rollouts)
        self.segments = UnitCounts(segments)
        self.tokens = UnitCounts(tokens)


class KindHeld(NamedTuple):
    """Amounts held of one task kind."""

    rollouts: Held
    segments: Held
    tokens: Held


class LedgerBook:
    """All counters of a run. `carried`: the last ledger before a restart; what was waiting or in flight then is
    lost."""

    def __init__(self, carried: Ledger | None = None) -> None:
        self.failures = FailureBook(carried)
        if carried is None:
            self.train = KindCounts()
            self.eval = KindCounts()
            self.rejected: dict[str, int] = {}
        else:
            self.train = KindCounts(carried.rollouts, carried.segments, carried.tokens)
            self.eval = KindCounts(tokens=carried.eval_tokens)
            self.rejected = dict(carried.rejected)

    def of(self, kind: TaskKind) -> KindCounts:
        return self.train if kind == "train" else self.eval

    def reject(self, reason: RejectReason) -> None:
        _add(self.rejected, reason.value, 1)

    def frozen(self, train: KindHeld, evaluation: KindHeld) -> Ledger:
        return Ledger(
            rollouts=self.train.rollouts.frozen(train.rollouts),
            segments=self.train.segments.frozen(train.segments),
            tokens=self.train.tokens.frozen(train.tokens),
            rejected=dict(self.rejected),
            eval_tokens=self.eval.tokens.frozen(evaluation.tokens),
        )


def _add(counts: dict[str, int], reason: str, n: int) -> None:
    if n == 0:
        return
    if reason not in counts and len(counts) >= MAX_REASONS:
        reason = "other"
    counts[reason] = counts.get(reason, 0) + n


MAX_CLASSES: Final = 16
"""Exception classes that are counted by name."""
MAX_EXAMPLES: Final = 3
MAX_TEXT: Final = 300
"""Characters kept of a text."""
OTHER: Final = "env_error_other"
_CLASS = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)


class FailureBook:
    """One record per reason, the newest last. `carried`: the ledger before a restart, whose reasons are kept."""

    def __init__(self, carried: Ledger | None = None) -> None:
        dropped = carried.tokens.dropped if carried is not None else {}
        self._named = {reason for reason in dropped if reason.startswith("env_error_") and reason != OTHER}
        """Reasons that contain the name of a class."""
        self._by_reason: dict[str, RolloutFailures] = {}

    def record(self, actor: str, message: RolloutFailed) -> str:
        """Count a failure. Returns the reason under which its tokens are dropped."""
        reason = self._reason(message)
        cause = f"{message.error}: {message.detail}" if message.error else message.detail
        text = f"{actor}: {cause}"[:MAX_TEXT]
        former = self._by_reason.pop(reason, RolloutFailures(reason, 0, "", ()))
        examples = former.examples
        if text not in examples and len(examples) < MAX_EXAMPLES:
            examples = (*examples, text)
        self._by_reason[reason] = RolloutFailures(reason, former.n + 1, text, examples)
        return reason

    @property
    def records(self) -> tuple[RolloutFailures, ...]:
        return tuple(self._by_reason.values())

    def _reason(self, message: RolloutFailed) -> str:
        if message.reason != "env_error":
            return message.reason
        reason = f"env_error_{message.error}"
        if reason not in self._named:
            if len(self._named) >= MAX_CLASSES or not _CLASS.fullmatch(message.error):
                return OTHER
            self._named.add(reason)
        return reason
