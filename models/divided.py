"""A packed row whose sequences are divided among processes: context parallelism.

    sequence     0 1 2 3 4 5 6 7 8 9 a b      12 tokens, 2 processes: 4 chunks
    process 0    0 1 2             9 a b      the first and the last chunk
    process 1          3 4 5 6 7 8            the second and the third: the same number of pairs (query, key)

Each process runs its own tokens, at their true positions. In each layer the keys and values of all tokens are gathered,
and the queries of a chunk attend to the keys of its sequence up to the chunk's end. In the backward pass each process
gets the sum of all processes' gradients of the keys and values that it gave.

Keys and values are gathered and not sent around in a ring: torch's ring attention
(torch.distributed.tensor.experimental) has no kernel for CPUs and no rows of several sequences, and with grouped
queries keys and values are a small part of what a layer keeps.

Legend: T tokens of the row, P those of one process (its part), G key/value heads, N query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from stillhouse.models.attention import attend_last, computed_in
from stillhouse.models.transfer import upload

# Before torch 2.13 they have the second name, of which 2.13 warns.
_ALL_GATHER: Final = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
_REDUCE_SCATTER: Final = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor")  # noqa: B009


class RankGroup(NamedTuple):
    """Processes that share the tokens of a row."""

    handle: dist.ProcessGroup
    rank: int
    size: int


class SequenceChunk(NamedTuple):
    """Tokens [start, end) of a sequence."""

    sequence: int
    start: int
    end: int


def chunks_of(lengths: Sequence[int], size: int) -> list[list[SequenceChunk]]:
    """The chunks of each process, in the order of the row; empty ones are left out. Which process has the first and
    the last chunk changes from sequence to sequence, so that none has more of many short ones."""
    found: list[list[SequenceChunk]] = [[] for _ in range(size)]
    for i, length in enumerate(lengths):
        for k in range(2 * size):
            chunk = SequenceChunk(i, k * length // (2 * size), (k + 1) * length // (2 * size))
            if chunk.start < chunk.end:
                found[(min(k, 2 * size - 1 - k) + i) % size].append(chunk)
    return found


@dataclass(frozen=True, eq=False)
class RankPlaces:
    """Which entries of a vector each process has."""

    of_ranks: tuple[npt.NDArray[np.int64], ...]
    """Ascending. Each entry is in one of them."""

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.of_ranks))

    @cached_property
    def _at(self) -> Tensor:
        """Where each entry is among those that are gathered, all parts filled up to the longest."""
        starts = [np.arange(len(own)) + rank * self.longest for rank, own in enumerate(self.of_ranks)]
        at = np.empty(sum(map(len, self.of_ranks)), np.int64)
        at[np.concatenate(self.of_ranks)] = np.concatenate(starts)
        return torch.from_numpy(at)

    def gather(self, own: Tensor, group: RankGroup) -> Tensor:
        """All entries, from each process's own; any further ones of `own` are not read. No gradient."""
        filled = own.new_zeros((self.longest, *own.shape[1:]))
        n = len(self.of_ranks[group.rank])
        filled[:n] = own[:n]
        gathered = filled.new_empty((group.size * self.longest, *own.shape[1:]))
        _ALL_GATHER(gathered, filled, group=group.handle)
        return gathered.index_select(0, upload(self._at, own.device))

    def scatter_sum(self, whole: Tensor, group: RankGroup) -> Tensor:
        """The sum over the processes at this process's entries."""
        spread = whole.new_zeros((group.size * self.longest, *whole.shape[1:]))
        spread.index_copy_(0, upload(self._at, whole.device), whole)
        own = whole.new_empty((self.longest, *whole.shape[1:]))
        _REDUCE_SCATTER(own, spread, group=group.handle)
        return own[: len(self.of_ranks[group.rank])]


class _Gathered(torch.autograd.Function):
    """`RankPlaces.gather` with its gradient. Sums are in float32 at least."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, places: RankPlaces, group: RankGroup) -> Tensor:  # pyright: ignore
        ctx.places, ctx.group, ctx.n_own = places, group, len(own)
        return places.gather(own, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        places, group = cast(RankPlaces, ctx.places), cast(RankGroup, ctx.group)
        own = places.scatter_sum(grad.to(torch.promote_types(grad.dtype, torch.float32)), group).to(grad.dtype)
        if len(own) < ctx.n_own:
            own = torch.cat([own, own.new_zeros((ctx.n_own - len(own), *own.shape[1:]))])
        return own, None, None


@dataclass(frozen=True, eq=False)
class RankPart:
    """What one process has of a row."""

    lengths: tuple[int, ...]
    """Lengths of the whole sequences."""
    chunks: tuple[SequenceChunk, ...]
    """This process's chunks. A process without any, in a very short row, runs the row's first token, which then counts
    for another."""
    places: RankPlaces
    """Where its tokens are in the row."""

    @classmethod
    def of(cls, lengths: Sequence[int], size: int, rank: int) -> RankPart:
        chunks = chunks_of(lengths, size)
        firsts = [0, *accumulate(lengths)]
        places = RankPlaces(tuple(_tokens(own, firsts) for own in chunks))
        return cls(tuple(lengths), tuple(chunks[rank]) or (SequenceChunk(0, 0, 1),), places)

    @cached_property
    def tokens(self) -> npt.NDArray[np.int64]:
        """[P]: which of the row this process runs."""
        return _tokens(self.chunks, [0, *accumulate(self.lengths)])


def _tokens(chunks: Sequence[SequenceChunk], firsts: Sequence[int]) -> npt.NDArray[np.int64]:
    ranges = [np.arange(firsts[i] + start, firsts[i] + end) for i, start, end in chunks]
    return np.concatenate([np.zeros(0, np.int64), *ranges])


@dataclass(frozen=True, eq=False)
class DividedLayout:
    """A part and the processes that have the others; read by every layer (models.packed)."""

    part: RankPart
    group: RankGroup

    @property
    def longest(self) -> int:
        """Most tokens that a token attends to."""
        return max(self.part.lengths)

    @property
    def positions(self) -> Tensor:
        """[P]: of its tokens, each in its own sequence."""
        return torch.cat([torch.arange(start, end) for _, start, end in self.part.chunks])

    def __repr__(self) -> str:
        return f"DividedLayout(process {self.group.rank} of {self.group.size}, sequences of {self.part.lengths} tokens)"


def attend_divided(query: Tensor, key: Tensor, value: Tensor, layout: DividedLayout, scaling: float) -> Tensor:
    """[1, P, N, D of value]; query [1, N, P, D], key and value [1, G, P, D]. All processes must call it at the same
    time, and its backward pass too."""
    part, dtype = layout.part, computed_in(query)
    key_size = key.shape[-1]
    own_PGE = torch.cat([key[0], value[0]], dim=-1).to(dtype).transpose(0, 1)
    all_TGE = cast(Tensor, _Gathered.apply(own_PGE, part.places, layout.group))
    of_sequence = all_TGE.split(list(part.lengths))  # one gradient for all, and not one as long as the row for each
    query = query.to(dtype)
    rows: list[Tensor] = []
    at = 0
    for i, start, end in part.chunks:
        seen = of_sequence[i][:end].transpose(0, 1)[None]
        queries = query[:, :, at : at + end - start]
        row = attend_last(queries, seen[..., :key_size], seen[..., key_size:], scaling=scaling)
        rows.append(row.transpose(1, 2))
        at += end - start
    return torch.cat(rows, dim=1)
