"""The student's likeliest tokens on their way from the engine's deltas to segments: each set stays with its token."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.actors.trajectory.rollout import CutSegment, Rollout
from stillhouse.engines.base import GenerationDelta
from stillhouse.protocol.messages import Ticket, TopIdsWanted, VersionSpan, WeightVersion
from stillhouse.protocol.payloads.student_sets import decode_top_ids
from tests.actors.trajectory.test_rollout import ticket

V0 = WeightVersion(0, 0)


def wanting(max_new_tokens: int = 10_000) -> Ticket:
    plain = ticket(max_new_tokens)
    return msgspec.structs.replace(
        plain, sampling=msgspec.structs.replace(plain.sampling, top_ids=TopIdsWanted(4, 1.0))
    )


def set_of(token: int) -> list[int]:
    """What the engine in these tests reports: one to four ids that no other token has."""
    return [1000 * token + i for i in range(1 + token % 4)]


class Talk:
    """A rollout whose tokens are all different."""

    def __init__(self, segment_tokens: int, ticket_: Ticket | None = None) -> None:
        self.prompt = [1, 2, 3]
        self.rollout = Rollout(
            ticket_ or wanting(),
            np.array(self.prompt, np.int32),
            segment_tokens=segment_tokens,
            max_context_tokens=10_000,
            max_calls=1000,
        )
        self.next_token, self.n_calls = 10, 0
        self.sampled: set[int] = set()
        self.cuts: list[CutSegment] = []

    def fresh(self, n: int) -> list[int]:
        self.next_token += n
        return list(range(self.next_token - n, self.next_token))

    def answer(self, prompt: list[int], sizes: list[int], *, sets: bool = True) -> list[int]:
        """One call, whose tokens come in deltas of these sizes; segments are taken after each."""
        request = self.rollout.request(np.array(prompt, np.int32), self.n_calls, max_new_tokens=None, stop_token_ids=())
        self.n_calls += 1
        said: list[int] = []
        for i, n in enumerate(sizes):
            new = self.fresh(n)
            top_ids = tuple(np.array(set_of(token), np.int32) for token in new) if sets else None
            end = "stop" if i == len(sizes) - 1 else None
            spans = (VersionSpan(V0, 0, n),) if n else ()
            ids, logprobs = np.array(new, np.int32), np.full(n, -1.0, np.float32)
            self.rollout.append_delta(GenerationDelta(request.request_id, ids, logprobs, spans, end, None, top_ids))
            said += new
            self.cuts += self.rollout.take_segments()
        self.sampled |= set(said)
        return said

    def end(self) -> list[CutSegment]:
        self.rollout.finish("stop")
        self.cuts += self.rollout.take_segments()
        return self.cuts


def assert_each_token_has_its_own_set(cuts: list[CutSegment]) -> int:
    """Returns the sampled tokens found. Between the first and the last one of a segment, others have themselves."""
    n_found = 0
    for message, (ids, _, mask, *payloads), _ in cuts:
        sampled = np.flatnonzero(mask)
        assert message.top_ids == bool(len(payloads)) == bool(len(sampled))
        for payload in payloads:
            ids_TK, counts_T = decode_top_ids(payload.tobytes())
            assert len(counts_T) == sampled[-1] + 1 - sampled[0]
            for t, at in enumerate(range(sampled[0], sampled[-1] + 1)):
                expected = set_of(int(ids[at])) if mask[at] else [int(ids[at])]
                assert ids_TK[t, : counts_T[t]].tolist() == expected
                n_found += int(mask[at])
    return n_found


@settings(max_examples=50, deadline=None)
@given(
    turns=st.lists(st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 5)), min_size=1),
    segment_tokens=st.integers(1, 9),
)
def test_wherever_segments_are_cut_each_token_keeps_its_set(
    turns: list[tuple[list[int], int]], segment_tokens: int
) -> None:
    talk = Talk(segment_tokens)
    row = list(talk.prompt)
    for sizes, n_environment in [*turns, ([1], 0)]:
        row += talk.answer(row, sizes)
        row += talk.fresh(n_environment)
    assert assert_each_token_has_its_own_set(talk.end()) == len(talk.sampled)


def test_branches_keep_their_sets_and_a_shared_beginning_is_sent_once() -> None:
    talk = Talk(4)
    first = talk.answer(talk.prompt, [3, 4])
    talk.answer([*talk.prompt, *first, 5, 6], [2, 5])
    talk.answer([*talk.prompt, *first, 7], [6])
    talk.answer([8, 9], [3])
    cuts = talk.end()
    assert sum(cut.message.follows is not None for cut in cuts) >= 2
    assert assert_each_token_has_its_own_set(cuts) == len(talk.sampled)


def test_sets_are_let_go_once_they_are_cut() -> None:
    """They are a hundred times the size of their tokens."""
    talk = Talk(4)
    talk.answer(talk.prompt, [3, 8, 1])
    talk.end()
    kept = [one for call in talk.rollout.graph.calls if call.response is not None for one in call.response.top_ids]
    assert len(kept) == 12 and not any(one.size for one in kept)


def test_a_ticket_that_asks_for_none_gets_none() -> None:
    talk = Talk(4, ticket(100))
    talk.answer(talk.prompt, [5])
    assert all(not cut.message.top_ids and len(cut.arrays) == 3 for cut in talk.end())


def test_an_engine_that_reports_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="likeliest tokens for 0 of 2 tokens; expected all"):
        Talk(4).answer([1], [2], sets=False)
