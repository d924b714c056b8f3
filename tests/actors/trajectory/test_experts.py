"""Experts on their way from the engine's deltas to segments: each row stays with the token that its pass predicted,
whatever the turns, branches and cuts."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.actors.trajectory.rollout import CutSegment, Rollout
from stillhouse.engines.base import GenerationDelta, GenerationRequest
from stillhouse.protocol.messages import ExpertShape, Ticket, VersionSpan, WeightVersion
from stillhouse.protocol.payloads.expert_ids import ExpertIds, decode_experts
from tests.actors.trajectory.test_rollout import ticket

SHAPE = ExpertShape((1,), 1000, 2)
V0 = WeightVersion(0, 0)


def wanting() -> Ticket:
    plain = ticket(10_000)
    return msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, experts=SHAPE))


def row_of(before: int, token: int) -> list[list[int]]:
    """What the engine in these tests chooses, when it reads `before` and writes `token`."""
    return [[2 * (before % 400), 2 * (token % 400) + 1]]


def rows_of(ids: list[int]) -> ExpertIds:
    """Of all but the first one."""
    pairs = [row_of(before, token) for before, token in itertools.pairwise(ids)]
    return np.array(pairs, np.uint16).reshape(-1, 1, 2)


class Talk:
    def __init__(self, segment_tokens: int) -> None:
        limits = {"segment_tokens": segment_tokens, "max_context_tokens": 10_000, "max_calls": 99}
        self.rollout = Rollout(wanting(), np.array([1, 2, 3], np.int32), **limits)
        self.next_token, self.n_calls = 10, 0
        self.asked: list[int] = []
        self.cuts: list[CutSegment] = []

    def fresh(self, n: int) -> list[int]:
        self.next_token += n
        return list(range(self.next_token - n, self.next_token))

    def begin(self, prompt: list[int]) -> GenerationRequest:
        ids = np.array(prompt, np.int32)
        request = self.rollout.request(ids, self.n_calls, max_new_tokens=None, stop_token_ids=())
        self.n_calls += 1
        self.asked.append(request.experts_from)
        return request

    def answer(self, prompt: list[int], sizes: list[int], *, silent: bool = False) -> list[int]:
        """One call, whose tokens come in deltas of these sizes. `silent`: the engine does not report experts."""
        request, said = self.begin(prompt), list[int]()
        for i, n in enumerate(sizes):
            ids = [*prompt, *said, *self.fresh(n)]
            rows = rows_of(ids)
            delta = GenerationDelta(
                request.request_id,
                np.array(ids[-n:], np.int32),
                np.full(n, -1.0, np.float32),
                (VersionSpan(V0, 0, n),),
                "stop" if i == len(sizes) - 1 else None,
                experts=None if silent else rows[-n:],
                prompt_experts=rows[request.experts_from - 1 : len(prompt) - 1] if i == 0 and not silent else None,
            )
            self.rollout.append_delta(delta)
            said += ids[-n:]
            self.cuts += self.rollout.take_segments()
        return said

    def end(self) -> list[tuple[int, int, list[list[int]] | None]]:
        """(token, the one that it follows, what was chosen before it) of all tokens on the line, 0 for a first one."""
        self.rollout.finish("stop")
        self.cuts += self.rollout.take_segments()
        line, found = list[int](), list[tuple[int, int, list[list[int]] | None]]()
        for message, (ids, _, _, *told), _ in self.cuts:
            assert message.experts == bool(told)
            given = [None] * len(ids)
            if told:
                rows = decode_experts(told[0].tobytes(), len(ids), SHAPE)
                given = [row.tolist() if there else None for row, there in zip(*rows, strict=True)]
            for i, token in enumerate(ids.tolist()):
                follows = message.follows if i == 0 and message.follows is not None else len(line)
                found.append((token, line[follows - 1] if follows else 0, given[i]))
                line.append(token)
        return found


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 4)), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_each_token_has_the_row_of_the_pass_that_predicts_it(
    segment_tokens: int, turns: list[tuple[list[int], int]]
) -> None:
    """Several turns, with text of an environment between them, of any length."""
    talk, prompt = Talk(segment_tokens), [1, 2, 3]
    for sizes, n_text in turns:
        prompt += talk.answer(prompt, sizes)
        prompt += talk.fresh(n_text)
    found = talk.end()
    assert [token for token, _, _ in found[: len(prompt)]] == prompt[: len(found)]
    assert [given for _, _, given in found] == [None, *rows_of([token for token, _, _ in found]).tolist()]


def test_branches_have_the_rows_of_their_own_paths_and_nothing_is_asked_for_twice() -> None:
    talk, prompt = Talk(4), [1, 2, 3]
    first = talk.answer(prompt, [3, 2])
    second = talk.answer([*prompt, *first, 70, 71], [2])
    talk.answer([*prompt, *first, 72, 73], [3])  # another history, behind the first answer
    talk.answer([*prompt, *first, 70, 71, *second, 74], [2])
    assert talk.asked == [1, 8, 8, 12]
    found = talk.end()
    assert len(found) == 3 + 5 + 2 + 2 + 2 + 3 + 1 + 2
    assert all(given == (row_of(before, token) if before else None) for token, before, given in found)


def test_what_an_engine_leaves_out_is_left_out() -> None:
    talk = Talk(100)
    first = talk.answer([1, 2, 3], [3], silent=True)
    talk.answer([1, 2, 3, *first, 50], [2])  # the second call knows what was chosen in all of it
    assert [given is None for _, _, given in talk.end()] == [True] + [False] * 8
    talk = Talk(100)
    talk.answer([1, 2, 3], [3], silent=True)
    assert talk.end() and not any(cut.message.experts for cut in talk.cuts)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (np.zeros((2, 1, 2), np.uint16), "twice"),
        (np.array([[[0, 1000]]] * 2, np.uint16), "ids in"),
        (np.array([[[0, 1], [0, 1]]] * 2, np.uint16), r"\[n, 1, 2\]"),
        (np.array([[[0, 1]]] * 3, np.uint16), "experts of 3 tokens; there are 2"),
    ],
)
def test_an_engine_that_reports_what_cannot_be_is_refused(rows: ExpertIds, says: str) -> None:
    talk = Talk(100)
    request = talk.begin([1, 2, 3])
    ids, spans = np.array([4, 5], np.int32), (VersionSpan(V0, 0, 2),)
    with pytest.raises(ValueError, match=says):
        delta = GenerationDelta(request.request_id, ids, np.zeros(2, np.float32), spans, experts=rows)
        talk.rollout.append_delta(delta)
