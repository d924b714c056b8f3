"""Cutting a token graph into segments. Random graphs are in test_graph.py."""

from __future__ import annotations

import pytest

from stillhouse.actors.trajectory.graph import TokenGraph
from stillhouse.actors.trajectory.segments import Cut, SegmentCutter
from stillhouse.protocol.messages import Dropped
from tests.actors.trajectory.letters import answer, ids, write


def shown(cut: Cut) -> str:
    """`follows|tokens`, trained ones in capitals."""
    letters = zip(cut.token_ids.tolist(), cut.loss_mask.tolist(), strict=True)
    return f"{cut.follows}|" + "".join(chr(token).upper() if mask else chr(token) for token, mask in letters)


def test_the_first_segment_also_holds_the_prompt_and_the_newest_token_waits() -> None:
    graph = TokenGraph()
    cutter = SegmentCutter(graph, 2)
    call = graph.begin(ids("rules."))
    seen: list[str] = []
    for letter in "abcde":
        write(graph, call, letter)
        assert call.response is not None
        seen.append(" ".join(shown(cut) for cut in cutter.take(call.response)))
    assert seen == ["", "", "0|rules.AB", "", "8|CD"]
    assert [shown(cut) for cut in cutter.take_rest()] == ["10|E"]


def test_a_branch_names_the_place_that_it_follows_and_repeats_nothing() -> None:
    graph = TokenGraph()
    cutter = SegmentCutter(graph, 3)
    answer(graph, "rules.", "ab")
    answer(graph, "rules.ab+", "c")
    answer(graph, "rules.a?", "d")
    assert [shown(cut) for cut in cutter.take_rest()] == ["0|rules.AB+", "9|C", "7|?D"]


def test_a_dropped_response_is_not_cut_unless_it_was_already() -> None:
    graph = TokenGraph()
    cutter = SegmentCutter(graph, 2)
    early = answer(graph, "r.", "abcd")
    assert early.response is not None
    assert [shown(cut) for cut in cutter.take(early.response)] == ["0|r.AB"]
    answer(graph, "r.", "xy")
    answer(graph, "r.xy+", "z")
    assert [shown(cut) for cut in cutter.take_rest()] == ["2|XY", "6|+Z"]
    assert cutter.dropped() == (Dropped(2, 4, "retried"),)


def test_the_last_segment_is_never_missing() -> None:
    """All that is trained is cut already, because a response that is dropped now had followed it."""
    graph = TokenGraph()
    cutter = SegmentCutter(graph, 1)
    answer(graph, "r.", "a")
    gone = answer(graph, "r.a+", "bc", delivered=False)
    assert gone.response is not None
    assert [shown(cut) for cut in cutter.take(gone.response)] == ["0|r.A", "3|+", "4|B"]
    assert [shown(cut) for cut in cutter.take_rest()] == ["5|C"]
    assert cutter.dropped() == (Dropped(4, 6, "undelivered"),)


def test_what_is_there_leaves_early_but_for_its_newest_token_and_the_next_segment_is_shorter() -> None:
    graph = TokenGraph()
    cutter = SegmentCutter(graph, 4)
    call = graph.begin(ids("rules."))
    seen: list[str] = []
    for letter in "abcdefghijk":
        write(graph, call, letter)
        assert call.response is not None
        take = cutter.take_early if letter in "adeh" else cutter.take
        seen.append(" ".join(shown(cut) for cut in take(call.response)))
    assert seen == ["", "", "", "0|rules.ABC", "9|D", "", "", "10|EFG", "13|H", "", ""], "whole ones end at d and h"
    assert [shown(cut) for cut in cutter.take_rest()] == ["14|IJK"]


def test_a_segment_that_leaves_early_is_not_one_of_context_alone() -> None:
    graph = TokenGraph()
    cutter = SegmentCutter(graph, 9)
    first = answer(graph, "r.", "ab")
    assert first.response is not None
    assert [shown(cut) for cut in cutter.take_early(first.response)] == ["0|r.A"]
    assert cutter.take_early(first.response) == []
    second = graph.begin(ids("r.ab+++"))
    write(graph, second, "c")
    assert second.response is not None
    assert [shown(cut) for cut in cutter.take_early(second.response)] == ["3|B+++"]
    write(graph, second, "d")
    assert [shown(cut) for cut in cutter.take_early(second.response)] == ["7|C"]
    assert [shown(cut) for cut in cutter.take_rest()] == ["8|D"]


def test_segments_below_one_token_are_refused() -> None:
    with pytest.raises(ValueError, match="got 0, expected at least 1"):
        SegmentCutter(TokenGraph(), 0)
