r"""The token graph: what an engine read and wrote in one episode, each token stored once. No I/O.

    call  prompt                              response
    1     rules task                          a b STOP
    2     rules task a b STOP result          c STOP        continues call 1
    3     rules task a b STOP result          d STOP        repeats call 2: a retry
    4     rules summary                       e STOP        a root: the agent rewrote its history

    rules --+-- task -- [a b STOP] -- result --+-- [c STOP]
            |                                  +-- [d STOP]
            +-- summary -- [e STOP]                             [..]: written by the student

A node holds the tokens that one call added: context, or one response. The path from the root to the end of a response
is exactly what the engine read and wrote, because only the engine's own token ids enter the graph: text is never
tokenised a second time. A prompt joins the known path with which it shares the most tokens, and leaves it at the first
different one.

`sequences` says what is to be trained: one per leaf, in which each response is trained once, by the first leaf behind
it; in the other leaves it is context. A run trains the same, from `actors.trajectory.segments`. `dropped` names the
responses that are not trained at all.

The owner calls all methods from one thread. Shapes: n = tokens of the item at hand.
"""

# Why it is so: docs/decisions/token-graph.md

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.engines.base import Float32s, Int32s
from stillhouse.protocol.messages import VersionSpan
from stillhouse.protocol.payloads.expert_ids import ExpertIds


class Origin(enum.StrEnum):
    """How the prompt of a call relates to the calls before it."""

    ROOT = "root"
    """It holds no earlier response: the first call, a sub-agent, or a history that was summarised."""
    CONTINUES = "continues"
    """It extends an earlier response: the next turn."""
    REPEATS = "repeats"
    """It equals the prompt of an earlier call."""
    FORKS = "forks"
    """It leaves a known path behind its first response: a changed history, or a response that was tokenised again."""


class Drop(enum.StrEnum):
    """Why a response is not trained."""

    RETRIED = "retried"
    """The same prompt was sent again, and the agent went on from another response to it."""
    UNDELIVERED = "undelivered"
    """The caller was gone before the response ended, and nothing followed it."""


@dataclass(eq=False, slots=True)
class Node:
    """Tokens that follow the first `at` tokens of `parent`. A root has no parent, and `at` is 0."""

    index: int
    parent: Node | None
    at: int
    sampled: bool
    """Written by the student in answer to a call; otherwise context."""
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """Behaviour log-probs, one per token of a response that has them; otherwise empty."""
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    """Weight versions of a response's tokens, offsets relative to its first one."""
    top_ids: list[Int32s] = field(default_factory=list[Int32s])
    """The student's likeliest tokens at the place of each token of a response, if they were asked for. They are large,
    and wanted once: whoever takes them leaves empty sets."""
    experts: dict[int, ExpertIds] = field(default_factory=dict[int, ExpertIds])
    """By token, what the engine's routers chose in the pass that predicts it, if it was asked for and reported:
    [layers, chosen]. Whoever takes them leaves empty ones."""
    children: dict[int, dict[int, list[Node]]] = field(default_factory=dict[int, dict[int, list["Node"]]])
    """Nodes that follow this one: by their `at`, then by their first token."""
    followed: bool = False
    """A later prompt holds at least its first token."""

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        kind = "response" if self.sampled else "context"
        behind = "root" if self.parent is None else f"behind token {self.at} of node {self.parent.index}"
        return f"<Node {self.index}: {len(self)} tokens of {kind}, {behind}>"

    @property
    def n_before(self) -> int:
        """Tokens before its first one, from the root on."""
        n, node = 0, self
        while node.parent is not None:
            n, node = n + node.at, node.parent
        return n

    @property
    def trainable(self) -> bool:
        """A response without log-probs is context: an importance ratio would be made from an invented number."""
        return bool(self.logprobs)


class Step(NamedTuple):
    """Part of a path: the first `end` tokens of a node."""

    node: Node
    end: int


