"""Follows a record that is still written to, and keeps a page of it.

`load` reads the record as it is: a page as `view` writes it, of at most half the size allowed. `refresh` reads on from
there, a bounded number of bytes at a time, and adds rollouts until the page is full. Then it only counts them; another
`load` chooses rollouts from the whole record again.

What is remembered is bounded by the page: for each of its rollouts where its parts are, and the ids of unfinished
rollouts that are not in it (of which a part alone could not be shown).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self

import msgspec

from stillhouse.recording.format import (
    BatchRecord,
    Branches,
    RecordedRollout,
    RecordError,
    RecordHeader,
    ResumedRun,
    scan,
)
from stillhouse.recording.reader import KeptBatch, Recording, read_rollout
from stillhouse.tools.view.growing_page import GrowingPage
from stillhouse.tools.view.heads import Heads
from stillhouse.tools.view.rollouts import FoundRollout, choose, find_rollouts, read
from stillhouse.tools.view.vocabulary import TokenTexts

REFRESH_BYTES: Final = 8 << 20
"""Bytes of the record that one refresh reads, or one batch if that is larger."""
Key = tuple[bool, str]
"""(mixed in from another recording, rollout id)."""


@dataclass(slots=True)
class _Row:
    """A rollout of the page."""

    number: int
    items: list[tuple[KeptBatch, int]]
    """Its parts, as in Found, each with the rest of its batch left out."""


def has_batch(path: Path) -> bool:
    """True if a file is there with at least one complete batch. Raises RecordError for one that is damaged."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return any(isinstance(found.kept, BatchRecord) for found in scan(stream, path.stat().st_size, str(path)))


class LiveRecord:
    """An open record and its page. A context manager; one thread at a time."""

    def __init__(self, path: Path, pieces: TokenTexts, max_bytes: int, heads: Heads | None = None) -> None:
        """`path` is that of the file. Raises OSError if it cannot be opened."""
        self.path = path
        self._pieces, self._heads = pieces, heads
        self._max_bytes = max_bytes
        self._stream: BinaryIO = path.open("rb")
        self.page = GrowingPage(pieces, 0, heads)
        self.header: RecordHeader
        self.branches = Branches()
        self.n_recorded = 0
        """Rollouts of the record; while it is followed, those of abandoned branches included."""
        self.full = False
        """No more rollouts are added."""
        self.n_since_full = 0
        """Rollouts that came since."""
        self.steps = 0
        """Steps after the newest batch."""
        self._rows: dict[Key, _Row] = {}
        self._not_shown: set[Key] = set()
        """Unfinished rollouts that are not in the page."""
        self._end = 0
        self._n_loads = 0

    def load(self) -> tuple[FoundRollout, ...]:
        """Make a page of the record as it is. Returns all rollouts of it. Raises RecordError."""
        with Recording(self.path) as recording:
            found = find_rollouts(recording)
            chosen = choose(found, self._max_bytes // 2)
            self._n_loads += 1
            self.page = GrowingPage(self._pieces, self._n_loads, self._heads)
            self.header, self.branches, self._end = recording.header, recording.branches, recording.end
            self._rows, self._not_shown, self.full, self.n_since_full = {}, set(), False, 0
            self.n_recorded, self.steps = len(found), recording.batches[-1].record.version.step + 1
            kept = {id(one) for one in chosen}
            for one in found:
                if id(one) in kept:
                    self._add(_alone(one))
                elif not one.item.final:
                    self._not_shown.add(_key(one))
        return tuple(found)

    def refresh(self) -> bool:
        """Read on. Returns True if there is more to read at once. Raises RecordError."""
        size = self.path.stat().st_size
        if size < self._end:
            raise RecordError(f"{self.path} is shorter than it was: another file is in its place")
        first = self._end
        for found in scan(self._stream, size, str(self.path), self._end):
            match found.kept:
                case BatchRecord():
                    self._batch(KeptBatch(found.kept, found.blob_at))
                case ResumedRun(version, parent):
                    self.branches.fork(version, parent)
                    self._forget_abandoned()
                case RecordHeader():
                    pass
            self._end = found.end
            if self._end - first >= REFRESH_BYTES:
                return self._end < size
        return False

    def rollout(self, batch: KeptBatch, index: int) -> RecordedRollout:
        """As of a Recording."""
        return read_rollout(self._stream, batch, index)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batch(self, batch: KeptBatch) -> None:
        self.steps = batch.record.version.step + 1
        for index, record in enumerate(batch.record.items):
            one = _alone(FoundRollout(record.item, record.offline, [(batch, index)]))
            key = _key(one)
            row = self._rows.get(key)
            if row is not None:
                if self.full:
                    continue
                row.items += one.items
                self.page.update(row.number, read(self, FoundRollout(one.item, one.offline, row.items)))
            elif key in self._not_shown:
                if record.item.final:
                    self._not_shown.discard(key)
            else:
                self.n_recorded += 1
                if self.full:
                    self.n_since_full += 1
                    self._not_shown.update(() if record.item.final else (key,))
                else:
                    self._add(one)
        self.full = self.full or self.page.n_bytes >= self._max_bytes

    def _add(self, one: FoundRollout) -> None:
        self._rows[_key(one)] = _Row(self.page.n_rollouts, one.items)
        self.page.add(read(self, one))

    def _forget_abandoned(self) -> None:
        """A learner went back to a checkpoint: take away what is on the branch that it left."""
        for key, row in self._rows.items():
            items = [(batch, i) for batch, i in row.items if self.branches.keeps(batch.record.version, made=1)]
            if len(items) == len(row.items):
                continue
            row.items[:] = items
            if items:
                newest, _ = items[-1]
                self.page.update(row.number, read(self, FoundRollout(newest.record.items[0].item, key[0], items)))
            else:
                self.page.abandon(row.number)


def _key(one: FoundRollout) -> Key:
    return (one.offline, one.item.rollout_id)


def _alone(one: FoundRollout) -> FoundRollout:
    """The same rollout, without the other rollouts of its batches, which would be kept in memory."""
    return FoundRollout(one.item, one.offline, [(_cut(batch, index), 0) for batch, index in one.items])


def _cut(batch: KeptBatch, index: int) -> KeptBatch:
    record, item = batch.record, batch.record.items[index]
    masked = tuple(name for name in record.masked if name == item.item.rollout_id)
    changed = msgspec.structs.replace(record, items=(item,), masked=masked, settled=(), tasks_done=(), staleness={})
    return KeptBatch(changed, batch.blob_at)
