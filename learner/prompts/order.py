"""The order in which prompts are taken: endless passes over the rows, each shuffled anew, resumable by two numbers.

Suffix N: rows of the source. Orders come from numpy's RandomState on MT19937, whose stream is frozen (NEP 19), so
that a run resumed under a newer numpy goes on in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from learner.prompts.config import n_held_out
from learner.prompts.data import CACHED_BLOCKS, PromptSource

Rows = npt.NDArray[np.int64]


def shuffled_rows(n_rows: int, blocks: Sequence[int], key: Sequence[int]) -> Rows:
    """A permutation of 0..n_rows-1 [N] that depends on the arguments only.

    Without blocks every permutation is as likely as any other. With blocks (parts of the source that are read as a
    whole) their order is shuffled, and then the rows of `CACHED_BLOCKS` neighbours at a time: reading in this order
    reads each block once."""
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(list(key))))
    if len(blocks) <= CACHED_BLOCKS:
        rows_N = np.arange(n_rows, dtype=np.int64)
        random.shuffle(rows_N)
        return rows_N
    ends = list(accumulate(blocks))
    order: list[int] = random.permutation(len(blocks)).tolist()
    windows: list[Rows] = []
    for at in range(0, len(order), CACHED_BLOCKS):
        window = np.concatenate([np.arange(ends[b] - blocks[b], ends[b]) for b in order[at : at + CACHED_BLOCKS]])
        random.shuffle(window)
        windows.append(window)
    return np.concatenate(windows)


def held_out_rows(source: PromptSource, share: float, at_most: int) -> Rows:
    """Rows kept for evaluation [n = n_held_out(...)], in random order. Depends on the source's number of rows only, not
    on the run's seed; a smaller number is a prefix of a larger one."""
    n = n_held_out(len(source), share, at_most)
    return shuffled_rows(len(source), source.blocks, (len(source),))[:n]


class EndlessSampler(Sampler[int]):
    """Rows of a source without the held-out ones, pass after pass. The iterator's state is JSON."""

    def __init__(self, source: PromptSource, held_out: Rows, *, seed: int, shuffle: bool) -> None:
        self._n_rows = len(source)
        self._blocks = source.blocks
        self._keep_N = np.ones(self._n_rows, dtype=bool)
        self._keep_N[held_out] = False
        self._seed = seed
        self._shuffle = shuffle
        self.rows_per_pass = int(self._keep_N.sum())

    def __iter__(self) -> Iterator[int]:
        return _EndlessIterator(self)

    def rows_of_pass(self, data_epoch: int) -> Rows:
        """Row numbers [rows_per_pass] in the order of this pass."""
        if self._shuffle:
            rows_N = shuffled_rows(self._n_rows, self._blocks, (self._seed, data_epoch))
        else:
            rows_N = np.arange(self._n_rows, dtype=np.int64)
        return rows_N[self._keep_N[rows_N]]


class _EndlessIterator(Iterator[int]):
    """`state_dict` and `load_state_dict` are what StatefulDataLoader looks for."""

    def __init__(self, sampler: EndlessSampler) -> None:
        self._sampler = sampler
        self._data_epoch = 0
        self._position = 0
        self._rows = sampler.rows_of_pass(0)

    def __next__(self) -> int:
        if self._position == len(self._rows):
            self._data_epoch, self._position = self._data_epoch + 1, 0
            self._rows = self._sampler.rows_of_pass(self._data_epoch)
        row = int(self._rows[self._position])
        self._position += 1
        return row

    def state_dict(self) -> dict[str, Any]:
        return {"data_epoch": self._data_epoch, "position": self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._data_epoch = int(state_dict["data_epoch"])
        self._position = int(state_dict["position"])
        self._rows = self._sampler.rows_of_pass(self._data_epoch)
        if not 0 <= self._position <= len(self._rows):
            raise ValueError(f"position {self._position} is outside a pass of {len(self._rows)} rows")
