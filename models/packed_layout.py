"""The layout of sequences in one row of T tokens: packs, attention buckets, and permutations between them.

Legend: T tokens of all sequences, S tokens of a bucket, B sequences of a bucket, L its longest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from stillhouse.models.past import CacheUse, Cells, Past
from stillhouse.models.transfer import upload

_BUCKET_SLACK = 0.8
"""A bucket takes sequences down to this share of its longest, so that at most a fifth of its rows is padding..."""
_BUCKET_SLACK_TOKENS = 8
"""...or down to this many tokens shorter, so that very short sequences do not each get a kernel call."""


@dataclass(frozen=True)
class Bucket:
    """Sequences that one attention call handles: tokens [start, end) of the row, B sequences of up to L tokens."""

    start: int
    end: int
    n_sequences: int
    longest: int
    real_S: Tensor | None
    """Index of each token in the padded [B * L]; None when all lengths are equal and nothing is padded."""
    source_BL: Tensor | None
    """The inverse: the token (relative to start) in each padded place; padding repeats a token."""
    past: Past | None = None
    """What stands before the sequence; such a sequence has a bucket of its own."""

    @property
    def n_past(self) -> int:
        return 0 if self.past is None else self.past.n_tokens


class KeptTokens(NamedTuple):
    """Tokens [start, end) of the row whose keys and values are to be kept."""

    start: int
    end: int
    cells: Cells


@dataclass(frozen=True)
class RowLayout:
    """Division of one row of T tokens into sequences; made once per forward, read by every layer."""

    lengths: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    positions_T: Tensor
    kept: tuple[KeptTokens, ...] = ()

    @property
    def with_cells(self) -> bool:
        """True if layers must be told apart: keys and values are read or kept."""
        return bool(self.kept) or any(bucket.past is not None for bucket in self.buckets)

    @property
    def longest(self) -> int:
        """Most tokens that a token of this forward attends to."""
        return max(bucket.n_past + bucket.longest for bucket in self.buckets)

    def __repr__(self) -> str:
        return f"RowLayout({len(self.lengths)} sequences, {sum(self.lengths)} tokens, {len(self.buckets)} buckets)"


def shortest_beside(longest: int) -> int:
    """Shortest sequence that shares a bucket with a longest one."""
    return min(math.ceil(longest * _BUCKET_SLACK), longest - _BUCKET_SLACK_TOKENS)


def make_layout(
    lengths: Sequence[int], device: torch.device, uses: Sequence[CacheUse | None] = (), *, alone: bool = False
) -> RowLayout:
    """Buckets over sequences in the order of `layout_order`. `uses`: one entry per sequence, or none at all. `alone`:
    each sequence is a bucket."""
    uses = uses or [None] * len(lengths)
    pasts = [None if one is None else one.past for one in uses]
    n_begun = sum(past is None for past in pasts)
    buckets: list[Bucket] = []
    first, start = 0, 0
    while first < n_begun:
        longest = lengths[first]
        floor = shortest_beside(longest)
        last = first + 1
        while last < n_begun and lengths[last] >= floor and not alone:
            last += 1
        buckets.append(_bucket(start, lengths[first:last], device))
        first, start = last, buckets[-1].end
    for length, past in zip(lengths[n_begun:], pasts[n_begun:], strict=True):
        buckets.append(Bucket(start, start + length, 1, length, None, None, past))
        start += length
    offsets = [0 if past is None else past.n_tokens for past in pasts]
    positions = torch.cat([torch.arange(first, first + n) for first, n in zip(offsets, lengths, strict=True)])
    ends = list(accumulate(lengths))
    kept = [
        KeptTokens(end - one.keep_last, end, one.cells)
        for end, one in zip(ends, uses, strict=True)
        if one is not None and one.cells is not None
    ]
    return RowLayout(tuple(lengths), tuple(buckets), upload(positions, device), tuple(kept))


def layout_order(lengths: Sequence[int], uses: Sequence[CacheUse | None] = ()) -> list[int]:
    """Indices of the sequences in the order that `make_layout` takes: from long to short, those with a past last."""
    has_past = [one is not None and one.past is not None for one in uses] or [False] * len(lengths)
    return sorted(range(len(lengths)), key=lambda i: (has_past[i], -lengths[i]))


def permutation(sizes: Sequence[int], order: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(sorted <- given, given <- sorted) token indices."""
    firsts = [0]
    for size in sizes:
        firsts.append(firsts[-1] + size)
    to_sorted_T = torch.cat([torch.arange(firsts[i], firsts[i] + sizes[i]) for i in order])
    to_given_T = torch.empty_like(to_sorted_T)
    to_given_T[to_sorted_T] = torch.arange(to_sorted_T.shape[0])
    return upload(to_sorted_T, device), upload(to_given_T, device)


