"""Cuts a token graph into segments, while the episode goes on. No I/O.

The segments of an episode stand one behind the other on a line: segment k covers [start, end) of it. `follows` is the
place on the line behind whose token a segment continues; it equals `start` unless the segment begins a branch, and 0
begins a new root. So a rollout without branches is the plain row of tokens that it was before there were graphs:

    rules task -- [a b STOP] -- result --+-- [c STOP]           line:  0 rules task a b STOP result c STOP  | d STOP
                                         +-- [d STOP]                                              follows: | 6

Tokens of the line are written once: a branch refers to what it shares with others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.actors.trajectory.graph import Node, Step, TokenGraph
from stillhouse.engines.base import Float32s, Int32s
from stillhouse.protocol.messages import Dropped, VersionSpan
from stillhouse.protocol.payloads.expert_ids import ExpertIds

_TAKEN: Final = np.zeros(0, np.int32)
_NO_EXPERTS: Final = np.zeros(0, np.uint16)


class Cut(NamedTuple):
    """One segment: tokens [start, end) of the line."""

    start: int
    end: int
    follows: int
    spans: tuple[VersionSpan, ...]
    """By offset on the line."""
    token_ids: Int32s
    """[n], n = end - start"""
    logprobs: Float32s
    """[n] 0 where `loss_mask` is 0."""
    loss_mask: npt.NDArray[np.uint8]
    """[n] 1: written by the student, with log-probs."""
    top_ids: dict[int, Int32s]
    """The student's likeliest tokens, for each of these n whose engine reported them."""
    experts: dict[int, ExpertIds]
    """What the engine's routers chose, likewise."""
    n_before: int
    """Tokens before it on its path."""


class Part(NamedTuple):
    """Tokens [start, end) of a node, in order to be cut."""

    node: Node
    start: int
    end: int


