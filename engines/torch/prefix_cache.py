"""Keys and values of the prefixes of growing rollouts, kept by an embedded teacher between two leases.

    rollout a   [prompt, turn 1] <- [turn 2] <- [turn 3]        a node: the tokens that one scoring added
                             ^------ [other turn 2]             a branch begins anywhere inside a node

What is found is decided by token ids alone: the longest kept path with which the request begins. So branches, prompts
of the teacher's own and repeated leases need no rules, and a rollout that comes back changed finds only what is the
same. The rollout's id bounds the search, and says what to drop when it is over.

Nodes are in order of use, those of a path from its end to its beginning. The first node is therefore never needed by
another one, and eviction takes it; what is left of a rollout is its beginning, which can still be used.
"""

# Why it is so: docs/decisions/prefix-cache.md

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from stillhouse.engines.base import Int32s
from stillhouse.models.past import Cells, CellSpan, Past


@dataclass(slots=True, eq=False)
class _Node:
    """Tokens after the first `at` tokens of the path to its parent (all of them, or fewer: a branch)."""

    rollout_id: str
    parent: _Node | None
    at: int
    ids: Int32s
    cells: Cells
    round: int
    children: list[_Node] = field(default_factory=list["_Node"])

    @property
    def end(self) -> int:
        return self.at + len(self.ids)


class PrefixCache:
    """The only owner of these bytes. A round is one call of the scorer: nothing that it has found or added is evicted
    within it. Not thread-safe."""

    def __init__(self, max_bytes: int, bytes_per_token: int) -> None:
        self.max_bytes = max_bytes
        self._bytes_per_token = bytes_per_token
        self._nodes: OrderedDict[int, _Node] = OrderedDict()
        """By identity; the next to be evicted comes first."""
        self._roots: dict[str, list[_Node]] = {}
        self._tokens = 0
        self._round = 0
        self._hits = 0
        self._evicted_tokens = 0

    @property
    def kept_bytes(self) -> int:
        return self._tokens * self._bytes_per_token

    @property
    def stats(self) -> Mapping[str, float]:
        """Gauges for the heartbeat."""
        return {
            "prefix_hits_total": float(self._hits),
            "prefix_evicted_tokens_total": float(self._evicted_tokens),
            "prefix_tokens": float(self._tokens),
        }

    def begin_round(self) -> None:
        self._round += 1

    def find(self, rollout_id: str, ids: Int32s, limit: int) -> Past | None:
        """The longest kept beginning of `ids`, cut at `limit` tokens; None if there is none."""
        path = self._match(rollout_id, ids)
        self._touch(path)
        pieces: list[CellSpan] = []
        for node, end in path:
            n_tokens = min(end, limit) - node.at
            if n_tokens > 0:
                pieces.append(CellSpan(node.cells, n_tokens))
        self._hits += bool(pieces)
        return Past(tuple(pieces)) if pieces else None

    def add(self, rollout_id: str, ids: Int32s) -> tuple[Cells, int] | None:
        """Cells for those of `ids` that are not kept yet, and their number: they are the last ones. The caller fills
        the cells before the next round. None: all are kept, or there is no room."""
        path = self._match(rollout_id, ids)
        self._touch(path)
        parent, at = path[-1] if path else (None, 0)
        n_tokens = len(ids) - at
        if n_tokens == 0 or not self._make_room(n_tokens):
            return None
        node = _Node(rollout_id, parent, at, ids[at:].copy(), Cells(), self._round)
        (self._roots.setdefault(rollout_id, []) if parent is None else parent.children).append(node)
        self._nodes[id(node)] = node
        self._tokens += n_tokens
        self._touch(path)
        return node.cells, n_tokens

    def release(self, rollout_id: str) -> None:
        """Drop what is kept of a rollout. Unknown ids are ignored: it may have been evicted."""
        left = self._roots.pop(rollout_id, [])
        while left:
            node = left.pop()
            left += node.children
            del self._nodes[id(node)]
            self._tokens -= len(node.ids)

    def clear(self) -> None:
        self._nodes.clear()
        self._roots.clear()
        self._tokens = 0

    def _match(self, rollout_id: str, ids: Int32s) -> list[tuple[_Node, int]]:
        """The nodes of the longest kept beginning of `ids`, and the position up to which each is read."""
        path: list[tuple[_Node, int]] = []
        siblings, at = self._roots.get(rollout_id, []), 0
        while at < len(ids):
            node = next((node for node in siblings if node.at == at and node.ids[0] == ids[at]), None)
            if node is None:
                break
            at += _n_equal(node.ids, ids[at:])
            path.append((node, at))
            siblings = node.children
        return path

    def _touch(self, path: list[tuple[_Node, int]]) -> None:
        for node, _ in reversed(path):
            node.round = self._round
            self._nodes.move_to_end(id(node))

    def _make_room(self, n_tokens: int) -> bool:
        wanted = n_tokens * self._bytes_per_token
        while self.kept_bytes + wanted > self.max_bytes:
            oldest = next(iter(self._nodes.values()), None)
            if oldest is None or oldest.round == self._round or wanted > self.max_bytes:
                return False
            self._evict(oldest)
        return True

    def _evict(self, node: _Node) -> None:
        siblings = self._roots[node.rollout_id] if node.parent is None else node.parent.children
        siblings.remove(node)
        if node.parent is None and not siblings:
            del self._roots[node.rollout_id]
        del self._nodes[id(node)]
        self._tokens -= len(node.ids)
        self._evicted_tokens += len(node.ids)


def _n_equal(a: Int32s, b: Int32s) -> int:
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n
