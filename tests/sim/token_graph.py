"""Runs random conversations through the token graph and its segments, and holds both against the second account."""

from __future__ import annotations

import random

import numpy as np

from stillhouse.actors.trajectory.graph import Call, TokenGraph
from stillhouse.actors.trajectory.segments import Cut, SegmentCutter
from stillhouse.protocol.messages import Dropped, VersionSpan, WeightVersion
from tests.sim.conversations import Conversation, Tokens, check_sequences

VERSION = WeightVersion(1, 1)


def run_conversations(seeds: range) -> list[TokenGraph]:
    """One conversation per seed. Raises AssertionError, naming the seed, where the two accounts differ."""
    graphs: list[TokenGraph] = []
    for seed in seeds:
        draw = random.Random(seed)
        try:
            graph = run_conversation(
                seed,
                n_events=draw.randint(2, 40),
                vocabulary=draw.choice([2, 3, 5, 50]),
                segment_tokens=draw.choice([1, 2, 3, 7, 100]),
            )
        except AssertionError as error:
            raise AssertionError(f"conversation {seed}: {error}") from error
        graphs.append(graph)
    return graphs


def run_conversation(seed: int, *, n_events: int, vocabulary: int, segment_tokens: int) -> TokenGraph:
    """Raises AssertionError where the graph, its sequences or its segments differ from the second account."""
    talk = Conversation(seed, n_events=n_events, vocabulary=vocabulary)
    graph = TokenGraph()
    cutter = SegmentCutter(graph, segment_tokens)
    draw = random.Random(seed)
    calls: list[Call] = []
    cuts: list[Cut] = []
    for event in talk.events:
        match event.kind:
            case "begin":
                other = None if event.choice_of is None else calls[event.choice_of]
                calls.append(graph.begin(np.array(event.tokens, np.int32), choice_of=other))
            case "extend":
                call = calls[event.call]
                logprobs = np.array(event.serials, np.float32) if event.has_logprobs else None
                ids = np.array(event.tokens, np.int32)
                graph.extend(call, ids, logprobs, [VersionSpan(VERSION, 0, len(ids))])
                assert call.response is not None
                cuts += cutter.take(call.response) if draw.random() < 0.7 else cutter.take_early(call.response)
            case "end":
                graph.end(calls[event.call], delivered=event.delivered)
    for call, asked in zip(calls, talk.book, strict=True):
        assert tuple(graph.token_ids(call).tolist()) == asked.full, f"call {call.index}: other ids than the engine had"
    sequences = graph.sequences()
    check_sequences(
        talk, [(tuple(s.token_ids.tolist()), s.logprobs.tolist(), s.train_mask.tolist()) for s in sequences]
    )
    for sequence in sequences:
        covered = [t for span in sequence.spans for t in range(span.start, span.end)]
        assert covered == np.flatnonzero(sequence.train_mask).tolist(), "spans do not cover the tokens to train"
    rest = cutter.take_rest()
    assert bool(rest) == any(asked.response for asked in talk.book), "no last segment, or one without a response"
    _check_line(talk, cuts + rest, cutter.dropped(), segment_tokens)
    return graph


def _check_line(talk: Conversation, cuts: list[Cut], dropped: tuple[Dropped, ...], segment_tokens: int) -> None:
    """Read the segments as a receiver does, who knows nothing but them."""
    line: list[tuple[int, float, int]] = []  # token, log-prob, mask
    before: list[int] = []  # place of the token that each one follows, plus 1
    for cut in cuts:
        assert cut.start == len(line), "a gap in the line"
        assert 0 <= cut.follows <= cut.start and cut.end > cut.start, "an empty segment, or one that follows nothing"
        masks = cut.loss_mask.tolist()
        if cut.follows:
            assert cut.end - cut.start <= segment_tokens, "too long"
        line += zip(cut.token_ids.tolist(), cut.logprobs.tolist(), masks, strict=True)
        before += [cut.follows, *range(cut.start + 1, cut.end)]
        covered = [t for span in cut.spans for t in range(span.start, span.end)]
        assert covered == [cut.start + i for i, trained in enumerate(masks) if trained], "spans do not cover the mask"
    thrown = {place for one in dropped for place in range(one.start, one.end)}
    one_each: list[tuple[Tokens, list[float], list[bool]]] = []
    for place, (_, logprob, trained) in enumerate(line):
        if not trained or place in thrown:
            continue
        path: list[int] = []
        at = place + 1
        while at:
            path.append(line[at - 1][0])
            at = before[at - 1]
        n = len(path)
        one_each.append((tuple(path[::-1]), [0.0] * (n - 1) + [logprob], [False] * (n - 1) + [True]))
    check_sequences(talk, one_each)