@dataclass(eq=False, slots=True)
class Call:
    """One request to the engine: its prompt ends behind the first `at` tokens of `node`."""

    index: int
    node: Node
    at: int
    origin: Origin
    first_choice: int
    """Index of the call that this one is another choice of (its own, if none). Choices are siblings on purpose."""
    drift: int = 0
    """Tokens of a response that the prompt begins to repeat and then leaves: they came back as other tokens."""
    response: Node | None = None
    """None until the first token."""
    ended: bool = False
    delivered: bool = True


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One root-to-leaf path as training reads it."""

    token_ids: Int32s
    """[n]"""
    logprobs: Float32s
    """[n] Behaviour log-probs; 0 where `train_mask` is False."""
    train_mask: npt.NDArray[np.bool_]
    """[n]"""
    spans: tuple[VersionSpan, ...]
    """Versions of the tokens to train, by offset in this sequence."""


@dataclass(frozen=True, slots=True)
class GraphCounts:
    """Sums over one episode."""

    calls: int
    by_origin: dict[Origin, int]
    drift_tokens: int
    dropped_responses: dict[Drop, int]
    dropped_tokens: int


class TokenGraph:
    """All calls of one episode."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._n_nodes = 0
        self._roots: dict[int, list[Node]] = {}
        self._by_prompt: dict[bytes, list[Call]] = {}
        """Calls by a digest of their prompt."""

    def begin(self, prompt_ids: Int32s, *, retry: bool = True, choice_of: Call | None = None) -> Call:
        """Enter a call with the prompt [n] that the engine reads.

        `retry`: with the prompt of an earlier call, the caller no longer wants the first response; otherwise it wants
        several, as with `choice_of`. `choice_of`: a call with the same prompt whose caller asked for several responses
        at once. Raises ValueError for an empty prompt."""
        if prompt_ids.ndim != 1 or prompt_ids.size == 0:
            raise ValueError(f"got a prompt of shape {prompt_ids.shape}, expected token ids [n], n >= 1")
        index = len(self.calls)
        key = blake2b(np.ascontiguousarray(prompt_ids, np.int32).tobytes(), digest_size=16).digest()
        same = self._by_prompt.setdefault(key, [])
        if choice_of is not None:
            if choice_of not in same:
                raise ValueError(f"call {choice_of.index} has another prompt, so this is no other choice of it")
            call = replace(choice_of, index=index, drift=0, response=None, ended=False, delivered=True)
        elif same:
            first_choice = index if retry else same[0].first_choice
            call = Call(index, same[0].node, same[0].at, Origin.REPEATS, first_choice)
        else:
            call = self._place(index, prompt_ids)
        same.append(call)
        self.calls.append(call)
        return call

    def extend(
        self,
        call: Call,
        token_ids: Int32s,
        logprobs: Float32s | None,
        spans: Sequence[VersionSpan],
        top_ids: Sequence[Int32s] = (),
        experts: ExpertIds | None = None,
    ) -> None:
        """Add tokens [n] that the student wrote in answer to a call.

        `logprobs` [n]: None where the engine gave none; the whole response is context then. `spans` cover [0, n) in
        order, relative to the first of these tokens. `top_ids`: n sets, or none. `experts`: [n, ...]. Raises
        ValueError for other shapes or spans, RuntimeError after `end`. On an error nothing is added."""
        if call.ended:
            raise RuntimeError(f"call {call.index} has ended, got {token_ids.size} more tokens")
        n = int(token_ids.size)
        if token_ids.shape != (n,) or (logprobs is not None and logprobs.shape != (n,)):
            shape = None if logprobs is None else logprobs.shape
            raise ValueError(f"token ids of shape {token_ids.shape} with log-probs of shape {shape}, expected [n] both")
        edges = [0, *(span.end for span in spans)]
        if edges[-1] != n or any(s.start != e or s.end <= s.start for s, e in zip(spans, edges, strict=False)):
            raise ValueError(f"version spans {tuple(spans)} do not cover tokens 0..{n} in order")
        if top_ids and len(top_ids) != n:
            raise ValueError(f"{len(top_ids)} sets of likeliest tokens for {n} tokens, expected one each")
        if n == 0:
            return
        node = call.response
        if node is not None and bool(node.logprobs) != (logprobs is not None):
            raise ValueError(f"call {call.index}: log-probs for a part of the response only, expected all or none")
        if node is None:
            node = call.response = self._add_node(call.node, call.at, sampled=True, ids=token_ids)
        else:
            _append(node.ids, token_ids, np.int32)
        start = len(node) - n
        if experts is not None:
            node.experts.update(enumerate(experts, start))
        node.top_ids += top_ids
        if logprobs is not None:
            _append(node.logprobs, logprobs, np.float32)
        for span in spans:
            last = node.spans[-1] if node.spans else None
            if last is not None and last.version == span.version:
                node.spans[-1] = VersionSpan(last.version, last.start, start + span.end)
            else:
                node.spans.append(VersionSpan(span.version, start + span.start, start + span.end))

    def end(self, call: Call, *, delivered: bool = True) -> None:
        """End a response. `delivered`: the caller was still there to read it."""
        call.ended, call.delivered = True, delivered

    def with_experts(self, call: Call) -> int:
        """Tokens at the beginning of the call's prompt whose experts are known; its first one has none."""
        n = 1
        for node, at, token in _tokens_before(call):
            if at and token not in node.experts:
                break
            n = at + 1
        return n

    def add_experts(self, call: Call, experts: ExpertIds) -> None:
        """Note the `experts` of the last tokens of the call's prompt. Tokens that have some keep theirs."""
        tokens = list(_tokens_before(call))
        for (node, _, token), one_LK in zip(tokens[len(tokens) - len(experts) :], experts, strict=True):
            node.experts.setdefault(token, one_LK)

    # -------------------------------------------------------------------------------------------------- reading

    def token_ids(self, call: Call) -> Int32s:
        """[n] The call's prompt and its response so far."""
        return _joined([step.node.ids[: step.end] for step in self.path(call)])

    def path(self, call: Call) -> list[Step]:
        """The nodes from the root to the end of the call's response, or of its prompt while there is none."""
        return _path_to(call.node, call.at) if call.response is None else _path_to(call.response)

    def dropped(self) -> dict[Node, Drop]:
        """Responses that are not trained. Final once the episode is over: a later call may go on from any of them."""
        drops: dict[Node, Drop] = {}
        for calls in self._by_prompt.values():
            answers = [(call, call.response) for call in calls if call.response is not None]
            kept = {call.first_choice for call, response in answers if response.followed}
            if not kept:
                # Nobody went on from any of them: the newest one that was delivered is what the caller has.
                kept = {call.first_choice for call, _ in [a for a in answers if a[0].delivered][-1:]}
            for call, response in answers:
                if not (call.delivered or response.followed):
                    drops[response] = Drop.UNDELIVERED
                elif call.first_choice not in kept:
                    drops[response] = Drop.RETRIED
        return drops

    def leaves(self) -> list[Node]:
        """Responses to train that no other response to train follows, in the order of their calls."""
        drops = self.dropped()
        kept = [call.response for call in self.calls if call.response is not None and call.response not in drops]
        inner = {
            step.node
            for response in kept
            for step in _path_to(response)[:-1]
            if step.node.sampled and step.end == len(step.node)
        }
        return [response for response in kept if response not in inner]

    def sequences(self) -> list[TokenSequence]:
        """One sequence per leaf that has something left to train."""
        trained: set[Node] = set()
        found: list[TokenSequence] = []
        for leaf in self.leaves():
            steps = _path_to(leaf)
            new = {s.node for s in steps if s.node.trainable and s.end == len(s.node)} - trained
            trained |= new
            if new:
                found.append(_sequence(steps, new))
        return found

    @property
    def counts(self) -> GraphCounts:
        drops = self.dropped()
        reasons = list(drops.values())
        return GraphCounts(
            calls=len(self.calls),
            by_origin={origin: sum(call.origin is origin for call in self.calls) for origin in Origin},
            drift_tokens=sum(call.drift for call in self.calls),
            dropped_responses={drop: reasons.count(drop) for drop in Drop},
            dropped_tokens=sum(len(node) for node in drops),
        )

    # ------------------------------------------------------------------------------------------------ internals

    def _longest_match(self, prompt_ids: Int32s) -> tuple[Node | None, int, int]:
        """Where the longest known beginning of the prompt ends: (node, tokens of it, tokens of the prompt).

        Token-identical paths exist where two responses begin alike. Among equals a whole response wins over the
        beginning of one, and that over context; then the newest: after a timeout and a retry, the caller has read
        that."""
        best, best_node, best_at = (0, 0, -1), None, 0
        stack = [(node, 0) for node in self._roots.get(int(prompt_ids[0]), ())]
        while stack:
            node, n_before = stack.pop()
            n_same = _common_prefix(node.ids, prompt_ids[n_before:])
            rank = (n_before + n_same, node.sampled + (node.sampled and n_same == len(node)), node.index)
            if rank > best:
                best, best_node, best_at = rank, node, n_same
            for at, by_first in node.children.items():
                if at <= n_same and n_before + at < prompt_ids.size:
                    following = by_first.get(int(prompt_ids[n_before + at]), ())
                    stack.extend((child, n_before + at) for child in following)
        return best_node, best_at, best[0]

    def _place(self, index: int, prompt_ids: Int32s) -> Call:
        """The call with a prompt that is new."""
        node, at, n_known = self._longest_match(prompt_ids)
        origin, drift = Origin.ROOT, 0
        if node is not None:
            node.followed = True
            if any(step.node.sampled for step in _path(node, at)):
                origin = Origin.CONTINUES if node.sampled and at == len(node) else Origin.FORKS
                drift = len(node) - at if node.sampled else 0
        if n_known < prompt_ids.size:
            node = self._add_node(node, at, sampled=False, ids=prompt_ids[n_known:])
            at = len(node)
        assert node is not None  # the prompt is not empty
        return Call(index, node, at, origin, index, drift)

    def _add_node(self, parent: Node | None, at: int, *, sampled: bool, ids: Int32s) -> Node:
        node = Node(self._n_nodes, parent, at, sampled)
        self._n_nodes += 1
        _append(node.ids, ids, np.int32)
        siblings = self._roots if parent is None else parent.children.setdefault(at, {})
        siblings.setdefault(node.ids[0], []).append(node)
        return node


