"""Per-token arrays of one rollout, growing as its segments arrive.

Legend: T = tokens of the rollout so far, P = teacher pools that score it, N = tokens of one segment.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stillhouse.buffer.blobs import KeptArrays

Array: TypeAlias = npt.NDArray[Any]
Int32s: TypeAlias = npt.NDArray[np.int32]
Float32s: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Int64s: TypeAlias = npt.NDArray[np.int64]

_FIRST_CAPACITY_TOKENS = 64
SHARED_BYTES: Final = 32 << 10
"""Size from which the columns of a rollout have a mapping of their own."""


class TokenStore:
    """Columns of ids, behaviour log-probs, loss mask, open mask [T each] and teacher log-probs [P, T].

    A token is open if it may still be trained: sampled, and neither trained, masked nor dropped. Capacity doubles when
    full, so that appending costs O(tokens appended) on average. Views that were handed out stay valid: ids, log-probs
    and loss mask are only ever appended to, and the other columns are copied.
    """

    __slots__ = (
        *("_ids_T", "_logprobs_T", "_loss_mask_T", "_open_T", "_teacher_logprobs_PT"),
        *("_n_pools", "_parts", "_scored", "length"),
    )

    def __init__(self, n_pools: int) -> None:
        self.length = 0
        self._n_pools = n_pools
        self._parts = _Pieces()
        """Which blob the tokens of each segment came in."""
        self._scored = tuple(_Pieces() for _ in range(n_pools))
        """Which blob the scores of each segment came in, by pool."""
        columns = _columns(_FIRST_CAPACITY_TOKENS, n_pools)
        self._ids_T, self._logprobs_T, self._loss_mask_T, self._teacher_logprobs_PT = columns
        self._open_T: Bytes = np.empty(_FIRST_CAPACITY_TOKENS, np.uint8)

    def contents(self) -> tuple[Any, ...]:
        """Contents for an image. Tokens and scores that came in a blob are not in it: it refers to the blob."""
        end, inline = self.length, self._parts.without_blob()
        columns = self._ids_T[:end][inline], self._logprobs_T[:end][inline], self._loss_mask_T[:end][inline]
        scores = [self._teacher_logprobs_PT[i, :end][pieces.without_blob()] for i, pieces in enumerate(self._scored)]
        return (
            *(self._n_pools, end, np.packbits(self._open_T[:end])),
            *(self._parts.contents(), *columns),
            *(tuple(pieces.contents() for pieces in self._scored), tuple(scores)),
        )

    def fill(self, contents: Sequence[Any]) -> None:
        """Fill a store that was made without `__init__` with what `contents` returned."""
        n_pools, length, open_bits, parts, ids, logprobs, loss_mask, scored, scores = contents
        TokenStore.__init__(self, n_pools)
        if length > len(self._ids_T):
            self._grow(length)
        self.length = length
        self._open_T[:length] = np.unpackbits(open_bits, count=length)
        at = 0
        for start, end, kept in self._parts.fill(parts):
            if kept.number:
                columns = zip(kept.arrays, (np.int32, np.float32, np.uint8), strict=False)
                ids_N, logprobs_N, loss_mask_N = (np.frombuffer(array, dtype) for array, dtype in columns)
            else:
                own = slice(at, at := at + end - start)
                ids_N, logprobs_N, loss_mask_N = ids[own], logprobs[own], loss_mask[own]
            self._ids_T[start:end], self._logprobs_T[start:end] = ids_N, logprobs_N
            self._loss_mask_T[start:end] = loss_mask_N
        for pool_index, (pieces, own_scores) in enumerate(zip(scored, scores, strict=True)):
            at = 0
            for start, end, kept in self._scored[pool_index].fill(pieces):
                own = slice(at, at + (0 if kept.number else end - start))
                at = own.stop
                scores_N = np.frombuffer(kept.arrays[0], np.float32) if kept.number else own_scores[own]
                np.multiply(
                    scores_N, self._loss_mask_T[start:end], out=self._teacher_logprobs_PT[pool_index, start:end]
                )

    def append(self, ids_N: Int32s, logprobs_N: Float32s, loss_mask_N: Bytes, blob: int = 0) -> None:
        """Add the tokens of one segment. Its sampled tokens are open. `blob`: number of the blob that they came in."""
        start, end = self.length, self.length + len(ids_N)
        if end > len(self._ids_T):
            self._grow(end)
        self._ids_T[start:end] = ids_N
        self._logprobs_T[start:end] = logprobs_N
        self._loss_mask_T[start:end] = loss_mask_N
        self._open_T[start:end] = loss_mask_N
        self.length = end
        self._parts.add(start, end, blob)

    def ids(self, end: int) -> Int32s:
        """[end], read-only view."""
        return _read_only(self._ids_T[:end])

    def logprobs(self, end: int) -> Float32s:
        """[end], read-only view."""
        return _read_only(self._logprobs_T[:end])

    def teacher_logprobs(self, end: int) -> Float32s:
        """[P, end], a copy; 0 for tokens without a score."""
        return _read_only(self._teacher_logprobs_PT[:, :end].copy())

    def open_mask(self, start: int, end: int) -> Bytes:
        """[end - start], a copy."""
        return self._open_T[start:end].copy()

    def sampled_mask(self, start: int, end: int) -> Bytes:
        """[end - start], a view: 1 where the student wrote the token."""
        return self._loss_mask_T[start:end]

    def set_scores(self, pool_index: int, start: int, end: int, scores_N: Float32s, blob: int = 0) -> None:
        """Store a teacher's log-probs of the sampled tokens in [start, end). Other tokens keep 0. `blob`: number of the
        blob that they came in."""
        np.multiply(scores_N, self._loss_mask_T[start:end], out=self._teacher_logprobs_PT[pool_index, start:end])
        self._scored[pool_index].add(start, end, blob)

    def n_open(self, start: int, end: int) -> int:
        """Number of open tokens in [start, end)."""
        return int(np.count_nonzero(self._open_T[start:end]))

    def settle(self, start: int, end: int) -> int:
        """Close the open tokens in [start, end) and return their number."""
        n = self.n_open(start, end)
        self._open_T[start:end] = 0
        return n

    def _grow(self, needed: int) -> None:
        capacity, end = max(needed, 2 * len(self._ids_T)), self.length
        ids_T, logprobs_T, loss_mask_T, teacher_logprobs_PT = _columns(capacity, self._n_pools)
        ids_T[:end], logprobs_T[:end] = self._ids_T[:end], self._logprobs_T[:end]
        loss_mask_T[:end] = self._loss_mask_T[:end]
        teacher_logprobs_PT[:, :end] = self._teacher_logprobs_PT[:, :end]
        open_T = np.empty(capacity, np.uint8)
        open_T[:end] = self._open_T[:end]
        self._ids_T, self._logprobs_T, self._loss_mask_T = ids_T, logprobs_T, loss_mask_T
        self._teacher_logprobs_PT, self._open_T = teacher_logprobs_PT, open_T


class _Pieces:
    """Ranges of tokens, in the order in which they came, and the number of the blob of each (0: of none)."""

    __slots__ = ("_flat",)

    def __init__(self) -> None:
        self._flat = array("q")
        """start, end, number; start, end, number; ..."""

    def add(self, start: int, end: int, number: int) -> None:
        flat = self._flat
        if number == 0 and flat and flat[-1] == 0 and flat[-2] == start:
            flat[-2] = end
        else:
            flat.extend((start, end, number))

    def without_blob(self) -> slice | Int64s:
        """Index of all tokens that came in no blob, in the order of their ranges."""
        ranges = [(start, end) for start, end, number in self._ranges() if number == 0]
        if len(ranges) < 2:
            return slice(*ranges[0]) if ranges else slice(0)
        return np.concatenate([np.arange(start, end) for start, end in ranges])

    def contents(self) -> tuple[int | KeptArrays, ...]:
        return tuple(
            part for start, end, number in self._ranges() for part in (start, end, KeptArrays(number) if number else 0)
        )

    def fill(self, contents: Sequence[Any]) -> Iterator[tuple[int, int, KeptArrays]]:
        """Fill it again, and go over the ranges with their blobs."""
        for i in range(0, len(contents), 3):
            start, end, kept = contents[i : i + 3]
            kept = kept or KeptArrays(0)
            self._flat.extend((start, end, kept.number))
            yield start, end, kept

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        flat = self._flat
        return zip(flat[::3], flat[1::3], flat[2::3], strict=True)


def _columns(capacity: int, n_pools: int) -> tuple[Int32s, Float32s, Bytes, Float32s]:
    """Ids, behaviour log-probs, loss mask [capacity each] and teacher log-probs [P, capacity], which are 0."""
    block = _zeros(capacity * (9 + 4 * n_pools))
    ids, logprobs, scores, loss_mask = np.split(block, [4 * capacity, 8 * capacity, (8 + 4 * n_pools) * capacity])
    return ids.view(np.int32), logprobs.view(np.float32), loss_mask, scores.view(np.float32).reshape(n_pools, capacity)


def _zeros(n_bytes: int) -> Bytes:
    """Memory for columns. A fork shares what is large, with nothing to copy, not even its page table: the fork for an
    image would stop the loop for longer, the more tokens are held (`buffer.journal.imaging`). What it reads of columns
    does not change after it began."""
    if n_bytes >= SHARED_BYTES:
        with suppress(OSError):  # the number of mappings is limited
            return np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8)
    return np.zeros(n_bytes, np.uint8)


def _read_only(view: Array) -> Array:
    view.flags.writeable = False
    return view
