"""One rollout: the calls of its episode, the limits of its ticket, and its segments. No I/O.

Its tokens are kept in a token graph, which for an environment of one conversation is a single path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stillhouse.actors.trajectory.graph import Call, Node, TokenGraph
from stillhouse.actors.trajectory.segments import Cut, SegmentCutter
from stillhouse.engines.base import Float32s, GenerationDelta, GenerationRequest, Int32s
from stillhouse.protocol.messages import Segment, Ticket, TurnReward
from stillhouse.protocol.payloads.expert_ids import encode_experts, why_unfit
from stillhouse.protocol.payloads.student_sets import encode_top_ids

FinishReason: TypeAlias = Literal["stop", "length", "env_done"]


class CutSegment(NamedTuple):
    """A Segment message and its frames: token ids int32 [n], log-probs float32 [n], loss mask uint8 [n], and the
    payloads of the student's likeliest tokens and of experts, if the ticket asks for them."""

    message: Segment
    arrays: tuple[npt.NDArray[np.generic], ...]
    n_before: int
    """Tokens before it on its path."""


class NoRoom(Exception):
    """The ticket's tokens or calls, or the context window, are used up; the message says which."""


@dataclass(slots=True)
class _Running:
    call: Call
    offset: int
    """Its first random number, of those of the rollout."""
    room: int
    """Most tokens that it may sample."""
    n: int = 0
    """Tokens sampled so far."""


