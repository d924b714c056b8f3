"""The token graph on conversations written out by hand, and on random ones against a second account."""

from __future__ import annotations

import numpy as np
import pytest

from stillhouse.actors.trajectory.graph import Drop, Origin, TokenGraph
from stillhouse.protocol.messages import VersionSpan, WeightVersion
from tests.actors.trajectory.letters import V1, answer, ids, write
from tests.sim.token_graph import run_conversations

V2 = WeightVersion(1, 2)


def trained(graph: TokenGraph) -> list[str]:
    """Each sequence as text; letters that are trained in capitals."""
    return [
        "".join(
            chr(token).upper() if trains else chr(token)
            for token, trains in zip(s.token_ids.tolist(), s.train_mask.tolist(), strict=True)
        )
        for s in graph.sequences()
    ]


def test_a_choice_needs_the_prompt_of_its_call() -> None:
    graph = TokenGraph()
    first = answer(graph, "rules.", "ab")
    with pytest.raises(ValueError, match="another prompt"):
        graph.begin(ids("other."), choice_of=first)


def test_a_response_that_came_back_as_other_tokens_forks_and_counts_its_drift() -> None:
    graph = TokenGraph()
    answer(graph, "rules.", "abcd")
    drifted = answer(graph, "rules.abxy+", "e")
    assert (drifted.origin, drifted.drift) == (Origin.FORKS, 2)
    assert trained(graph) == ["rules.ABCD", "rules.abxy+E"]
    assert graph.counts.drift_tokens == 2


def test_spans_of_a_response_are_merged_and_moved_to_its_place() -> None:
    graph = TokenGraph()
    call = graph.begin(ids("rules."))
    logprobs = np.zeros(2, np.float32)
    graph.extend(call, ids("ab"), logprobs, [VersionSpan(V1, 0, 2)])
    graph.extend(call, ids("cd"), logprobs, [VersionSpan(V1, 0, 1), VersionSpan(V2, 1, 2)])
    assert graph.sequences()[0].spans == (VersionSpan(V1, 6, 9), VersionSpan(V2, 9, 10))


@pytest.mark.parametrize(
    ("tokens", "logprobs", "spans", "message"),
    [
        (2, 1, [VersionSpan(V1, 0, 2)], r"shape \(2,\) with log-probs of shape \(1,\)"),
        (2, 2, [], "do not cover tokens 0..2"),
        (2, 2, [VersionSpan(V1, 0, 1)], "do not cover tokens 0..2"),
        (2, 2, [VersionSpan(V1, 0, 1), VersionSpan(V1, 0, 2)], "do not cover tokens 0..2"),
        (2, None, [VersionSpan(V1, 0, 2)], "log-probs for a part of the response only"),
    ],
)
def test_a_malformed_delta_is_refused_and_adds_nothing(
    tokens: int, logprobs: int | None, spans: list[VersionSpan], message: str
) -> None:
    graph = TokenGraph()
    call = graph.begin(ids("rules."))
    write(graph, call, "a")
    given = None if logprobs is None else np.zeros(logprobs, np.float32)
    with pytest.raises(ValueError, match=message):
        graph.extend(call, np.zeros(tokens, np.int32), given, spans)
    assert graph.token_ids(call).tolist() == ids("rules.a").tolist()


def test_an_ended_call_takes_no_more_tokens_and_an_empty_prompt_is_refused() -> None:
    graph = TokenGraph()
    call = answer(graph, "rules.", "a")
    with pytest.raises(RuntimeError, match="call 0 has ended"):
        write(graph, call, "b")
    with pytest.raises(ValueError, match="expected token ids"):
        graph.begin(ids(""))


def test_counts_name_what_happened() -> None:
    graph = TokenGraph()
    answer(graph, "rules.", "ab")
    answer(graph, "rules.", "xyz")
    answer(graph, "rules.ab+", "c")
    counts = graph.counts
    assert counts.calls == 3
    assert counts.by_origin == {Origin.ROOT: 1, Origin.REPEATS: 1, Origin.CONTINUES: 1, Origin.FORKS: 0}
    assert counts.dropped_responses == {Drop.RETRIED: 1, Drop.UNDELIVERED: 0}
    assert counts.dropped_tokens == 3


def test_random_conversations_agree_with_the_second_account() -> None:
    run_conversations(range(350))


@pytest.mark.slow
def test_many_random_conversations_agree_with_the_second_account() -> None:
    run_conversations(range(350, 30_000))
