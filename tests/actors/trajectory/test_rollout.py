"""Segments laid end to end are the rollout, whatever came in and whenever they were taken. One conversation; random
branches are in test_graph.py."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.actors.trajectory.rollout import CutSegment, NoRoom, Rollout
from stillhouse.engines.base import GenerationDelta, GenerationRequest
from stillhouse.protocol.messages import Sampling, Ticket, VersionSpan, WeightVersion


def ticket(max_new_tokens: int) -> Ticket:
    return Ticket(
        rollout_id="train-7-0-0",
        task_id=7,
        sample_index=0,
        kind="train",
        sampling=Sampling(max_new_tokens=max_new_tokens, seed=3),
        env="single_turn",
        tag="",
        ground_truth=None,
        min_version=WeightVersion(0, 0),
    )


class Line:
    """A rollout of one conversation, and the test's own account of it."""

    def __init__(
        self, n_prompt: int = 3, *, segment_tokens: int = 4, max_new_tokens: int = 10_000, context: int = 10_000
    ) -> None:
        prompt = np.arange(n_prompt, dtype=np.int32)
        self.rollout = Rollout(
            ticket(max_new_tokens),
            prompt,
            segment_tokens=segment_tokens,
            max_context_tokens=context,
            max_calls=1000,
        )
        self.version_of: list[int | None] = [None] * n_prompt
        self.running: GenerationRequest | None = None
        self.n_calls = 0

    def ask(self, **options: Any) -> GenerationRequest:
        ids = np.arange(len(self.version_of), dtype=np.int32)
        options = {"max_new_tokens": None, "stop_token_ids": (), **options}
        self.running, self.n_calls = self.rollout.request(ids, self.n_calls, **options), self.n_calls + 1
        return self.running

    def write(self, versions: list[int], end: Literal["stop"] | None = None) -> None:
        """The engine says one token per version; spans may be unmerged, as an engine reports them."""
        request = self.running or self.ask()
        n, at = len(versions), len(self.version_of)
        spans = tuple(VersionSpan(WeightVersion(0, v), i, i + 1) for i, v in enumerate(versions))
        ids = np.arange(at, at + n, dtype=np.int32)
        self.rollout.append_delta(GenerationDelta(request.request_id, ids, -ids.astype(np.float32) - 0.5, spans, end))
        self.version_of += versions

    def end_turn(self) -> None:
        if self.running is not None:
            self.write([], end="stop")
            self.running = None


@dataclass(frozen=True)
class Event:
    kind: Literal["sampled", "environment", "take", "take early"]
    versions: tuple[int, ...] = ()
    n: int = 0


EVENTS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 3), min_size=1, max_size=9).map(lambda v: Event("sampled", tuple(v))),
        st.integers(0, 9).map(lambda n: Event("environment", n=n)),
        st.just(Event("take")),
        st.just(Event("take early")),
    ),
    max_size=25,
)


@settings(max_examples=50, deadline=None)
@given(events=EVENTS, n_prompt=st.integers(1, 30), segment_tokens=st.integers(1, 12))
def test_segments_laid_end_to_end_are_the_rollout(events: list[Event], n_prompt: int, segment_tokens: int) -> None:
    line = Line(n_prompt, segment_tokens=segment_tokens)
    taken: list[CutSegment] = []
    for event in [*events, Event("sampled", (1,))]:
        if event.kind == "take":
            taken += line.rollout.take_segments()
            assert not any(cut.message.final for cut in taken)
        elif event.kind == "take early":
            taken += line.rollout.take_early()
            n_cut, newest = sum(len(cut.arrays[0]) for cut in taken), len(line.version_of) - 1
            while newest >= 0 and line.version_of[newest] is None:
                newest -= 1
            assert newest < 0 or n_cut >= newest or not any(v is not None for v in line.version_of[n_cut:newest])
        elif event.kind == "sampled":
            line.write(list(event.versions))
        else:
            line.end_turn()
            line.version_of += [None] * event.n
    line.end_turn()
    line.rollout.finish("stop", 0.5)
    taken += line.rollout.take_segments()

    version_of, n_leading = line.version_of, next(i for i, v in enumerate(line.version_of) if v is not None)
    n = len(version_of)
    assert [cut.message.index for cut in taken] == list(range(len(taken)))
    starts, ends = [c.message.start for c in taken], [c.message.end for c in taken]
    assert starts == [0, *ends[:-1]] and ends[-1] == n
    assert ends[0] > n_leading, "the first segment holds all that stands before the first response"
    assert all(c.message.end - max(c.message.start, n_leading) <= segment_tokens for c in taken)
    assert all(c.message.end > c.message.start for c in taken)
    assert all(c.message.follows is None and c.message.dropped == () for c in taken)

    got_ids, got_logprobs, got_mask = (np.concatenate([c.arrays[i] for c in taken]) for i in range(3))
    assert (got_ids.dtype, got_logprobs.dtype, got_mask.dtype) == (np.int32, np.float32, np.uint8)
    sampled = np.array([v is not None for v in version_of])
    assert got_ids.tolist() == list(range(n))
    assert (got_mask == sampled).all()
    assert (got_logprobs == np.where(sampled, -np.arange(n) - 0.5, 0)).all()

    assert_spans_say_who_sampled(taken, version_of)
    last = taken[-1].message
    assert (last.final, last.finish_reason, last.reward) == (True, "stop", 0.5)
    assert all((c.message.final, c.message.finish_reason, c.message.reward) == (False, None, None) for c in taken[:-1])


