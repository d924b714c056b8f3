"""One rollout's tokens in order: the author and weight version of each, and what was sent. No I/O.

    prompt | (environment) | sampled, sampled, .. | environment | sampled .. | finish

`append_sampled` takes an engine's deltas, `append_environment` an environment's tokens; `take_segments` returns what is
long enough to send, and after `finish` the rest. The loss mask records provenance: 1 for tokens from `append_sampled`,
0 for all others.

Shapes: n = tokens of the item at hand. Offsets are absolute within the rollout, half-open.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from engines.base import Float32s, GenerationDelta, GenerationRequest, Int32s
from protocol.messages import Segment, Ticket, VersionSpan

FinishReason: TypeAlias = Literal["stop", "length", "env_done", "env_error", "aborted"]


class CutSegment(NamedTuple):
    """A Segment message and its frames: token ids int32 [n], log-probs float32 [n], loss mask uint8 [n]."""

    message: Segment
    arrays: tuple[Int32s, Float32s, npt.NDArray[np.uint8]]


class Rollout:
    """One rollout, from its ticket to its final segment.

    A segment holds at most `segment_tokens` tokens; the first one also holds the whole prompt. `max_context_tokens` is
    the engine's context window. Raises ValueError for an empty prompt, or a bound below 1."""

    def __init__(self, ticket: Ticket, prompt_ids: Int32s, *, segment_tokens: int, max_context_tokens: int) -> None:
        if prompt_ids.ndim != 1 or prompt_ids.size == 0:
            raise ValueError(f"rollout {ticket.rollout_id}: prompt of shape {prompt_ids.shape}, expected [n], n >= 1")
        if segment_tokens < 1 or max_context_tokens < 1:
            raise ValueError(
                f"segment_tokens and max_context_tokens must be at least 1, got {segment_tokens}, {max_context_tokens}"
            )
        self.ticket = ticket
        self.n_prompt = int(prompt_ids.size)
        self.n_sampled = 0
        self.n_turns = 0
        """Runs of sampled tokens, separated by the environment."""
        self.finish_reason: FinishReason | None = None
        self._reward: float | None = None
        self._segment_tokens = segment_tokens
        self._max_context_tokens = max_context_tokens
        self._ids = array("i")
        self._logprobs = array("f")
        self._mask = bytearray()
        self._spans: deque[VersionSpan] = deque()  # of tokens not yet cut, sorted, disjoint
        self._turn_start: int | None = None
        self._cut_end = 0
        self._segments_cut = 0
        self._own_prompt = False
        self._append(prompt_ids, np.zeros(self.n_prompt, dtype=np.float32), sampled=False)

    def __len__(self) -> int:
        """Tokens so far, prompt included."""
        return len(self._ids)

    def __repr__(self) -> str:
        return (
            f"<Rollout {self.ticket.rollout_id}: {self.n_prompt} prompt + {len(self) - self.n_prompt} tokens, "
            f"{self.n_sampled} sampled in {self.n_turns} turns, {self._segments_cut} segments cut, "
            f"finish_reason={self.finish_reason}>"
        )

    @property
    def token_ids(self) -> Int32s:
        """[n] All tokens so far (a copy): what the student reads next."""
        return np.array(self._ids, dtype=np.int32)

    @property
    def turn_ids(self) -> Int32s:
        """[n] Tokens of the turn being sampled, or of the one just ended (a copy)."""
        start = len(self) if self._turn_start is None else self._turn_start
        return np.array(self._ids[start:], dtype=np.int32)

    @property
    def budget_left(self) -> int:
        """Tokens that may still be sampled, all turns together."""
        return self.ticket.sampling.max_new_tokens - self.n_sampled

    @property
    def context_left(self) -> int:
        """Tokens that still fit into the context window; below 0 when the prompt alone does not fit."""
        return self._max_context_tokens - len(self)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def replace_prompt(self, prompt_ids: Int32s) -> None:
        """Begin with a prompt [n] of the environment's instead of the ticket's. Raises ValueError for an empty one, and
        RuntimeError when something follows the prompt already."""
        if prompt_ids.size == 0:
            raise ValueError(f"{self!r}: got an empty prompt, expected token ids [n], n >= 1")
        if len(self) > self.n_prompt or self.finished:
            raise RuntimeError(f"{self!r}: a prompt can only be replaced before anything follows it")
        if np.array_equal(prompt_ids, self.token_ids):
            return
        self._own_prompt, self.n_prompt = True, int(prompt_ids.size)
        del self._ids[:], self._logprobs[:], self._mask[:]
        self._append(prompt_ids, np.zeros(self.n_prompt, dtype=np.float32), sampled=False)

    def next_request(self, stop_token_ids: Sequence[int]) -> GenerationRequest:
        """The request to continue from here. Raises RuntimeError when nothing more may be sampled."""
        room = min(self.budget_left, self.context_left)
        if self.finished or room <= 0:
            raise RuntimeError(f"{self!r} cannot go on: {self.budget_left} of budget, {self.context_left} of context")
        return GenerationRequest(
            request_id=f"{self.ticket.rollout_id}/{self.n_turns}",
            prompt_ids=self.token_ids,
            sampling=self.ticket.sampling,
            max_new_tokens=room,
            stop_token_ids=tuple(stop_token_ids),
            sample_offset=self.n_sampled,
        )

    def append_delta(self, delta: GenerationDelta) -> None:
        """Append an engine's delta; one without tokens adds nothing."""
        if delta.token_ids.size:
            self.append_sampled(delta.token_ids, delta.logprobs, delta.spans)

    def append_sampled(self, token_ids: Int32s, logprobs: Float32s, spans: Sequence[VersionSpan]) -> None:
        """Add tokens that the student wrote. `spans` are relative to the first of them and cover [0, n) in order.

        Raises ValueError for arrays of different lengths, spans that do not cover them, or more tokens than the budget;
        RuntimeError after `finish`. On an error nothing is added."""
        n = int(token_ids.size)
        if token_ids.shape != (n,) or logprobs.shape != (n,) or n == 0:
            raise ValueError(
                f"{self!r}: token ids of shape {token_ids.shape} with log-probs of shape {logprobs.shape}, "
                "expected [n] both, n >= 1"
            )
        if n > self.budget_left:
            raise ValueError(f"{self!r}: {n} more sampled tokens, expected at most {self.budget_left}")
        edges = [0, *(span.end for span in spans)]
        if edges[-1] != n or any(s.start != e or s.end <= s.start for s, e in zip(spans, edges, strict=False)):
            raise ValueError(f"{self!r}: version spans {spans} do not cover tokens 0..{n} in order")
        start = len(self)
        self._append(token_ids, logprobs, sampled=True)
        for span in spans:
            self._add_span(VersionSpan(span.version, start + span.start, start + span.end))
        if self._turn_start is None:
            self._turn_start = start
            self.n_turns += 1
        self.n_sampled += n

    def append_environment(self, token_ids: Int32s) -> None:
        """Add tokens [n] of the environment; n = 0 only ends the student's turn. Raises RuntimeError after `finish`."""
        self._append(token_ids, np.zeros(token_ids.size, dtype=np.float32), sampled=False)
        self._turn_start = None

    def finish(self, reason: FinishReason, reward: float | None = None) -> None:
        """End the rollout; `take_segments` then returns the final segment. Raises RuntimeError the second time."""
        if self.finished:
            raise RuntimeError(f"{self!r} is finished already, got {reason!r}")
        self.finish_reason = reason
        self._reward = reward

    def take_segments(self) -> list[CutSegment]:
        """Complete segments that were not taken before, oldest first.

        While the rollout runs, its newest token is held back, so that the final segment always has one."""
        cuts: list[CutSegment] = []
        while (end := self._next_cut()) is not None:
            cuts.append(self._cut(end))
        return cuts

    def _next_cut(self) -> int | None:
        """End of the next segment, or None when it has to wait."""
        full = max(self._cut_end, self.n_prompt) + self._segment_tokens
        if len(self) > full:
            return full
        return len(self) if self.finished and self._cut_end < len(self) else None

    def _cut(self, end: int) -> CutSegment:
        start, self._cut_end = self._cut_end, end
        final = self.finished and end == len(self)
        message = Segment(
            rollout_id=self.ticket.rollout_id,
            index=self._segments_cut,
            start=start,
            end=end,
            spans=self._take_spans(end),
            final=final,
            finish_reason=self.finish_reason if final else None,
            reward=self._reward if final else None,
            n_turns=max(1, self.n_turns),
            own_prompt_tokens=self.n_prompt if self._own_prompt and self._segments_cut == 0 else 0,
        )
        self._segments_cut += 1
        arrays = (
            np.array(self._ids[start:end], dtype=np.int32),
            np.array(self._logprobs[start:end], dtype=np.float32),
            np.frombuffer(bytes(self._mask[start:end]), dtype=np.uint8),
        )
        return CutSegment(message, arrays)

    def _take_spans(self, end: int) -> tuple[VersionSpan, ...]:
        """Remove and return the spans before `end`; one that reaches over it is split."""
        taken: list[VersionSpan] = []
        while self._spans and self._spans[0].start < end:
            span = self._spans.popleft()
            taken.append(VersionSpan(span.version, span.start, min(span.end, end)))
            if span.end > end:
                self._spans.appendleft(VersionSpan(span.version, end, span.end))
        return tuple(taken)

    def _add_span(self, span: VersionSpan) -> None:
        """Append, merging with an adjacent span of the same version."""
        if self._spans and self._spans[-1].version == span.version and self._spans[-1].end == span.start:
            span = VersionSpan(span.version, self._spans.pop().start, span.end)
        self._spans.append(span)

    def _append(self, token_ids: Int32s, logprobs: Float32s, *, sampled: bool) -> None:
        if self.finished:
            raise RuntimeError(f"{self!r} is finished, got {token_ids.size} more tokens")
        self._ids.frombytes(np.ascontiguousarray(token_ids, dtype=np.int32).tobytes())
        self._logprobs.frombytes(np.ascontiguousarray(logprobs, dtype=np.float32).tobytes())
        self._mask.extend(bytes([sampled]) * int(token_ids.size))
