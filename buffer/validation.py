"""Checks on segments, teachers' scores and tasks before they are accepted.

Each check returns the first thing that is wrong, or None. Legend: N = tokens of the segment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.ledger import RejectReason
from stillhouse.buffer.rollouts import HeldSegment, RolloutState
from stillhouse.buffer.tokens import Array
from stillhouse.buffer.versions import VersionTable
from stillhouse.protocol.errors import MalformedMessage
from stillhouse.protocol.messages import MAX_ROW_BYTES, Task
from stillhouse.protocol.messages import Segment as SegmentMessage
from stillhouse.protocol.payloads import expert_ids
from stillhouse.protocol.payloads.registry import kind_of_bytes
from stillhouse.protocol.payloads.student_sets import HEADER_BYTES, check_top_ids, read_kept, without_sampled

LOGPROB_TOLERANCE = 1e-3
"""A log-prob may exceed 0 by this much (rounding of a near-certain token). A larger number is not a log-prob."""

LOGPROB_ABSURD = 1e4
"""A number further than this from 0 is broken, not a log-prob. It would make the loss infinite."""


def frames_of(message: SegmentMessage, arrays: Sequence[Array]) -> tuple[Sequence[Array], ...]:
    """A segment's frames: token ids, log-probs and loss mask; sets of ids, if it has them; experts, if it has them."""
    end = len(arrays) - message.experts
    return arrays[:3], arrays[3:end], arrays[end:]