def assert_spans_say_who_sampled(taken: list[CutSegment], version_of: list[int | None]) -> None:
    """Spans cover exactly the sampled tokens, with the right version, inside their segment, sorted and merged where
    one response goes on."""
    covered: list[int | None] = [None] * len(version_of)
    for cut in taken:
        spans = cut.message.spans
        for span in spans:
            assert cut.message.start <= span.start < span.end <= cut.message.end
            covered[span.start : span.end] = [span.version.step] * (span.end - span.start)
        for left, right in pairwise(spans):
            assert left.end <= right.start
    assert covered == version_of


@pytest.mark.parametrize(("prompt", "own"), [([90, 91, 92, 93], 4), ([0, 1, 2], 0), ([0, 1, 2, 9], 0), ([0, 1], 2)])
def test_a_prompt_that_does_not_begin_with_the_tickets_says_so_once(prompt: list[int], own: int) -> None:
    line = Line(3, segment_tokens=4)
    options: dict[str, Any] = {"max_new_tokens": None, "stop_token_ids": ()}
    request = line.rollout.request(np.array(prompt, np.int32), 0, **options)
    ids, spans = np.arange(10, 16, dtype=np.int32), (VersionSpan(WeightVersion(0, 0), 0, 6),)
    line.rollout.append_delta(GenerationDelta(request.request_id, ids, np.zeros(6, np.float32), spans, "stop"))
    line.rollout.finish("stop")
    cuts = line.rollout.take_segments()
    assert [c.message.own_prompt_tokens for c in cuts] == [own, 0]
    got, _, mask = (np.concatenate([c.arrays[i] for c in cuts]) for i in range(3))
    assert got.tolist() == [*prompt, *range(10, 16)] and mask.tolist() == [0] * len(prompt) + [1] * 6


def test_requests_go_on_where_the_rollout_stands_and_draw_the_next_random_numbers() -> None:
    line = Line(3, max_new_tokens=10)
    line.write([0, 0])
    line.end_turn()
    line.version_of += [None] * 3
    request = line.ask(stop_token_ids=(5,))
    assert request.prompt_ids.tolist() == list(range(8))
    assert (request.max_new_tokens, request.sample_offset, request.stop_token_ids) == (8, 2, (5,))
    line.write([1])
    line.end_turn()
    assert line.ask().sample_offset == 3


def test_calls_at_the_same_time_draw_random_numbers_of_their_own() -> None:
    """Whichever of them ends first: what is drawn afterwards is the same."""
    for ends in ((0, 1), (1, 0)):
        line = Line(3, max_new_tokens=100)
        calls = [line.ask(max_new_tokens=10), line.ask(max_new_tokens=20)]
        assert [call.sample_offset for call in calls] == [0, 10]
        for i in ends:
            line.running = calls[i]
            line.write([0] * 4, end="stop")
        line.running = None
        assert line.ask().sample_offset == 14


def test_a_request_leaves_room_in_the_context_window() -> None:
    line = Line(6, context=10, max_new_tokens=50)
    assert line.ask().max_new_tokens == 4
    line.write([0] * 4)
    line.end_turn()
    with pytest.raises(NoRoom, match="a prompt of 10 tokens fills the context of 10"):
        line.ask()


def test_more_tokens_than_were_asked_for_are_refused() -> None:
    line = Line(3, max_new_tokens=2)
    with pytest.raises(ValueError, match="3 tokens, expected at most 2"):
        line.write([0, 0, 0])


def test_a_rollout_without_a_token_of_the_student_s_does_not_finish() -> None:
    line = Line(3)
    line.ask()
    line.end_turn()
    with pytest.raises(ValueError, match="without a token of the student's"):
        line.rollout.finish("stop")


def test_a_rollout_needs_a_prompt() -> None:
    with pytest.raises(ValueError, match="prompt of shape"):
        Line(0).ask()


def test_rewards_of_dropped_and_unknown_responses_are_in_the_sum_alone() -> None:
    prompt = np.arange(3, dtype=np.int32)
    rollout = Rollout(ticket(99), prompt, segment_tokens=2, max_context_tokens=99, max_calls=9)
    for number, text in ((0, [10, 11, 12]), (1, [20, 21]), (2, [30])):  # 1 asks the same again, and 2 goes on from it
        read = np.array([*prompt, 20, 21, 50] if number == 2 else prompt, np.int32)
        request = rollout.request(read, number, max_new_tokens=9, stop_token_ids=(), retry=number == 1)
        ids, spans = np.array(text, np.int32), (VersionSpan(WeightVersion(0, 0), 0, len(text)),)
        rollout.append_delta(
            GenerationDelta(request.request_id, ids, np.full(len(text), -1.0, np.float32), spans, "stop")
        )
        taken = rollout.take_segments() if number == 0 else []
        assert len(taken) == (1 if number == 0 else 0), "of the dropped response, too, something is on the row"
    rollout.finish("stop", 15.5, {0: 1.0, 1: 2.0, 2: 4.0, 7: 8.5})
    *_, last = rollout.take_segments()
    (dropped,) = last.message.dropped
    assert (dropped.start, last.message.reward) == (3, 15.5)
    assert [one.reward for one in last.message.turn_rewards] == [2.0, 4.0]
    assert last.message.turn_rewards[-1].end == last.message.end


def test_a_reward_of_a_dropped_response_that_is_all_on_the_row_is_in_the_sum_alone() -> None:
    """The only response was not delivered: it makes the last segment, since an episode needs one."""
    line = Line(3)
    line.write([0, 0])
    line.rollout.finish("length", 1.5, {0: 1.5})
    (last,) = line.rollout.take_segments()
    assert last.message.final and last.message.reward == 1.5
    assert [(one.start, one.end) for one in last.message.dropped] == [(3, 5)] and last.message.end == 5
    assert last.message.turn_rewards == ()
