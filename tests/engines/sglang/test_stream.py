"""Which tokens of a stream leave when, and under which version; no server needed."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import pytest

from stillhouse.engines.http.deltas import PendingDelta
from stillhouse.engines.http.stream import ExpertsAsked, Labels, NewTokens, StreamChunk, StreamError, TokenStream
from stillhouse.engines.sglang.features import chunks_are_increments
from stillhouse.protocol.messages import ExpertShape, TopIdsWanted, VersionSpan, WeightVersion

START, NEXT = WeightVersion(0, 0), WeightVersion(0, 1)


def chunk(ids: list[int], stamp: str = "0.0", **meta: Any) -> StreamChunk:
    """As it comes off the wire; log-prob of token t is -t."""
    entries = [[-float(token), token, None] for token in ids]
    text = msgspec.json.encode(
        {"output_ids": ids, "meta_info": {"weight_version": stamp, "output_token_logprobs": entries, **meta}}
    )
    return msgspec.json.decode(text, type=StreamChunk)


def token_stream(*, incremental: bool = True) -> TokenStream:
    return TokenStream(incremental=incremental, floor=START, labels=Labels(""))


LENGTH: Any = {"finish_reason": {"type": "length", "length": 4}}


def test_increments_are_handed_on_as_they_come() -> None:
    stream = token_stream()
    first, second = stream.take(chunk([5, 6])), stream.take(chunk([7], **LENGTH))

    assert (first.ids, second.ids) == ([5, 6], [7])
    assert first.logprobs == [-5.0, -6.0]
    assert first.spans == [VersionSpan(START, 0, 2)] and second.spans == [VersionSpan(START, 0, 1)]
    assert stream.finish is not None and stream.finish.type == "length"


def test_of_cumulative_chunks_only_what_is_new() -> None:
    stream = token_stream(incremental=False)
    got = [stream.take(chunk(ids)) for ids in ([5], [5, 6, 7], [5, 6, 7], [5, 6, 7, 8])]

    assert [new.ids for new in got] == [[5], [6, 7], [], [8]]
    assert got[1].logprobs == [-6.0, -7.0]


def top(*rows: dict[int, float]) -> dict[str, Any]:
    return {"output_top_logprobs": [[[value, token, None] for token, value in row.items()] for row in rows]}


@pytest.mark.parametrize("incremental", [True, False])
def test_each_token_comes_with_its_set_also_after_a_wait_for_the_spans(incremental: bool) -> None:
    stream = TokenStream(incremental=incremental, floor=START, labels=Labels(""), top_ids=TopIdsWanted(2, 0.9))
    sure, torn = {5: -0.05, 6: -3.0}, {6: -0.7, 9: -0.7}
    first = stream.take(chunk([5], **top(sure)))
    held = stream.take(chunk([6] if incremental else [5, 6], "0.1", **(top(torn) if incremental else top(sure, torn))))
    spans = [{"version": "0.0", "start": 0, "end": 1}, {"version": "0.1", "start": 1, "end": 3}]
    rest = ([7], top(sure)) if incremental else ([5, 6, 7], top(sure, torn, sure))
    last = stream.take(chunk(rest[0], "0.1", weight_versions=spans, **LENGTH, **rest[1]))

    assert [ids.tolist() for ids in first.top_ids] == [[5]]  # 0.95 of the mass
    assert held.ids == [] and held.top_ids == []
    assert [ids.tolist() for ids in last.top_ids] == [[6, 9], [5]]


@pytest.mark.parametrize("rows", [[], [{5: -0.1}], [{5: -3.0, 6: -0.1}], [{5: -0.1, 6: -3.0}] * 2])
def test_sets_that_do_not_belong_to_the_tokens_are_refused(rows: list[dict[int, float]]) -> None:
    stream = TokenStream(incremental=True, floor=START, labels=Labels(""), top_ids=TopIdsWanted(2, 1.0))
    with pytest.raises(StreamError, match="likeliest"):
        stream.take(chunk([5], **top(*rows)))


def test_a_cumulative_stream_that_changes_its_mind_is_refused() -> None:
    stream = token_stream(incremental=False)
    stream.take(chunk([5, 6]))
    with pytest.raises(StreamError, match="changed its first 2 tokens"):
        stream.take(chunk([5, 9, 7]))


def test_tokens_behind_a_change_of_version_wait_for_the_spans() -> None:
    stream = token_stream()
    spans = [{"version": "0.0", "start": 0, "end": 3}, {"version": "0.1", "start": 3, "end": 5}]
    got = [
        stream.take(chunk([1, 2])),
        stream.take(chunk([3, 4], "0.1")),  # stamped late: 3 was sampled under the old weights
        stream.take(chunk([5], "0.1", weight_versions=spans, **LENGTH)),
    ]

    assert [new.ids for new in got] == [[1, 2], [], [3, 4, 5]]
    assert got[2].spans == [VersionSpan(START, 0, 1), VersionSpan(NEXT, 1, 3)]


def test_once_held_back_a_matching_stamp_frees_nothing() -> None:
    stream = token_stream()
    stream.take(chunk([1], "0.1"))

    assert stream.take(chunk([2], "0.0")).ids == []


def test_without_spans_a_version_is_not_guessed() -> None:
    stream = token_stream()
    stream.take(chunk([1], "0.1"))
    with pytest.raises(StreamError, match="does not say which"):
        stream.take(chunk([2], "0.1", **LENGTH))


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([("0.0", 0, 2)], "do not cover"),
        ([("0.0", 0, 1), ("0.1", 2, 3)], "do not cover"),
        ([("0.1", 0, 3)], "were given as sampled under"),
        ([("0.0", 0, 1), ("0.1", 1, 3)], "were given as sampled under"),
    ],
)
def test_spans_that_contradict_what_was_given_are_an_error(spans: list[tuple[str, int, int]], said: str) -> None:
    stream = token_stream()
    stream.take(chunk([1, 2]))
    with pytest.raises(StreamError, match=said):
        versions = [{"version": v, "start": start, "end": end} for v, start, end in spans]
        stream.take(chunk([3], weight_versions=versions, **LENGTH))


@pytest.mark.parametrize("entries", [[], [[-1.0, 2, None]], [[None, 1, None]], [[-1.0, 1, None], [-1.0, 1, None]]])
def test_logprobs_that_do_not_belong_to_the_tokens_are_an_error(entries: list[Any]) -> None:
    bad = msgspec.convert(
        {"output_ids": [1], "meta_info": {"weight_version": "0.0", "output_token_logprobs": entries}}, StreamChunk
    )
    with pytest.raises(StreamError, match="log-prob"):
        token_stream().take(bad)


def test_the_placeholder_of_a_refused_request_is_no_token() -> None:
    stream = token_stream()
    refusal = {"type": "abort", "message": "too long", "status_code": 400}
    text = {"output_ids": [0], "meta_info": {"weight_version": "default", "finish_reason": refusal}}

    assert stream.take(msgspec.convert(text, StreamChunk)).ids == []
    assert stream.finish is not None and stream.finish.message == "too long"


def test_neighbouring_spans_of_one_version_become_one() -> None:
    tokens = NewTokens()
    tokens.extend(NewTokens([1, 2], [0.0, 0.0], [VersionSpan(START, 0, 2)]))
    tokens.extend(NewTokens([3, 4], [0.0, 0.0], [VersionSpan(START, 0, 1), VersionSpan(NEXT, 1, 2)]))

    assert tokens.spans == [VersionSpan(START, 0, 3), VersionSpan(NEXT, 3, 4)]


@pytest.mark.parametrize(
    ("chunks", "incremental"),
    [
        ([([1], 1), ([2], 2), ([3], 3)], True),
        ([([1], 1), ([1, 2], 2)], False),
        ([([1, 2], 2), ([3], 3)], True),  # a busy server: two steps in the first chunk
        ([([1, 2], 2), ([1, 2, 3], 3)], False),
        ([([1, 2, 3], 3)], None),
        ([([1], 1), ([], 1)], None),
    ],
)
def test_the_form_of_a_stream_is_told_by_its_later_chunks(
    chunks: list[tuple[list[int], int]], incremental: bool | None
) -> None:
    assert chunks_are_increments([chunk(ids, completion_tokens=n) for ids, n in chunks]) is incremental


@pytest.mark.parametrize("incremental", [True, False])
def test_a_token_sampled_from_a_part_has_its_logprob_among_it(incremental: bool) -> None:
    stream = TokenStream(incremental=incremental, floor=START, labels=Labels(""), kept=True)

    def masked(*rows: tuple[list[int], float]) -> dict[str, Any]:
        return {
            "output_token_sampling_mask": [ids for ids, _ in rows],
            "output_token_sampling_logprobs": [logprob for _, logprob in rows],
        }

    rows = [([9, 5], -0.25), ([6], 0.0)]
    first = stream.take(chunk([5], **masked(rows[0])))
    last = stream.take(chunk([6] if incremental else [5, 6], **masked(*(rows[1:] if incremental else rows)), **LENGTH))
    assert (first.logprobs, last.logprobs) == ([-0.25], [0.0])
    assert [ids.tolist() for ids in (*first.top_ids, *last.top_ids)] == [[5, 9], [6]]
    for wrong in (masked(([9, 8], -0.1)), masked(([5, 5], -0.1)), masked(([5], float("nan"))), {}):
        other = TokenStream(incremental=True, floor=START, labels=Labels(""), kept=True)
        with pytest.raises(StreamError):
            other.take(chunk([5], **wrong))


SHAPE = ExpertShape((0, 2), 8, 2)


def said(rows: list[list[list[int]]]) -> dict[str, Any]:
    """As SGLang encodes it: int32 [places, layers, chosen]."""
    return {"routed_experts": base64.b64encode(np.array(rows, "<i4").tobytes()).decode()}


def asking(start: int = 2, n_prompt: int = 3) -> TokenStream:
    asked = ExpertsAsked(SHAPE, start, n_prompt)
    return TokenStream(incremental=True, floor=START, labels=Labels(""), experts=asked)


def test_tokens_wait_for_the_experts_that_come_with_the_last_chunk() -> None:
    """Of three layers the second has no router; of the prompt's three tokens the last is asked for too."""
    stream, rows = asking(), [[[0, 1], [0, 0], [2, 3]], [[4, 5], [0, 0], [6, 7]], [[1, 0], [0, 0], [3, 2]]]
    assert stream.take(chunk([5])).ids == [] and stream.n_seen == 1
    new = stream.take(chunk([6], **LENGTH, **said(rows)))
    assert new.ids == [5, 6] and new.spans == [VersionSpan(START, 0, 2)]
    assert new.prompt_experts is not None and new.prompt_experts.tolist() == [[[0, 1], [2, 3]]]
    assert [row.tolist() for row in new.experts if row is not None] == [[[4, 5], [6, 7]], [[1, 0], [3, 2]]]
    pending = PendingDelta(new)
    pending.tokens.extend(NewTokens([7], [-7.0], [VersionSpan(START, 0, 1)], [], [None]))
    assert pending.delta("r").experts is None, "a delta has the experts of all its tokens, or of none"


def test_tokens_without_experts_leave_all_the_same() -> None:
    stream = asking()
    stream.take(chunk([5]))
    new = stream.take(chunk([6], **LENGTH))
    assert new.ids == [5, 6] and new.experts == [None, None] and new.prompt_experts is None
    assert PendingDelta(new).delta("r").experts is None


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (said([[[0, 1], [0, 0], [2, 3]]] * 2), "12 experts for 3 tokens"),
        (said([[[0, 1], [2, 3]]] * 3), "more than 2 layers"),
        (said([[[0, 1], [0, 0], [2, 8]]] * 3), r"expected ids in \[0, 8\)"),
        (said([[[0, -1], [0, 0], [2, 3]]] * 3), r"expected ids in \[0, 8\)"),
        (said([[[0, 1], [0, 0], [2, 2]]] * 3), "twice"),
        ({"routed_experts": "!"}, "base64"),
        ({"routed_experts": "AAA="}, "base64 of int32"),
    ],
)
def test_experts_that_cannot_be_are_an_error(told: dict[str, Any], says: str) -> None:
    stream = asking()
    stream.take(chunk([5]))
    with pytest.raises(StreamError, match=says):
        stream.take(chunk([6], **LENGTH, **told))