class SegmentChecker:
    """Checks segments. `vocab_size` None: only negative token ids are refused."""

    def __init__(self, config: BufferConfig, versions: VersionTable, vocab_size: int | None) -> None:
        self._config = config
        self._versions = versions
        self._vocab_size = vocab_size

    def refusal(self, rollout: RolloutState, message: SegmentMessage, arrays: Sequence[Array]) -> RejectReason | None:
        """Check the rollout's next segment."""
        n = message.end - message.start
        if message.start != rollout.length:
            return RejectReason.OFFSET_GAP
        if not _branches_inside(rollout, message):
            return RejectReason.BAD_BRANCH
        if not _rewards_make_sense(message):
            return RejectReason.BAD_REWARD
        if n < 0 or not has_shapes(arrays[:3], n, (np.int32, np.float32, np.uint8)):
            return RejectReason.LENGTH_MISMATCH
        if n == 0:
            if not message.final:
                return RejectReason.EMPTY_SEGMENT
            if message.experts:
                return RejectReason.EXPERTS_MALFORMED
            return RejectReason.BAD_SPANS if message.spans else self._prompt_refusal(rollout, message, arrays)
        if n > self._config.max_segment_tokens:
            return RejectReason.SEGMENT_TOO_LONG
        if message.end > self._config.max_rollout_tokens:
            return RejectReason.ROLLOUT_TOO_LONG
        (ids_N, logprobs_N, loss_mask_N), top_ids, experts = frames_of(message, arrays)
        if not ids_in_range(ids_N, self._vocab_size):
            return RejectReason.TOKEN_ID_OUT_OF_RANGE
        if loss_mask_N.max() > 1:
            return RejectReason.BAD_MASK
        if message.follows == 0 and loss_mask_N[0]:
            return RejectReason.BAD_MASK
        return (
            self._prompt_refusal(rollout, message, arrays)
            or _logprob_refusal(logprobs_N, loss_mask_N)
            or self._span_refusal(message, loss_mask_N)
            or self._top_ids_refusal(rollout, ids_N, loss_mask_N, top_ids)
            or self._experts_refusal(rollout, n, experts)
        )

    def _experts_refusal(self, rollout: RolloutState, n: int, payloads: Sequence[Array]) -> RejectReason | None:
        """Check all of it: the learner can use the ids or fail."""
        shape = rollout.ticket.sampling.experts
        for payload in payloads:
            if shape is None:
                return RejectReason.EXPERTS_UNASKED
            if len(payload) > HEADER_BYTES + n * self._config.max_top_k_bytes:
                return RejectReason.EXPERTS_SIZE
            try:
                expert_ids.decode_experts(payload.tobytes(), n, shape)
            except MalformedMessage:
                return RejectReason.EXPERTS_MALFORMED
        return None

    def _top_ids_refusal(
        self, rollout: RolloutState, ids_N: Array, loss_mask_N: Array, payloads: Sequence[Array]
    ) -> RejectReason | None:
        """Check the student's likeliest tokens: their number of positions, not the ids, which the teachers read. Of
        kept tokens also the ids: no teacher would notice a wrong one."""
        sampled, sampling = np.flatnonzero(loss_mask_N), rollout.ticket.sampling
        if len(payloads) != (1 if sampling.reports_ids and len(sampled) else 0):
            return RejectReason.TOP_IDS_MISSING
        for payload in payloads:
            n = int(sampled[-1]) + 1 - int(sampled[0])
            if len(payload) > HEADER_BYTES + n * self._config.max_top_k_bytes:
                return RejectReason.TOP_IDS_SIZE
            try:
                if sampling.kept:
                    ids_S, counts_T = read_kept(payload.tobytes(), self._vocab_size)
                    tokens_T = ids_N[sampled[0] : sampled[-1] + 1]
                    fits = len(counts_T) == n and not without_sampled(ids_S, counts_T, tokens_T)
                else:
                    fits = check_top_ids(payload.tobytes()) == n
            except MalformedMessage:
                fits = False
            if not fits:
                return RejectReason.TOP_IDS_MALFORMED
        return None

    def _prompt_refusal(
        self, rollout: RolloutState, message: SegmentMessage, arrays: Sequence[Array]
    ) -> RejectReason | None:
        n_own, task = message.own_prompt_tokens, rollout.slot.task
        if message.index != 0:
            if n_own:
                return RejectReason.OWN_PROMPT
            if message.follows is not None and task.teacher_prompt_T is not None:
                return None if rollout.continues_prompt(message.follows) else RejectReason.OWN_PROMPT_PRIVILEGED
            return None
        ids_N, _, loss_mask_N = arrays[:3]
        if not 0 <= n_own <= len(ids_N):
            return RejectReason.OWN_PROMPT
        if n_own and task.teacher_prompt_T is not None:
            return RejectReason.OWN_PROMPT_PRIVILEGED
        if not n_own and not np.array_equal(ids_N[: len(task.prompt_T)], task.prompt_T):
            return RejectReason.PROMPT_MISMATCH
        if loss_mask_N[: n_own or len(task.prompt_T)].any():
            return RejectReason.BAD_MASK
        return None

    def _span_refusal(self, message: SegmentMessage, loss_mask_N: Array) -> RejectReason | None:
        """Check that spans are sorted, disjoint and inside the segment, and contain every sampled token."""
        at = message.start
        covered = 0
        for span in message.spans:
            if span.start < at or span.end <= span.start or span.end > message.end:
                return RejectReason.BAD_SPANS
            refusal = self._versions.refusal(span.version)
            if refusal is not None:
                return refusal
            covered += int(np.count_nonzero(loss_mask_N[span.start - message.start : span.end - message.start]))
            at = span.end
        if covered != int(np.count_nonzero(loss_mask_N)):
            return RejectReason.BAD_SPANS
        return None


def _branches_inside(rollout: RolloutState, message: SegmentMessage) -> bool:
    """The segment follows a token that exists, and names tokens that exist as dropped."""
    follows, dropped = message.follows, message.dropped
    edges = [0, *(edge for one in dropped for edge in (one.start, one.end)), message.end]
    return (follows is None or 0 <= follows < rollout.length) and (
        not dropped or (message.final and edges == sorted(edges) and all(one.start < one.end for one in dropped))
    )


def _rewards_make_sense(message: SegmentMessage) -> bool:
    rewards, parts = message.reward, message.turn_rewards
    if rewards is None:
        return not parts
    ends = [0, *(one.end for one in parts)]
    return (
        message.final
        and all(math.isfinite(one) for one in (rewards, *(part.reward for part in parts)))
        and all(a < b for a, b in pairwise(ends))
        and ends[-1] <= message.end
    )


def score_refusal(segment: HeldSegment, sampled_N: Array, scores_N: Array) -> RejectReason | None:
    """Check a teacher's log-probs of the segment's tokens."""
    n = segment.end - segment.start
    if not has_shapes((scores_N,), n, (np.float32,)):
        return RejectReason.SCORE_LENGTH
    refusal = _logprob_refusal(scores_N, sampled_N)
    return None if refusal is None else _SCORE_REASONS[refusal]