def first_fit_decreasing(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Divide items among packs of at most `budget_tokens`: longest first, each into the first pack with room.

    Returns indices per pack, each pack from long to short. An item over the budget forms its own pack; none is dropped.
    Raises ValueError for a budget below 1.
    """
    if budget_tokens < 1:
        raise ValueError(f"pack budget {budget_tokens} tokens; expected at least 1")
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((p for p, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            packs.append([])
            room.append(budget_tokens)
            place = len(packs) - 1
        packs[place].append(index)
        room[place] -= lengths[index]
    return packs


def balanced_packs(lengths: Sequence[int], budget_tokens: int, n_ranks: int) -> list[list[list[int]]]:
    """Divide items among the packs of `n_ranks`, such that the longest pack of each round is as short as this finds it:
    longest item first, each into the pack with the fewest tokens so far.

    Returns indices per pack, packs per rank. There are as few rounds as that gives packs of at most `budget_tokens`. An
    item over the budget is not divided; then, and with fewer items than ranks, ranks may have fewer packs than others.
    One rank: `first_fit_decreasing`."""
    if n_ranks == 1:
        return [first_fit_decreasing(lengths, budget_tokens)]
    if budget_tokens < 1:
        raise ValueError(f"pack budget {budget_tokens} tokens; expected at least 1")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    allowed = max(budget_tokens, max(lengths))
    n_packs = n_ranks
    while True:
        heap = [(0, pack) for pack in range(n_packs)]
        packs: list[list[int]] = [[] for _ in range(n_packs)]
        for index in order:
            tokens, pack = heapq.heappop(heap)
            packs[pack].append(index)
            heapq.heappush(heap, (tokens + lengths[index], pack))
        if max(tokens for tokens, _ in heap) <= allowed:
            break
        n_packs += n_ranks
    # Rounds of packs of like size, so that no rank waits long for another; the longest go to each rank in turn.
    packs.sort(key=lambda members: -sum(lengths[i] for i in members))
    return [[members for members in packs[rank::n_ranks] if members] for rank in range(n_ranks)]


class Gather(torch.autograd.Function):
    """rows[index], where the backward is a gather too (index_add is several times slower on a CPU).

    `inverse` maps back. With `onto`, every input row appears at inverse[i], and repeated ones are padding, whose
    gradient is zero because nothing reads it. Without `onto`, input rows that are not listed get a zero gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, onto: bool) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(index, inverse)
        ctx.onto, ctx.n_rows = onto, rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        index, inverse = cast(tuple[Tensor, Tensor], ctx.saved_tensors)
        if ctx.onto:
            return grad.index_select(0, inverse), None, None, None
        full = grad.new_zeros((ctx.n_rows, *grad.shape[1:]))
        full.index_copy_(0, index, grad)
        return full, None, None, None


def _bucket(start: int, lengths: Sequence[int], device: torch.device) -> Bucket:
    n_sequences, longest, total = len(lengths), lengths[0], sum(lengths)
    if total == n_sequences * longest:
        return Bucket(start, start + total, n_sequences, longest, None, None)
    lengths_B = torch.tensor(lengths)
    first_B = lengths_B.cumsum(0) - lengths_B
    column_L = torch.arange(longest)
    source_BL = first_B[:, None] + torch.minimum(column_L[None, :], lengths_B[:, None] - 1)
    real_BL = column_L[None, :] < lengths_B[:, None]
    real_S, source_BL = real_BL.reshape(-1).nonzero().squeeze(1), source_BL.reshape(-1)
    return Bucket(start, start + total, n_sequences, longest, upload(real_S, device), upload(source_BL, device))
