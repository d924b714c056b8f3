"""Per-token arrays of one rollout, growing as its segments arrive.

Legend: T = tokens of the rollout so far, P = teacher pools that score it, N = tokens of one segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Int32s: TypeAlias = npt.NDArray[np.int32]
Float32s: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_FIRST_CAPACITY_TOKENS = 64


class TokenStore:
    """Columns of ids, behaviour log-probs, loss mask, open mask [T each] and teacher log-probs [P, T].

    A token is open if it may still be trained: sampled, and neither trained, masked nor dropped. Capacity doubles when
    full, so that appending costs O(tokens appended) on average. Views that were handed out stay valid: ids, log-probs
    and loss mask are only ever appended to, and the other columns are copied.
    """

    __slots__ = ("_ids_T", "_logprobs_T", "_loss_mask_T", "_n_pools", "_open_T", "_teacher_logprobs_PT", "length")

    def __init__(self, n_pools: int) -> None:
        self.length = 0
        self._n_pools = n_pools
        self._ids_T: Int32s = np.empty(_FIRST_CAPACITY_TOKENS, np.int32)
        self._logprobs_T: Float32s = np.empty(_FIRST_CAPACITY_TOKENS, np.float32)
        self._loss_mask_T: Bytes = np.empty(_FIRST_CAPACITY_TOKENS, np.uint8)
        self._open_T: Bytes = np.empty(_FIRST_CAPACITY_TOKENS, np.uint8)
        self._teacher_logprobs_PT: Float32s = np.zeros((n_pools, _FIRST_CAPACITY_TOKENS), np.float32)

    def __repr__(self) -> str:
        return f"TokenStore(length={self.length}, open={int(self._open_T[: self.length].sum())})"

    def contents(self) -> tuple[int, Int32s, Float32s, Bytes, Bytes, Float32s]:
        """Contents for an image: number of pools, and the filled part of each column."""
        end = self.length
        columns = self._ids_T[:end], self._logprobs_T[:end], self._loss_mask_T[:end], self._open_T[:end]
        return self._n_pools, *columns, np.ascontiguousarray(self._teacher_logprobs_PT[:, :end])

    def fill(self, contents: Sequence[Any]) -> None:
        """Fill a store that was made without `__init__` with what `contents` returned."""
        n_pools, ids_T, logprobs_T, loss_mask_T, open_T, teacher_logprobs_PT = contents
        self.length = len(ids_T)
        self._n_pools = n_pools
        capacity = max(_FIRST_CAPACITY_TOKENS, self.length)
        self._ids_T = _longer(ids_T, capacity)
        self._logprobs_T = _longer(logprobs_T, capacity)
        self._loss_mask_T = _longer(loss_mask_T, capacity)
        self._open_T = _longer(open_T, capacity)
        self._teacher_logprobs_PT = np.zeros((n_pools, capacity), np.float32)
        self._teacher_logprobs_PT[:, : self.length] = teacher_logprobs_PT

    def append(self, ids_N: Int32s, logprobs_N: Float32s, loss_mask_N: Bytes) -> None:
        """Add the tokens of one segment. Its sampled tokens are open."""
        start, end = self.length, self.length + len(ids_N)
        if end > len(self._ids_T):
            self._grow(end)
        self._ids_T[start:end] = ids_N
        self._logprobs_T[start:end] = logprobs_N
        self._loss_mask_T[start:end] = loss_mask_N
        self._open_T[start:end] = loss_mask_N
        self.length = end

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

    def set_scores(self, pool_index: int, start: int, end: int, scores_N: Float32s) -> None:
        """Store a teacher's log-probs of the sampled tokens in [start, end). Other tokens keep 0."""
        np.multiply(scores_N, self._loss_mask_T[start:end], out=self._teacher_logprobs_PT[pool_index, start:end])

    def n_open(self, start: int, end: int) -> int:
        """Number of open tokens in [start, end)."""
        return int(np.count_nonzero(self._open_T[start:end]))

    def settle(self, start: int, end: int) -> int:
        """Close the open tokens in [start, end) and return their number."""
        n = self.n_open(start, end)
        self._open_T[start:end] = 0
        return n

    def _grow(self, needed: int) -> None:
        capacity = max(needed, 2 * len(self._ids_T))
        self._ids_T = _longer(self._ids_T, capacity)
        self._logprobs_T = _longer(self._logprobs_T, capacity)
        self._loss_mask_T = _longer(self._loss_mask_T, capacity)
        self._open_T = _longer(self._open_T, capacity)
        teacher_logprobs_PT = np.zeros((self._n_pools, capacity), np.float32)
        teacher_logprobs_PT[:, : self.length] = self._teacher_logprobs_PT[:, : self.length]
        self._teacher_logprobs_PT = teacher_logprobs_PT


def _longer(column_T: Array, capacity: int) -> Array:
    longer_T = np.empty(capacity, column_T.dtype)
    longer_T[: len(column_T)] = column_T
    return longer_T


def _read_only(view: Array) -> Array:
    view.flags.writeable = False
    return view