class Rollout:
    """From the ticket to the final segment. Raises ValueError for `segment_tokens` below 1."""

    def __init__(
        self,
        ticket: Ticket,
        prompt_ids: Int32s,
        *,
        segment_tokens: int,
        max_context_tokens: int,
        max_calls: int,
    ) -> None:
        """`prompt_ids`: the ticket's."""
        self.ticket = ticket
        self.graph = TokenGraph()
        self.n_sampled = 0
        self._prompt_ids = prompt_ids
        self._max_context_tokens = max_context_tokens
        self._max_calls = max_calls
        self._cutter = SegmentCutter(self.graph, segment_tokens)
        self._running: dict[str, _Running] = {}
        """Calls that the engine works on, by request id."""
        self._calls: dict[int, Call] = {}
        """All calls, by the caller's number."""
        self._grown: dict[Node, None] = {}
        """Responses with tokens that no `take_segments` has seen."""
        self._held: dict[Node, None] = {}
        """Responses with tokens that may be in no segment."""
        self._sample_offset = 0
        """The next call's first random number. Calls that run at the same time must not draw the same ones."""
        self._drawn = 0
        """Random numbers up to here were drawn."""
        self._segments_cut = 0
        self._finish: tuple[FinishReason, float | None] | None = None
        self._turn_rewards: Mapping[int, float] = {}

    @property
    def budget_left(self) -> int:
        """Tokens that may still be sampled, those of the calls under way included."""
        return self.ticket.sampling.max_new_tokens - self.n_sampled

    def request(
        self,
        prompt_ids: Int32s,
        number: int,
        *,
        max_new_tokens: int | None,
        stop_token_ids: tuple[int, ...],
        retry: bool = False,
        choice_of: int | None = None,
    ) -> GenerationRequest:
        """Begin a call; `number` is the caller's own name for it. `retry`, `choice_of`: see TokenGraph.begin; a number
        of no call is none. Raises NoRoom, and ValueError for an empty prompt."""
        reserved = sum(running.room - running.n for running in self._running.values())
        budget = self.budget_left - reserved
        context = self._max_context_tokens - prompt_ids.size
        if len(self.graph.calls) >= self._max_calls:
            raise NoRoom(f"{self._max_calls} calls were made (max_turns)")
        if budget <= 0:
            limit = self.ticket.sampling.max_new_tokens
            raise NoRoom(
                f"of the rollout's {limit} tokens (max_new_tokens) {self.n_sampled} are used and {reserved} reserved "
                "by calls under way; calls at the same time need a max_new_tokens of their own"
            )
        if context <= 0:
            raise NoRoom(f"a prompt of {prompt_ids.size} tokens fills the context of {self._max_context_tokens}")
        wanted = budget if max_new_tokens is None else max(1, max_new_tokens)
        first = None if choice_of is None else self._calls.get(choice_of)
        call = self._calls[number] = self.graph.begin(prompt_ids, retry=retry, choice_of=first)
        room = min(budget, context, wanted)
        request_id = self.request_id(number)
        offset, self._sample_offset = self._sample_offset, self._sample_offset + room
        self._running[request_id] = _Running(call, offset, room)
        known = 1 if self.ticket.sampling.experts is None else self.graph.with_experts(call)
        return GenerationRequest(request_id, prompt_ids, self.ticket.sampling, room, stop_token_ids, offset, known)

    def request_id(self, number: int) -> str:
        return f"{self.ticket.rollout_id}/{number}"

    def append_delta(self, delta: GenerationDelta) -> tuple[Int32s, Float32s] | None:
        """Add what the engine wrote. The delta that ends a call frees the tokens that it did not use, and the whole
        response is returned: ids [n] and log-probs [n]. Raises ValueError for more tokens than were asked for, and for
        a malformed delta."""
        running = self._running[delta.request_id]
        if running.n + delta.token_ids.size > running.room:
            raise ValueError(
                f"request {delta.request_id}: the engine gave {running.n + delta.token_ids.size} tokens, expected at "
                f"most {running.room}"
            )
        reports_ids = self.ticket.sampling.reports_ids
        top_ids = (delta.top_ids or ()) if reports_ids else ()
        if reports_ids and len(top_ids) != delta.token_ids.size:
            raise ValueError(
                f"request {delta.request_id}: the engine reported the kept or likeliest tokens for {len(top_ids)} of "
                f"{delta.token_ids.size} tokens; expected all"
            )
        self._check_experts(delta)
        if delta.prompt_experts is not None:
            self.graph.add_experts(running.call, delta.prompt_experts)
        self.graph.extend(running.call, delta.token_ids, delta.logprobs, delta.spans, top_ids, delta.experts)
        if running.call.response is not None:
            self._grown[running.call.response] = self._held[running.call.response] = None
        self.n_sampled += int(delta.token_ids.size)
        running.n += int(delta.token_ids.size)
        if delta.finish_reason is None:
            return None
        self.end(delta.request_id, delivered=True)
        node = running.call.response
        return (
            np.array([] if node is None else node.ids, np.int32),
            np.array([] if node is None else node.logprobs, np.float32),
        )

    def _check_experts(self, delta: GenerationDelta) -> None:
        """Raises ValueError for choices that are not of the model's routers, or not as many as there are tokens."""
        running, shape = self._running[delta.request_id], self.ticket.sampling.experts
        n_prompt = sum(step.end for step in self.graph.path(running.call)) - running.n
        for what, rows, most in (
            ("", delta.experts, delta.token_ids.size),
            ("prompt ", delta.prompt_experts, n_prompt),
        ):
            if rows is None:
                continue
            wrong = "experts that were not asked for" if shape is None else why_unfit(rows, shape)
            if not wrong and (len(rows) > most or (len(rows) < most and not what)):
                wrong = f"experts of {len(rows)} {what}tokens; there are {most}"
            if wrong:
                raise ValueError(f"request {delta.request_id}: {wrong}")

    def end(self, request_id: str, *, delivered: bool) -> None:
        """End a call; an unknown one is ignored. `delivered`: the agent still waits for it."""
        running = self._running.pop(request_id, None)
        if running is not None:
            self.graph.end(running.call, delivered=delivered)
            self._drawn = max(self._drawn, running.offset + running.n)
            if not self._running:
                self._sample_offset = self._drawn

    def finish(
        self, reason: FinishReason, reward: float | None = None, turn_rewards: Mapping[int, float] | None = None
    ) -> None:
        """End the rollout, and the calls that still run. `turn_rewards`: parts of the reward by the numbers of the
        calls that they were given for. Raises ValueError if the student wrote nothing."""
        if not self.n_sampled:
            raise ValueError(f"rollout {self.ticket.rollout_id} ended without a token of the student's")
        for request_id in list(self._running):
            self.end(request_id, delivered=False)
        self._finish, self._turn_rewards = (reason, reward), turn_rewards or {}

    def take_segments(self) -> list[CutSegment]:
        """Complete segments that were not taken before, oldest first; after `finish`, the rest."""
        if self._finish is not None:
            rest = self._cutter.take_rest()
            return [self._segment(cut, final=cut is rest[-1]) for cut in rest]
        grown, self._grown = self._grown, {}
        return [self._segment(cut, final=False) for node in grown for cut in self._cutter.take(node)]

    def take_early(self) -> list[CutSegment]:
        """All that the student wrote before this moment, but for the newest token of each response. Not after
        `finish`."""
        held, self._held = self._held, {}
        self._grown.clear()
        return [self._segment(cut, final=False) for node in held for cut in self._cutter.take_early(node)]

    def _segment(self, cut: Cut, *, final: bool) -> CutSegment:
        index, self._segments_cut = self._segments_cut, self._segments_cut + 1
        reason, reward = self._finish or (None, None)
        payload, experts = self._likeliest(cut), self._experts(cut)
        message = Segment(
            rollout_id=self.ticket.rollout_id,
            index=index,
            start=cut.start,
            end=cut.end,
            spans=cut.spans,
            final=final,
            finish_reason=reason if final else None,
            reward=reward if final else None,
            n_turns=max(1, sum(call.response is not None for call in self.graph.calls)),
            own_prompt_tokens=self._own_prompt_tokens(cut) if index == 0 else 0,
            follows=None if cut.follows == cut.start else cut.follows,
            dropped=self._cutter.dropped() if final else (),
            turn_rewards=self._rewards_on_the_row() if final else (),
            top_ids=bool(payload),
            experts=bool(experts),
        )
        return CutSegment(message, (cut.token_ids, cut.logprobs, cut.loss_mask, *payload, *experts), cut.n_before)

    def _experts(self, cut: Cut) -> tuple[npt.NDArray[np.uint8], ...]:
        """The last frame of a segment, if the engine reported any of its experts."""
        shape = self.ticket.sampling.experts
        if shape is None or not cut.experts:
            return ()
        return (np.frombuffer(encode_experts(cut.experts, len(cut.token_ids), shape), np.uint8),)

    def _likeliest(self, cut: Cut) -> tuple[npt.NDArray[np.uint8], ...]:
        """The fourth frame of a segment, if it has one."""
        sampled = np.flatnonzero(cut.loss_mask)
        if not self.ticket.sampling.reports_ids or not len(sampled):
            return ()
        tokens = range(int(sampled[0]), int(sampled[-1]) + 1)
        sets = [cut.top_ids[at] if at in cut.top_ids else cut.token_ids[at : at + 1] for at in tokens]
        return (np.frombuffer(encode_top_ids(sets), np.uint8),)

    def _rewards_on_the_row(self) -> tuple[TurnReward, ...]:
        """Without those of responses that are not trained: they count in the rollout's reward alone."""
        dropped, found = self.graph.dropped(), dict[int, float]()
        for number, reward in self._turn_rewards.items():
            call = self._calls.get(number)
            node = None if call is None else call.response
            end = None if node is None or node in dropped else self._cutter.end_of(node)
            if end is not None:
                found[end] = found.get(end, 0.0) + reward
        return tuple(TurnReward(end, found[end]) for end in sorted(found))

    def _own_prompt_tokens(self, cut: Cut) -> int:
        """0 if the first segment begins with the ticket's prompt."""
        n = self._prompt_ids.size
        if np.array_equal(cut.token_ids[:n], self._prompt_ids) and not cut.loss_mask[:n].any():
            return 0
        return int(cut.loss_mask.argmax()) if cut.loss_mask.any() else cut.token_ids.size
