"""Prompts of several domains in given shares: which tag each draw has, and which row of it.

Draw n takes its tag from a uniform number in [0, 1) that is a hash of (seed, n), so that the order depends on nothing
else; the row is the next one in the tag's own endless passes, each in the order of `EndlessSampler`. The state is how
many draws there were and where each tag stands.
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
from torch.utils.data import Sampler

from learner.prompts.data import PromptSource
from learner.prompts.order import EndlessSampler, Rows
from learner.prompts.records import DataError, RowError

_log = logging.getLogger(__name__)


def row_tags(source: PromptSource) -> list[str | None]:
    """Tag of every row; None of a row that cannot be read. Reads all of the source, once."""
    tags: list[str | None] = []
    for row in range(len(source)):
        try:
            tags.append(source.read(row).tag)
        except RowError:
            tags.append(None)
    return tags


def check_tags(key: str, wanted: Sequence[str], tags: Sequence[str | None], where: str) -> None:
    """Raises DataError for a tag that no row has."""
    known = sorted({tag for tag in tags if tag is not None})
    for tag in wanted:
        if tag not in known:
            near = difflib.get_close_matches(tag, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(map(repr, known[:8]))}"
            raise DataError(f"learner.tasks.{key}: no row of {where} has the tag {tag!r}; {hint}")


class MixedSampler(Sampler[int]):
    """Rows by tag in the shares of `mix`, without the held-out ones. Rows with other tags are left out, and told."""

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
        """Raises DataError for a tag without a row to train on."""
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
        """Index of the tag of this draw."""
        digest = hashlib.blake2b(f"{self._seed}/mix/{draw}".encode(), digest_size=8).digest()
        uniform = int.from_bytes(digest, "little") / 2**64
        return min(bisect_right(self._ends, uniform * self._ends[-1]), len(self._ends) - 1)


class _MixedIterator(Iterator[int]):
    """`state_dict` and `load_state_dict` are what StatefulDataLoader looks for."""

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
