"""Simulated actors, teachers and the learner of bench/scale.py: state machines without I/O, threads or a clock.

    take(now_s, message, arrays)   a message of the buffer came
    advance(now_s)                 do everything that is due by now
    due_s                          when something is due next

They say to the buffer, through `send`, what the real workers say: the same messages in the same order, with frames of
the same sizes. What they put into the frames is worthless: no model runs.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from bench.scale_count import TokenCount
from bench.scale_settings import Scenario
from stillhouse.engines.config import ScorerSettings
from stillhouse.protocol import messages as m
from stillhouse.protocol.messages import Message, WeightVersion
from stillhouse.teachers.config import CREDIT_BATCHES

Array: TypeAlias = npt.NDArray[Any]
Send: TypeAlias = Callable[[Message, Sequence[Array]], None]

FIRST: Final = WeightVersion(0, 0)
CREDIT_REPEAT_S: Final = 2.0


@dataclass(slots=True, eq=False)
class Response:
    """One response that an actor writes, a token every `token_s`."""

    ticket: m.Ticket
    prompt: Array
    n_tokens: int
    began_s: float
    n_sent: int = 0
    """Sampled tokens in segments that left."""
    n_segments: int = 0
    until: int = 0
    """Last token of the segment that is being written."""


class Actor:
    """An actor with full or empty slots."""

    def __init__(self, scenario: Scenario, send: Send) -> None:
        self._scenario = scenario
        self._send = send
        self._waiting: deque[tuple[m.Ticket, Array]] = deque()
        self._running: dict[str, Response] = {}
        self._events: list[tuple[float, str, int]] = []
        """(when, rollout, token): a segment up to this token is complete. Out of date where it was sent earlier."""
        self._swapped_s: list[float] = [-math.inf]
        self._versions: list[WeightVersion] = [FIRST]
        self._received_total = 0
        self._credit_seq = 0
        self._busy_since_s = 0.0
        self.busy_slot_s = 0.0
        """Seconds that slots were full, summed over slots."""
        self.late_s = 0.0
        """Longest time by which something was done too late."""
        self._sent: dict[tuple[str, int], int] = {}
        """Sampled tokens of each segment that was sent and not refused."""

    @property
    def tokens_sent(self) -> int:
        """Sampled tokens in segments, without those that were refused because the run was over."""
        return sum(self._sent.values())

    @property
    def due_s(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def start(self, now_s: float) -> None:
        self._busy_since_s = now_s
        self._send_credit()

    def take(self, now_s: float, message: Message, arrays: Sequence[Array]) -> None:
        match message:
            case m.Tickets():
                self._received_total += len(message.tickets)
                self._waiting += zip(message.tickets, arrays, strict=True)
                self._start_ready(now_s)
            case m.SegmentsWanted():
                self._send_held(now_s)
            case m.SegmentAck(reason="run_over"):
                self._sent.pop((message.rollout_id, message.index), None)
            case m.CancelRollout(reason="run_ended"):
                pass
            case m.SegmentAck(status="rejected") | m.CancelRollout():
                raise RuntimeError(f"the buffer refused what a simulated actor wrote: {message}")
            case _:
                pass

    def weights(self, now_s: float, version: WeightVersion) -> None:
        """The engine samples with `version` from now on."""
        self._swapped_s.append(now_s)
        self._versions.append(version)
        self._start_ready(now_s)

    def advance(self, now_s: float) -> None:
        finished = False
        while self._events and self._events[0][0] <= now_s:
            at_s, rollout_id, until = heapq.heappop(self._events)
            response = self._running.get(rollout_id)
            if response is None or until != response.until:
                continue
            self.late_s = max(self.late_s, now_s - at_s)
            self._send_segment(response, until)
            if response.n_sent < response.n_tokens:
                self._schedule(response)
                continue
            self._account(at_s)
            del self._running[rollout_id]
            self._start_ready(at_s)
            finished = True
        if finished:
            self._send_credit()

    def settle_clock(self, now_s: float) -> None:
        """Count the time of full slots up to now."""
        self._account(now_s)

    # ----------------------------------------------------------------------------------------------- internals

    def _account(self, now_s: float) -> None:
        self.busy_slot_s += len(self._running) * max(0.0, now_s - self._busy_since_s)
        self._busy_since_s = max(self._busy_since_s, now_s)

    def _start_ready(self, now_s: float) -> None:
        self._account(now_s)
        while self._waiting and len(self._running) < self._scenario.slots:
            ticket, prompt = self._waiting[0]
            if ticket.min_version > self._versions[-1]:
                return
            self._waiting.popleft()
            response = Response(ticket, prompt, self._scenario.length(ticket.sampling.seed), now_s)
            self._running[ticket.rollout_id] = response
            self._schedule(response)

    def _schedule(self, response: Response) -> None:
        whole = response.n_sent // self._scenario.segment_tokens + 1
        until = response.until = min(response.n_tokens, whole * self._scenario.segment_tokens)
        at_s = response.began_s + until * self._scenario.token_s
        heapq.heappush(self._events, (at_s, response.ticket.rollout_id, until))

    def _send_held(self, now_s: float) -> None:
        """What is sampled of each response, but for its newest token."""
        for response in self._running.values():
            until = min(response.until, int((now_s - response.began_s) / self._scenario.token_s)) - 1
            if until > response.n_sent:
                self._send_segment(response, until)
                self._schedule(response)

    def _send_segment(self, response: Response, until: int) -> None:
        """The tokens up to `until`."""
        n_new = until - response.n_sent
        prompt = response.prompt if response.n_segments == 0 else response.prompt[:0]
        n = len(prompt) + n_new
        start = len(response.prompt) - len(prompt) + response.n_sent
        final = until == response.n_tokens
        mask = np.ones(n, np.uint8)
        mask[: len(prompt)] = 0
        segment = m.Segment(
            response.ticket.rollout_id,
            response.n_segments,
            start,
            start + n,
            self._spans(response, until),
            final,
            "stop" if final else None,
            0.0 if final else None,
        )
        ids = np.concatenate([prompt, np.arange(n_new, dtype=np.int32)])
        self._send(segment, (ids, np.where(mask, -0.5, 0.0).astype(np.float32), mask))
        self._sent[segment.rollout_id, segment.index] = n_new
        response.n_sent = until
        response.n_segments += 1

    def _spans(self, response: Response, until: int) -> tuple[m.VersionSpan, ...]:
        """Versions of the sampled tokens [n_sent, until)."""
        spans: list[m.VersionSpan] = []
        at, n_prompt = response.n_sent, len(response.prompt)
        place = bisect_right(self._swapped_s, response.began_s + at * self._scenario.token_s) - 1
        while at < until:
            end = until
            if place + 1 < len(self._swapped_s):
                swap_s = self._swapped_s[place + 1]
                end = min(until, max(at, math.ceil((swap_s - response.began_s) / self._scenario.token_s)))
            if end > at:
                spans.append(m.VersionSpan(self._versions[place], n_prompt + at, n_prompt + end))
            at = end
            place += 1
        return tuple(spans)

    def _send_credit(self) -> None:
        self._credit_seq += 1
        free = max(0, self._scenario.slots - len(self._running) - len(self._waiting))
        self._send(m.TicketCredit(free, self._credit_seq, self._received_total), ())


class Teacher:
    """A teacher with a prefix cache, that scores packed batches one after the other."""

    def __init__(self, scenario: Scenario, send: Send) -> None:
        self._scenario = scenario
        self._send = send
        self._batch_tokens = ScorerSettings().max_batch_tokens
        self._held: deque[m.ScoreItem] = deque()
        self._held_tokens = 0
        self._batch: list[m.ScoreItem] = []
        self._received_total = 0
        self._credit_seq = 0
        self.due_s = math.inf
        self.busy_s = 0.0
        self.late_s = 0.0

    def start(self, now_s: float) -> None:
        self._send_credit()

    def take(self, now_s: float, message: Message, arrays: Sequence[Array]) -> None:
        if isinstance(message, m.ScoreWork):
            self._held += message.items
            self._held_tokens += sum(item.new_tokens for item in message.items)
            self._received_total += len(message.items)
            if not self._batch:
                self._begin(now_s)

    def advance(self, now_s: float) -> None:
        while self.due_s <= now_s:
            at_s = self.due_s
            self.late_s = max(self.late_s, now_s - at_s)
            self._answer()
            self._begin(at_s)
            self._send_credit()

    # ----------------------------------------------------------------------------------------------- internals

    def _begin(self, now_s: float) -> None:
        self._batch, tokens = [], 0
        while self._held and (not self._batch or tokens + self._held[0].new_tokens <= self._batch_tokens):
            item = self._held.popleft()
            self._batch.append(item)
            tokens += item.new_tokens
        self._held_tokens -= tokens
        self.busy_s += tokens / self._scenario.teacher_per_s
        self.due_s = now_s + tokens / self._scenario.teacher_per_s if self._batch else math.inf

    def _answer(self) -> None:
        frames: list[Array] = []
        for item in self._batch:
            scores = np.full(item.end - item.start, -0.25, np.float32)
            scores[: item.first - item.start] = 0.0
            frames.append(scores)
            if self._scenario.top_k_bytes:
                frames.append(np.zeros((item.top_end - item.top_start) * self._scenario.top_k_bytes, np.uint8))
        leases = tuple(item.lease_id for item in self._batch)
        self._send(m.Scores(leases, top_k=bool(self._scenario.top_k_bytes)), frames)

    def _send_credit(self) -> None:
        self._credit_seq += 1
        room = self._batch_tokens * CREDIT_BATCHES - self._held_tokens
        self._send(m.ScoreCredit(max(0, room), self._credit_seq, self._received_total), ())


class Learner:
    """The learner: it asks for the next batch while it trains one, and publishes one version after the other."""

    def __init__(self, scenario: Scenario, send: Send, publish: Callable[[float, WeightVersion], None]) -> None:
        """`publish(at_s, version)`: from `at_s` on the actors sample with `version`."""
        self._scenario = scenario
        self._send = send
        self._publish = publish
        self._version = FIRST
        self._ready: dict[int, tuple[m.Batch, Sequence[Array]]] = {}
        self._training: m.Batch | None = None
        self._trained_s = math.inf
        self._published_s = math.inf
        self._sending = FIRST
        self._next_task = 0
        self._waits_since_s = 0.0
        self._some_since_s = math.inf
        """Since when a part of the shards has sent its share of the next batch."""
        self.count = TokenCount(scenario.max_staleness, scenario.shards)
        self.done = False
        self.final: m.Snapshot | None = None
        self.late_s = 0.0

    @property
    def due_s(self) -> float:
        return min(self._trained_s, self._published_s)

    @property
    def steps(self) -> int:
        return self._version.step

    def look(self, now_s: float, *, some_are_here: bool) -> None:
        """`some_are_here`: a part of the shards has sent its share of the next batch, the others have not."""
        if some_are_here:
            self._some_since_s = min(self._some_since_s, now_s)

    def start(self, now_s: float) -> None:
        self._waits_since_s = now_s
        self._send(m.LearnerStarted(FIRST, FIRST), ())
        self._send(m.VersionPublished(FIRST), ())
        self._offer(1)
        self._send(m.BatchWanted(FIRST), ())

    def take(self, now_s: float, message: Message, arrays: Sequence[Array]) -> None:
        match message:
            case m.TasksAck(tasks_wanted=wanted):
                self._offer(wanted)
            case m.Batch():
                self._ready[message.version.step] = message, arrays
                self._begin(now_s)
            case m.Snapshot():
                self.final = message
            case _:
                pass

    def advance(self, now_s: float) -> None:
        while self.due_s <= now_s:
            self.late_s = max(self.late_s, now_s - self.due_s)
            if self._published_s <= self._trained_s:
                at_s, self._published_s = self._published_s, math.inf
                self._send(m.VersionPublished(self._sending), ())
                self._publish_next(at_s)
            else:
                self._finish_step(self._trained_s)

    # ----------------------------------------------------------------------------------------------- internals

    def _offer(self, wanted: int) -> None:
        if wanted <= 0:
            return
        ids = range(self._next_task, self._next_task + wanted)
        self._next_task += wanted
        tasks = tuple(
            m.Task(i, "train", self._scenario.group_size, m.Sampling(max_new_tokens=self._scenario.longest, seed=i))
            for i in ids
        )
        prompt = np.arange(self._scenario.prompt_tokens, dtype=np.int32)
        self._send(m.TasksOffered(tasks), [prompt] * len(tasks))

    def _begin(self, now_s: float) -> None:
        if self._training is not None or self.done or self._version.step not in self._ready:
            return
        batch, arrays = self._ready.pop(self._version.step)
        work = self.count.take(batch, arrays)
        self.count.waits_s.append(max(0.0, now_s - self._waits_since_s))
        self.count.shard_waits_s.append(max(0.0, now_s - max(self._waits_since_s, self._some_since_s)))
        self._some_since_s = math.inf
        self._training = batch
        cost = work.trained_tokens + self._scenario.context_cost * work.context_tokens
        self._trained_s = now_s + cost / self._scenario.learner_per_s
        self.count.busy_s += cost / self._scenario.learner_per_s
        if self._scenario.max_staleness and self._version.step + 1 < self._scenario.steps:
            self._send(m.BatchWanted(WeightVersion(0, self._version.step + 1)), ())

    def _finish_step(self, at_s: float) -> None:
        assert self._training is not None
        self._version = WeightVersion(0, self._version.step + 1)
        self._send(m.BatchTrained(self._training.batch_id, self._version), ())
        self._training, self._trained_s, self._waits_since_s = None, math.inf, at_s
        self.count.ended(at_s)
        self._publish_next(at_s)
        if self._version.step >= self._scenario.steps:
            self.done = True
            return
        self._begin(at_s)
        if self._training is None:  # it says that it waits
            self._send(m.BatchWanted(self._version), ())

    def _publish_next(self, at_s: float) -> None:
        if self._published_s == math.inf and self._version > self._sending:
            self._sending = self._version
            self._published_s = at_s + self._scenario.publish_s
            self._publish(self._published_s, self._sending)
