"""Segments laid end to end are the rollout, whatever came in and whenever they were taken."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rollout import CutSegment, Rollout
from engines.base import GenerationDelta
from protocol.messages import Sampling, Ticket, VersionSpan, WeightVersion


def ticket(max_new_tokens: int = 10_000) -> Ticket:
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


def new_rollout(n_prompt: int = 3, *, segment_tokens: int = 4, max_new_tokens: int = 10_000) -> Rollout:
    prompt = np.arange(n_prompt, dtype=np.int32)
    return Rollout(ticket(max_new_tokens), prompt, segment_tokens=segment_tokens, max_context_tokens=10_000)


def sample(rollout: Rollout, first_id: int, versions: list[int]) -> None:
    """Append one token per version, spans as an engine reports them: unmerged is allowed too."""
    n = len(versions)
    spans = tuple(VersionSpan(WeightVersion(0, v), i, i + 1) for i, v in enumerate(versions))
    ids = np.arange(first_id, first_id + n, dtype=np.int32)
    rollout.append_sampled(ids, -ids.astype(np.float32) - 0.5, spans)


@dataclass(frozen=True)
class Event:
    kind: Literal["sampled", "environment", "take"]
    versions: tuple[int, ...] = ()
    n: int = 0


EVENTS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 3), min_size=1, max_size=9).map(lambda v: Event("sampled", tuple(v))),
        st.integers(0, 9).map(lambda n: Event("environment", n=n)),
        st.just(Event("take")),
    ),
    max_size=25,
)


@settings(max_examples=300, deadline=None)
@given(events=EVENTS, n_prompt=st.integers(1, 30), segment_tokens=st.integers(1, 12))
def test_segments_laid_end_to_end_are_the_rollout(events: list[Event], n_prompt: int, segment_tokens: int) -> None:
    rollout = new_rollout(n_prompt, segment_tokens=segment_tokens)
    ids = list(range(n_prompt))
    version_of: list[int | None] = [None] * n_prompt
    taken: list[CutSegment] = []
    for event in events:
        if event.kind == "take":
            taken += rollout.take_segments()
            assert not any(cut.message.final for cut in taken)
        elif event.kind == "sampled":
            sample(rollout, len(ids), list(event.versions))
            version_of += event.versions
        else:
            rollout.append_environment(np.arange(len(ids), len(ids) + event.n, dtype=np.int32))
            version_of += [None] * event.n
        ids = list(range(len(version_of)))
    rollout.finish("stop", 0.5)
    taken += rollout.take_segments()

    n = len(ids)
    assert rollout.token_ids.tolist() == ids
    assert [cut.message.index for cut in taken] == list(range(len(taken)))
    starts, ends = [c.message.start for c in taken], [c.message.end for c in taken]
    assert starts == [0, *ends[:-1]] and ends[-1] == n
    assert ends[0] >= n_prompt
    assert all(c.message.end - max(c.message.start, n_prompt) <= segment_tokens for c in taken)
    assert all(c.message.end > c.message.start for c in taken)

    got_ids, got_logprobs, got_mask = (np.concatenate([c.arrays[i] for c in taken]) for i in range(3))
    assert (got_ids.dtype, got_logprobs.dtype, got_mask.dtype) == (np.int32, np.float32, np.uint8)
    sampled = np.array([v is not None for v in version_of])
    assert got_ids.tolist() == ids
    assert (got_mask == sampled).all()
    assert (got_logprobs == np.where(sampled, -np.arange(n) - 0.5, 0)).all()

    assert_spans_say_who_sampled(taken, version_of)
    last = taken[-1].message
    assert (last.final, last.finish_reason, last.reward) == (True, "stop", 0.5)
    assert all((c.message.final, c.message.finish_reason, c.message.reward) == (False, None, None) for c in taken[:-1])


def assert_spans_say_who_sampled(taken: list[CutSegment], version_of: list[int | None]) -> None:
    """Spans cover exactly the sampled tokens, with the right version, inside their segment, sorted and merged."""
    covered: list[int | None] = [None] * len(version_of)
    for cut in taken:
        spans = cut.message.spans
        for span in spans:
            assert cut.message.start <= span.start < span.end <= cut.message.end
            covered[span.start : span.end] = [span.version.step] * (span.end - span.start)
        for left, right in pairwise(spans):
            assert left.end <= right.start
            assert (left.end, left.version) != (right.start, right.version), "touching spans of one version are merged"
    assert covered == version_of


def test_the_whole_prompt_rides_in_the_first_segment_however_long() -> None:
    rollout = new_rollout(50, segment_tokens=4)
    sample(rollout, 50, [0] * 5)
    (first,) = rollout.take_segments()
    assert (first.message.start, first.message.end) == (0, 54)


def test_a_prompt_of_the_environments_replaces_the_tickets_and_says_so_once() -> None:
    rollout = new_rollout(3, segment_tokens=4)
    rollout.replace_prompt(np.arange(90, 96, dtype=np.int32))
    sample(rollout, 10, [0] * 6)
    rollout.finish("stop")
    cuts = rollout.take_segments()
    assert [(c.message.start, c.message.end, c.message.own_prompt_tokens) for c in cuts] == [(0, 10, 6), (10, 12, 0)]
    ids, _, mask = (np.concatenate([c.arrays[i] for c in cuts]) for i in range(3))
    assert ids.tolist() == [*range(90, 96), *range(10, 16)] and mask.tolist() == [0] * 6 + [1] * 6
    assert [s for c in cuts for s in c.message.spans] == [
        VersionSpan(WeightVersion(0, 0), 6, 10),
        VersionSpan(WeightVersion(0, 0), 10, 12),
    ]


def test_the_tickets_prompt_made_again_is_the_tickets_prompt() -> None:
    rollout = new_rollout(3)
    rollout.replace_prompt(np.arange(3, dtype=np.int32))
    rollout.finish("aborted")
    assert rollout.take_segments()[0].message.own_prompt_tokens == 0


def test_a_prompt_is_replaced_before_anything_follows_it_and_by_something() -> None:
    rollout = new_rollout(3)
    with pytest.raises(ValueError, match="empty prompt"):
        rollout.replace_prompt(np.zeros(0, np.int32))
    sample(rollout, 3, [0])
    with pytest.raises(RuntimeError, match="before anything follows"):
        rollout.replace_prompt(np.arange(5, dtype=np.int32))


def test_one_token_is_held_back_until_the_reward_is_known() -> None:
    rollout = new_rollout(3, segment_tokens=4)
    sample(rollout, 3, [0] * 4)
    assert rollout.take_segments() == []
    rollout.finish("stop", 1.0)
    (only,) = rollout.take_segments()
    assert only.message.final and only.message.reward == 1.0
    assert rollout.take_segments() == []


def test_a_rollout_cancelled_before_its_first_token_still_has_a_final_segment() -> None:
    rollout = new_rollout(3)
    rollout.finish("aborted")
    (only,) = rollout.take_segments()
    assert only.message.final and only.message.spans == () and only.arrays[2].tolist() == [0, 0, 0]


def test_turns_are_runs_of_sampled_tokens() -> None:
    rollout = new_rollout(3)
    sample(rollout, 3, [0])
    sample(rollout, 4, [1, 1])
    assert (rollout.n_turns, rollout.turn_ids.tolist()) == (1, [3, 4, 5])
    rollout.append_environment(np.array([6, 7], dtype=np.int32))
    assert rollout.turn_ids.tolist() == []
    sample(rollout, 8, [1])
    assert (rollout.n_turns, rollout.turn_ids.tolist(), rollout.n_sampled) == (2, [8], 4)


def test_requests_go_on_where_the_rollout_stands_and_count_sampled_tokens_only() -> None:
    rollout = new_rollout(3, max_new_tokens=10)
    sample(rollout, 3, [0, 0])
    rollout.append_environment(np.array([9, 9, 9], dtype=np.int32))
    request = rollout.next_request((5,))
    assert request.prompt_ids.tolist() == [0, 1, 2, 3, 4, 9, 9, 9]
    assert (request.max_new_tokens, request.sample_offset, request.stop_token_ids) == (8, 2, (5,))


def test_a_request_leaves_room_in_the_context_window() -> None:
    rollout = Rollout(ticket(50), np.zeros(6, dtype=np.int32), segment_tokens=4, max_context_tokens=10)
    assert rollout.next_request(()).max_new_tokens == 4
    sample(rollout, 0, [0] * 4)
    with pytest.raises(RuntimeError, match="0 of context"):
        rollout.next_request(())


@pytest.mark.parametrize("edges", [[(0, 2)], [(1, 3)], [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 4)], []])
def test_spans_that_do_not_cover_the_delta_are_refused(edges: list[tuple[int, int]]) -> None:
    rollout = new_rollout(3)
    spans = tuple(VersionSpan(WeightVersion(0, 0), a, b) for a, b in edges)
    with pytest.raises(ValueError, match="do not cover"):
        rollout.append_sampled(np.zeros(3, dtype=np.int32), np.zeros(3, dtype=np.float32), spans)
    assert len(rollout) == 3


def test_more_tokens_than_the_budget_are_refused() -> None:
    rollout = new_rollout(3, max_new_tokens=2)
    with pytest.raises(ValueError, match="expected at most 2"):
        sample(rollout, 3, [0, 0, 0])


def test_nothing_comes_after_finish() -> None:
    rollout = new_rollout(3)
    rollout.finish("env_done")
    with pytest.raises(RuntimeError, match="is finished"):
        sample(rollout, 3, [0])
    with pytest.raises(RuntimeError, match="is finished"):
        rollout.append_environment(np.zeros(1, dtype=np.int32))
    with pytest.raises(RuntimeError, match="finished already"):
        rollout.finish("stop")


def test_a_delta_with_a_finish_reason_only_adds_no_token() -> None:
    rollout = new_rollout(3)
    empty = GenerationDelta("r", np.zeros(0, np.int32), np.zeros(0, np.float32), (), finish_reason="length")
    rollout.append_delta(empty)
    assert (len(rollout), rollout.n_turns) == (3, 0)


def test_a_rollout_needs_a_prompt() -> None:
    with pytest.raises(ValueError, match="prompt of shape"):
        new_rollout(0)