@dataclass(slots=True)
class _Placed:
    """Where the cut tokens of a node are on the line."""

    n: int = 0
    """Tokens of the node that were cut; they are its first ones."""
    pieces: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(token of the node, place on the line) at which each piece begins."""

    def place(self, at: int) -> int:
        """Place on the line of token `at` of the node."""
        start, place = next(piece for piece in reversed(self.pieces) if piece[0] <= at)
        return place + at - start


class SegmentCutter:
    """Takes each token of a graph out of it at most once.

    A segment holds at most `segment_tokens` tokens; the first one of a root also holds the tokens before its first
    response. What was taken of a segment before it was complete makes the next one shorter: rollouts that were asked
    for it at the same moment do not go on in step. Raises ValueError for `segment_tokens` below 1."""

    def __init__(self, graph: TokenGraph, segment_tokens: int) -> None:
        if segment_tokens < 1:
            raise ValueError(f"segment_tokens: got {segment_tokens}, expected at least 1")
        self._graph = graph
        self._segment_tokens = segment_tokens
        self._placed: dict[Node, _Placed] = {}
        self._n_early = 0
        """Tokens taken of the segment that is not complete."""
        self.n_cut = 0
        """Length of the line so far."""

    def take(self, node: Node) -> list[Cut]:
        """Complete segments of the path that ends with this response. Its newest token stays, so that the end of the
        episode always has a segment."""
        return self._take(node, rest=False)

    def take_early(self, node: Node) -> list[Cut]:
        """All that is there of the path that ends with this response, but for its newest token. No segment without a
        response."""
        cuts = self.take(node)
        parts, follows = self._uncut(node)
        parts, _ = _split(parts, sum(part.end - part.start for part in parts) - 1)
        n, n_context = sum(part.end - part.start for part in parts), _n_leading_context(parts)
        if n > n_context:
            cuts.append(self._cut(parts, follows))
            self._n_early += n - n_context if follows == 0 else n
        return cuts

    def take_rest(self) -> list[Cut]:
        """At the end of the episode: all that is left of the responses that are trained. Never empty if there is a
        response: where everything to train is cut already, the rest of a dropped one makes the last segment."""
        cuts = [cut for leaf in self._graph.leaves() for cut in self._take(leaf, rest=True)]
        if not cuts:
            nodes = [call.response for call in self._graph.calls if call.response is not None]
            cuts = next((rest for node in reversed(nodes) if (rest := self._take(node, rest=True))), [])
        return cuts

    def dropped(self) -> tuple[Dropped, ...]:
        """Ranges of the line with responses that are not trained: most were cut before that was known. Call it after
        `take_rest`."""
        ranges: list[Dropped] = []
        for node, drop in self._graph.dropped().items():
            placed = self._placed.get(node, _Placed())
            ends = [start for start, _ in placed.pieces[1:]] + [placed.n]
            for (start, place), end in zip(placed.pieces, ends, strict=False):
                ranges.append(Dropped(place, place + end - start, drop.value))
        return tuple(sorted(ranges, key=lambda one: one.start))

    def end_of(self, node: Node) -> int | None:
        """Place on the line behind the last token of a response; None if it is not (wholly) there."""
        placed = self._placed.get(node)
        return None if placed is None or placed.n < len(node) or not len(node) else placed.place(len(node) - 1) + 1

    def _take(self, node: Node, *, rest: bool) -> list[Cut]:
        parts, follows = self._uncut(node)
        n_left = sum(part.end - part.start for part in parts)
        limit = self._segment_tokens - self._n_early + (_n_leading_context(parts) if follows == 0 else 0)
        cuts: list[Cut] = []
        while n_left > limit or (rest and n_left):
            n = min(n_left, limit)
            now, parts = _split(parts, n)
            cuts.append(self._cut(now, follows))
            n_left -= n
            follows, limit, self._n_early = self.n_cut, self._segment_tokens, 0
        return cuts

    def _uncut(self, node: Node) -> tuple[list[Part], int]:
        """What is not yet cut of the path to the end of this node, and the place behind whose token it continues."""
        parts: list[Part] = []
        step: Step | None = Step(node, len(node))
        while step is not None:
            placed = self._placed.get(step.node)
            n = 0 if placed is None else placed.n
            if n < step.end:
                parts.append(Part(step.node, n, step.end))
            if placed is not None and min(n, step.end):
                return parts[::-1], placed.place(min(n, step.end) - 1) + 1
            step = None if step.node.parent is None else Step(step.node.parent, step.node.at)
        return parts[::-1], 0

    def _cut(self, parts: list[Part], follows: int) -> Cut:
        start = self.n_cut
        n = sum(part.end - part.start for part in parts)
        ids, logprobs, mask = np.zeros(n, np.int32), np.zeros(n, np.float32), np.zeros(n, np.uint8)
        spans: list[VersionSpan] = []
        top_ids, experts = dict[int, Int32s](), dict[int, ExpertIds]()
        at = 0
        for node, begin, end in parts:
            here = slice(at, at + end - begin)
            ids[here] = node.ids[begin:end]
            for token in node.experts.keys() & range(begin, end):
                experts[at + token - begin], node.experts[token] = node.experts[token], _NO_EXPERTS
            if node.trainable:
                logprobs[here], mask[here] = node.logprobs[begin:end], 1
                top_ids.update(enumerate(node.top_ids[begin:end], at))
                node.top_ids[begin:end] = [_TAKEN] * len(node.top_ids[begin:end])
                for span in node.spans:
                    a, b = max(span.start, begin), min(span.end, end)
                    if a < b:
                        spans.append(VersionSpan(span.version, start + at + a - begin, start + at + b - begin))
            placed = self._placed.setdefault(node, _Placed())
            if not placed.n or placed.place(begin) != start + at:
                placed.pieces.append((begin, start + at))
            placed.n = end
            at = here.stop
        self.n_cut = start + n
        n_before = parts[0].node.n_before + parts[0].start if parts else 0
        return Cut(start, self.n_cut, follows, tuple(spans), ids, logprobs, mask, top_ids, experts, n_before)


def _n_leading_context(parts: list[Part]) -> int:
    n = 0
    for part in parts:
        if part.node.sampled:
            break
        n += part.end - part.start
    return n


def _split(parts: list[Part], n: int) -> tuple[list[Part], list[Part]]:
    now: list[Part] = []
    for i, part in enumerate(parts):
        if n < part.end - part.start:
            middle = part.start + n
            head = [Part(part.node, part.start, middle)] if n else []
            return now + head, [Part(part.node, middle, part.end), *parts[i + 1 :]]
        now.append(part)
        n -= part.end - part.start
    return now, []
