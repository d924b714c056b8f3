"""Cutting a token graph into segments. Random graphs are in test_graph.py."""

from __future__ import annotations

import pytest

from stillhouse.actors.trajectory.graph import TokenGraph
from stillhouse.actors.trajectory.segments import Cut, SegmentCutter
from stillhouse.protocol.branches import path_to
from stillhouse.protocol.messages import Branch
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


def test_each_segment_says_how_much_its_tokens_read_before_them() -> None:
    """On its path, and not on the line, where other branches stand before it. An actor counts its compute by this."""
    graph = TokenGraph()
    for prompt, response in (("r.", "ab"), ("r.ab+", "cd"), ("r.ax", "efghi"), ("s.", "jk"), ("r.axefy", "l")):
        answer(graph, prompt, response)
    cuts = SegmentCutter(graph, 2).take_rest()
    branches = [Branch(cut.start, cut.follows) for cut in cuts if cut.follows != cut.start]
    assert len(branches) == 3
    for cut in cuts:
        assert cut.n_before == sum(end - start for start, end in path_to(branches, cut.start + 1)) - 1
    assert any(cut.n_before < cut.start for cut in cuts)


def test_segments_below_one_token_are_refused() -> None:
    with pytest.raises(ValueError, match="got 0, expected at least 1"):
        SegmentCutter(TokenGraph(), 0)