def top_k_refusal(segment: HeldSegment, payload: bytes, max_bytes: int) -> RejectReason | None:
    """Check a payload for the segment's top-k range, of at most `max_bytes` per token. Its contents are left to the
    learner, which reads them."""
    n, kind = segment.top_end - segment.top_start, kind_of_bytes(payload)
    if len(payload) > kind.header_bytes + n * max_bytes:
        return RejectReason.TOP_K_SIZE
    try:
        fits = kind.n_tokens(payload) == n
    except MalformedMessage:
        fits = False
    return None if fits else RejectReason.TOP_K_MALFORMED


def task_fault(task: Task, prompts_T: Array, vocab_size: int | None) -> tuple[str, str] | None:
    """Check an offered task. Returns (got, expected) if something is wrong. `prompts_T`: its frame, the student's
    prompt and perhaps the teachers'."""
    if not 0 <= task.teacher_prompt_tokens < max(1, len(prompts_T)):
        return (
            f"teacher_prompt_tokens {task.teacher_prompt_tokens} of {len(prompts_T)}",
            "0, or fewer than the frame has: the student's prompt comes before them",
        )
    if prompts_T.ndim != 1 or prompts_T.dtype != np.int32 or len(prompts_T) == 0:
        return f"prompt of dtype {prompts_T.dtype} and shape {prompts_T.shape}", "int32 [n_prompt], not empty"
    # The teachers' prompt may be in another vocabulary; they check it.
    of_student_T = prompts_T[: len(prompts_T) - task.teacher_prompt_tokens]
    if not ids_in_range(of_student_T, vocab_size) or not ids_in_range(prompts_T, None):
        return (
            f"prompt ids from {prompts_T.min()} to {prompts_T.max()}",
            f"0 up to {'any' if vocab_size is None else vocab_size - 1}",
        )
    if len(task.row) > MAX_ROW_BYTES:
        return f"a row of {len(task.row)} bytes", f"{MAX_ROW_BYTES} or fewer"
    if task.group_size < 1:
        return f"group_size {task.group_size}", "1 or more"
    if task.sampling.max_new_tokens < 1:
        return f"max_new_tokens {task.sampling.max_new_tokens}", "1 or more"
    if len(set(task.teachers)) != len(task.teachers):
        return f"teachers {task.teachers}", "each pool once"
    return None


def has_shapes(arrays: Sequence[Array], n: int, dtypes: Sequence[type]) -> bool:
    """Return True for one array [n] of each dtype."""
    if len(arrays) != len(dtypes):
        return False
    return all(a.shape == (n,) and a.dtype == dtype for a, dtype in zip(arrays, dtypes, strict=True))


def ids_in_range(ids_N: Array, vocab_size: int | None) -> bool:
    """Return True if all ids are valid. `ids_N` must not be empty."""
    return int(ids_N.min()) >= 0 and (vocab_size is None or int(ids_N.max()) < vocab_size)


def _logprob_refusal(logprobs_N: Array, sampled_N: Array) -> RejectReason | None:
    """Check that log-probs are finite and of a sensible size everywhere (NaN times a mask of 0 is still NaN), and not
    above 0 where sampled.

    The maximum finds NaN and +inf, the minimum finds -inf: two passes without a temporary array in the normal case."""
    if len(logprobs_N) == 0:
        return None
    highest, lowest = float(logprobs_N.max()), float(logprobs_N.min())
    if math.isnan(highest):
        return RejectReason.NAN_LOGPROB
    if highest == np.inf or lowest == -np.inf:
        return RejectReason.INF_LOGPROB
    if max(highest, -lowest) > LOGPROB_ABSURD:
        return RejectReason.ABSURD_LOGPROB
    if highest > LOGPROB_TOLERANCE and (logprobs_N[sampled_N.astype(bool)] > LOGPROB_TOLERANCE).any():
        return RejectReason.POSITIVE_LOGPROB
    return None


_SCORE_REASONS = {
    RejectReason.NAN_LOGPROB: RejectReason.NAN_SCORE,
    RejectReason.INF_LOGPROB: RejectReason.INF_SCORE,
    RejectReason.POSITIVE_LOGPROB: RejectReason.POSITIVE_SCORE,
    RejectReason.ABSURD_LOGPROB: RejectReason.ABSURD_SCORE,
}