def _path(node: Node, end: int) -> Iterator[Step]:
    step: Step | None = Step(node, end)
    while step is not None:
        yield step
        step = None if step.node.parent is None else Step(step.node.parent, step.node.at)


def _tokens_before(call: Call) -> Iterator[tuple[Node, int, int]]:
    """The tokens of a call's prompt: (node, place in the prompt, place in the node)."""
    at = 0
    for node, end in _path_to(call.node, call.at):
        for token in range(end):
            yield node, at, token
            at += 1


def _path_to(node: Node, end: int | None = None) -> list[Step]:
    """From the root to token `end` of this node, or to its last one."""
    return list(_path(node, len(node) if end is None else end))[::-1]


def _sequence(steps: Sequence[Step], to_train: set[Node]) -> TokenSequence:
    ids = _joined([step.node.ids[: step.end] for step in steps])
    logprobs = np.zeros(ids.size, np.float32)
    mask = np.zeros(ids.size, np.bool_)
    spans: list[VersionSpan] = []
    start = 0
    for node, end in steps:
        if node in to_train:
            logprobs[start : start + end] = node.logprobs
            mask[start : start + end] = True
            spans += [VersionSpan(s.version, start + s.start, start + s.end) for s in node.spans]
        start += end
    return TokenSequence(ids, logprobs, mask, tuple(spans))


def _joined(parts: Sequence[array[int]]) -> Int32s:
    return np.concatenate([np.frombuffer(part, np.int32) for part in parts])


def _append(to: array[int] | array[float], values: npt.NDArray[np.generic], dtype: type[np.generic]) -> None:
    to.frombytes(np.ascontiguousarray(values, dtype=dtype).tobytes())


def _common_prefix(ids: array[int], prompt_ids: Int32s) -> int:
    n = min(len(ids), prompt_ids.size)
    differs = np.frombuffer(ids, np.int32, n) != prompt_ids[:n]
    return int(differs.argmax()) if differs.any() else n
