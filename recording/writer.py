"""Appends every batch that a learner trains to a file (`recording.format`). Used by the learner's loop thread only.

Recording never ends the training: a batch that cannot be written is counted by reason, and a reader of the file sees
that its step is missing.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from stillhouse.protocol.atomic_file import not_a_link
from stillhouse.protocol.codec import frame_specs
from stillhouse.protocol.messages import Batch, Settled, WeightVersion
from stillhouse.recording.append_file import AppendFile, Unwritten
from stillhouse.recording.format import (
    MAGIC,
    Array,
    FoundRecord,
    RecordedRollout,
    RecordError,
    RecordHeader,
    encode_batch,
    encode_header,
    encode_resumed,
    scan,
)

log = logging.getLogger(__name__)

DEFAULT_NAME: Final = "batches.record"
"""File name used when a folder is given."""


class BatchRecorder:
    """Writes one file of recorded batches."""

    def __init__(
        self,
        path: Path,
        header: RecordHeader,
        unwritten: Unwritten,
        *,
        resume: WeightVersion | None = None,
        parent: WeightVersion | None = None,
        max_bytes: int = 0,
        as_read: Callable[[RecordedRollout], RecordedRollout | None] | None = None,
    ) -> None:
        """`resume`: version with which a resumed learner starts, and `parent`: that of its checkpoint (as in
        LearnerStarted). The run's file is then continued, and batches on the abandoned branch no longer count.
        `max_bytes`: largest size of the file; 0: no limit. `as_read`: gives what to record in place of a rollout of the
        buffer, or None to leave it out, which is counted.

        Raises RecordError, without `resume` for a file that is not empty, with it for a damaged file or one of another
        run or vocabulary."""
        path = record_path(path)
        self._path = path
        self._max_bytes = max_bytes
        self._full = False
        self._skipped: Counter[str] = Counter()
        self._as_read = as_read
        self._left_out = 0
        self._batches_total = 0
        resumed = b"" if resume is None else encode_resumed(resume, parent)
        first = encode_header(header) + resumed
        if path.exists() and path.stat().st_size:
            if resume is None:
                raise RecordError(f"{path} holds another run's batches; name another file for learner.record")
            if _cut_torn_record(path, header):
                first = resumed
        self._file = AppendFile(path, unwritten, first=first)

    @property
    def figures(self) -> dict[str, float]:
        """Totals of this process, for the metrics."""
        skipped = {f"record/skipped_{reason}_total": float(n) for reason, n in self._skipped.items()}
        left_out = {} if self._as_read is None else {"record/rollouts_left_out_total": float(self._left_out)}
        return {"record/batches_total": float(self._batches_total), **left_out, **skipped}

    def add(
        self,
        batch: Batch,
        settled: tuple[Settled, ...],
        tasks_done: tuple[int, ...],
        masked: tuple[str, ...],
        arrays: Sequence[Array],
        offline: Sequence[RecordedRollout] = (),
    ) -> None:
        """Record one step: the buffer's batch, the rollouts of it that the step left out (`masked`), those that were
        mixed in (`offline`), and which samples and tasks were settled."""
        rollouts = [*self._read(rollouts_of(batch, arrays)), *offline]
        if not rollouts:
            self._skipped["nothing_left"] += 1
            return
        data = encode_batch(
            batch.batch_id,
            batch.version,
            rollouts,
            staleness=batch.staleness,
            tasks_done=tasks_done,
            settled=settled,
            masked=masked,
        )
        if self._max_bytes and not self._full and _size(self._path) + len(data) > self._max_bytes:
            self._full = True
            log.warning("%s has reached %d bytes; no further batch is recorded", self._path, self._max_bytes)
        if self._full:
            self._skipped["max_bytes"] += 1
        elif self._file.append(data, rows=1):
            self._batches_total += 1
        else:
            self._skipped["unwritable"] += 1

    def _read(self, rollouts: Iterator[RecordedRollout]) -> Iterator[RecordedRollout]:
        for rollout in rollouts:
            read = rollout if self._as_read is None else self._as_read(rollout)
            if read is None:
                self._left_out += 1
                continue
            yield read

    def sync(self) -> None:
        """Flush to the disk, so that what was recorded survives a power failure. Call it before a checkpoint is
        written: a learner that resumes from that then finds every batch that led to it."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            log.error("%s may not survive a power failure: %s", self._path, error)

    def close(self) -> None:
        self._file.close()


def record_path(path: Path) -> Path:
    """The recording that `path` names; for a folder, the one in it."""
    return path / DEFAULT_NAME if path.is_dir() else path


def rollouts_of(batch: Batch, arrays: Sequence[Array]) -> Iterator[RecordedRollout]:
    """The items of a batch, each with its own frames, whose number the protocol defines."""
    at = 0
    for item in batch.items:
        n_frames = len(frame_specs(msgspec.structs.replace(batch, items=(item,))))
        yield RecordedRollout(item, tuple(arrays[at : at + n_frames]))
        at += n_frames
    if at != len(arrays):
        raise ValueError(f"got {len(arrays)} frames, expected {at} for these items")


def _cut_torn_record(path: Path, header: RecordHeader) -> bool:
    """Cut off what follows the last complete record of the run's own file. Returns False if not even the header was
    complete."""
    with open(path, "r+b", opener=not_a_link) as stream:
        size = path.stat().st_size
        last: FoundRecord | None = None
        for found in scan(stream, size, str(path)):
            if last is None:
                _expect_same(path, found, header)
            last = found
        whole = last.end if last is not None else 0
        if whole < size:
            log.warning("%s: cutting off %d bytes of an unfinished record", path, size - whole)
            stream.truncate(whole)
    return last is not None


def _expect_same(path: Path, found: FoundRecord, ours: RecordHeader) -> None:
    theirs = found.kept
    if not isinstance(theirs, RecordHeader):
        raise RecordError(f"{path} does not begin with a header; name another file for learner.record")
    for what in ("run", "vocab_fingerprint", "writer"):
        got, expected = getattr(theirs, what), getattr(ours, what)
        if got != expected:
            raise RecordError(
                f"{path} is the record of another run ({what}: got {got!r}, expected {expected!r}); name another file "
                "for learner.record"
            )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return len(MAGIC)
