"""The order of prompts: endless passes over the rows, each shuffled anew, or a mix of several domains in given shares.

Orders come from numpy's RandomState on MT19937, whose stream is frozen (NEP 19), so a run resumed with a newer numpy
continues in the same order. The state of a pass is two numbers. In a mix, draw n takes its tag from a hash of (seed,
n), so the order depends on nothing else; the row is the next one in that tag's own endless passes. The state of a mix
is the number of draws and the state of each tag's passes.

Suffix N: rows of the source.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from stillhouse.learner.prompts.config import n_held_out
from stillhouse.learner.prompts.data import CACHED_BLOCKS, PromptSource
from stillhouse.learner.prompts.records import DataError, RowError

Rows = npt.NDArray[np.int64]


def shuffled_rows(n_rows: int, blocks: Sequence[int], key: Sequence[int]) -> Rows:
    """A permutation of 0..n_rows-1 [N] that depends only on the arguments.

    Without blocks all permutations are equally likely. With blocks (parts of the source that are read as a whole) the
    order of blocks is shuffled, then the rows of `CACHED_BLOCKS` neighbours at a time, so that each block is read
    once."""
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
    """Rows of a source without the held-out ones, pass after pass. The iterator's state consists of JSON values."""

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
    """StatefulDataLoader calls `state_dict` and `load_state_dict`."""

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


_log = logging.getLogger(__name__)


def row_tags(source: PromptSource) -> list[str | None]:
    """Tag of every row; None for an unreadable row. Reads the whole source once."""
    return [None if isinstance(record, RowError) else record.tag for record in source.read_all()]


def check_tags(key: str, wanted: Sequence[str], tags: Sequence[str | None], where: str) -> None:
    """Raises DataError for a tag without a row."""
    known = sorted({tag for tag in tags if tag is not None})
    for tag in wanted:
        if tag not in known:
            near = difflib.get_close_matches(tag, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(map(repr, known[:8]))}"
            raise DataError(f"learner.tasks.{key}: no row of {where} has the tag {tag!r}; {hint}")


class MixedSampler(Sampler[int]):
    """Rows by tag in the shares of `mix`, without the held-out ones. Rows with other tags are left out, and the log
    says how many."""

    def __init__(
        self,
        source: PromptSource,
        held_out: Rows,
        tags: Sequence[str | None],
        mix: Mapping[str, float],
        *,
        seed: int,
        shuffle: bool,
    ) -> None:
        """Raises DataError for a tag whose rows are all held out."""
        self._seed = seed
        self._names = [tag for tag, share in mix.items() if share > 0]
        check_tags("mix", self._names, tags, source.path)
        self._ends = list(accumulate(mix[tag] for tag in self._names))
        self._samplers: list[EndlessSampler] = []
        for tag in self._names:
            others = np.array([row for row, its_tag in enumerate(tags) if its_tag != tag], dtype=np.int64)
            sampler = EndlessSampler(source, np.union1d(held_out, others), seed=seed, shuffle=shuffle)
            if sampler.rows_per_pass == 0:
                raise DataError(f"learner.tasks.mix: all rows of {source.path} with the tag {tag!r} are held out")
            self._samplers.append(sampler)
        self.rows_per_pass = sum(sampler.rows_per_pass for sampler in self._samplers)
        left_out = Counter(repr(tag) if tag is not None else "unreadable" for tag in tags if tag not in self._names)
        if left_out:
            _log.warning("rows of %s that learner.tasks.mix leaves out, by tag: %s", source.path, dict(left_out))

    def __iter__(self) -> Iterator[int]:
        return _MixedIterator(self._names, [iter(sampler) for sampler in self._samplers], self.choose)

    def choose(self, draw: int) -> int:
        """Index of the tag for this draw."""
        digest = hashlib.blake2b(f"{self._seed}/mix/{draw}".encode(), digest_size=8).digest()
        uniform = int.from_bytes(digest, "little") / 2**64
        return min(bisect_right(self._ends, uniform * self._ends[-1]), len(self._ends) - 1)


class _MixedIterator(Iterator[int]):
    """StatefulDataLoader calls `state_dict` and `load_state_dict`."""

    def __init__(self, names: Sequence[str], passes: Sequence[Any], choose: Any) -> None:
        self._names = names
        self._passes = passes
        self._choose = choose
        self._drawn = 0

    def __next__(self) -> int:
        row = next(self._passes[self._choose(self._drawn)])
        self._drawn += 1
        return row

    def state_dict(self) -> dict[str, Any]:
        places = {name: at.state_dict() for name, at in zip(self._names, self._passes, strict=True)}
        return {"drawn": self._drawn, "places": places}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._drawn = int(state_dict["drawn"])
        for name, at in zip(self._names, self._passes, strict=True):
            at.load_state_dict(state_dict["places"][name])
