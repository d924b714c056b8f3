"""Reads a file of recorded batches back: the batches of the branch that was kept, in any order, and single items.

Opening reads the whole file once (every checksum is looked at) and remembers where things are; batches and items are
read from the disk when they are asked for. The file may still be written to: what comes later is not seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from recording.format import (
    BatchRecord,
    Branches,
    ItemRecord,
    RecordError,
    RecordHeader,
    Resumed,
    Rollout,
    decode_frames,
    scan,
)
from recording.writer import record_path


class Kept(NamedTuple):
    """A batch of the branch that was kept."""

    record: BatchRecord
    blob_at: int


class Recording:
    """An open file of recorded batches. One thread. A context manager."""

    def __init__(self, path: Path) -> None:
        """Raises RecordError: no such file, not one of ours, another format, damaged, or without a batch."""
        self.path = record_path(path)
        if not self.path.is_file():
            raise RecordError(f"no file {str(self.path)!r}; expected one that a run wrote with learner.record")
        self._stream = self.path.open("rb")
        try:
            self._read()
        except BaseException:
            self._stream.close()
            raise

    def _read(self) -> None:
        size = self.path.stat().st_size
        header: RecordHeader | None = None
        found_batches = list[Kept]()
        branches = Branches()
        whole = 0
        for found in scan(self._stream, size, str(self.path)):
            whole, kept = found.end, found.kept
            match kept:
                case RecordHeader():
                    header = kept
                case Resumed():
                    branches.fork(kept.version, kept.parent)
                case BatchRecord():
                    found_batches.append(Kept(kept, found.blob_at))
        self.torn_bytes = size - whole
        """Of a last record that was not finished."""
        if header is None:
            raise RecordError(f"{self.path} ends before its header does; nothing was recorded")
        # A batch of step n makes version n + 1, and is kept with it.
        batches = {b.record.version.step: b for b in found_batches if branches.keeps(b.record.version, made=1)}
        self.abandoned = len(found_batches) - len(batches)
        """Batches of branches that a later learner did not go on from."""
        if not batches:
            raise RecordError(f"{self.path} holds no batch; the run that wrote it made no step")
        self.header = header
        self.batches: Sequence[Kept] = tuple(batches[step] for step in sorted(batches))
        """In the order of their steps."""

    def expect_top_k(self, divergence: str) -> None:
        """Raises RecordError where no teacher sent top-k sets, which this divergence needs."""
        if not any(one.item.top_k for batch in self.batches for one in batch.record.items):
            raise RecordError(
                f"{self.path} holds no top-k sets, which the divergence {divergence!r} needs; expected a file of a run "
                "with teacher.top_k, e.g. 256, or a divergence of sampled tokens (k1, k2, k3, seq_kd)"
            )

    def __repr__(self) -> str:
        return f"Recording({self.path}, {len(self.batches)} batches of {self.header.run})"

    @property
    def first_step(self) -> int:
        """Optimizer steps that were made before the first batch."""
        return self.batches[0].record.version.step

    @property
    def missing(self) -> int:
        """Steps between the first and the last batch of which there is none: they could not be written."""
        steps = [kept.record.version.step for kept in self.batches]
        return steps[-1] - steps[0] + 1 - len(steps)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of whose batches these are, and of every batch all but the bytes of its frames."""
        whole = hashlib.sha256(msgspec.msgpack.encode(self.header))
        for kept in self.batches:
            whole.update(msgspec.msgpack.encode(kept.record))
        return whole.hexdigest()

    def expect_vocabulary(self, fingerprint: str) -> None:
        """Raises RecordError unless the file's token ids are of this vocabulary."""
        if self.header.vocab_fingerprint != fingerprint:
            raise RecordError(
                f"{self.path} was recorded with another vocabulary (fingerprint {self.header.vocab_fingerprint[:12]}, "
                f"expected {fingerprint[:12]}); its token ids mean nothing to this student: use one with the same "
                "token-to-id map"
            )

    def rollouts(self, batch: Kept) -> list[Rollout]:
        """All items of a batch with their frames."""
        items = batch.record.items
        if not items:
            return []
        self._stream.seek(batch.blob_at)
        blob = self._stream.read(items[-1].start + items[-1].stored_bytes)
        return [_rollout(record, blob[record.start : record.start + record.stored_bytes]) for record in items]

    def rollout(self, batch: Kept, index: int) -> Rollout:
        """One item of a batch."""
        record = batch.record.items[index]
        self._stream.seek(batch.blob_at + record.start)
        return _rollout(record, self._stream.read(record.stored_bytes))

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_header(path: Path) -> RecordHeader:
    """What a file is a record of, without reading the rest. Raises RecordError."""
    path = record_path(path)
    if not path.is_file():
        raise RecordError(f"no file {str(path)!r}; expected one that a run wrote with learner.record")
    with path.open("rb") as stream:
        first = next(scan(stream, path.stat().st_size, str(path)), None)
    if first is None or not isinstance(first.kept, RecordHeader):
        raise RecordError(f"{path} ends before its header does; nothing was recorded")
    return first.kept


def _rollout(record: ItemRecord, stored: bytes) -> Rollout:
    return Rollout(record.item, decode_frames(record, stored), record.offline)
