"""Reads files of recorded batches: the batches of the branch that was kept, in any order, and single items.

Opening a file reads all of it once, checks every checksum and remembers the offsets; batches and items are read from
the disk on request. The file may still be written to: records added after it was opened are not seen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from stillhouse.protocol.payloads.registry import kind_of_bytes
from stillhouse.recording.format import (
    BatchRecord,
    Branches,
    ItemRecord,
    RecordedRollout,
    RecordError,
    RecordHeader,
    ResumedRun,
    decode_frames,
    scan,
)
from stillhouse.recording.writer import record_path


class KeptBatch(NamedTuple):
    """A batch on the branch that was kept."""

    record: BatchRecord
    blob_at: int


class Recording:
    """An open file of recorded batches. A context manager; not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises RecordError for a missing file, another format, a damaged file, or one without a batch."""
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
        found_batches = list[KeptBatch]()
        self.branches = branches = Branches()
        whole = 0
        for found in scan(self._stream, size, str(self.path)):
            whole, kept = found.end, found.kept
            match kept:
                case RecordHeader():
                    header = kept
                case ResumedRun():
                    branches.fork(kept.version, kept.parent)
                case BatchRecord():
                    found_batches.append(KeptBatch(kept, found.blob_at))
        self.end = whole
        """End of the last complete record."""
        self.torn_bytes = size - whole
        """Size of an unfinished last record."""
        if header is None:
            raise RecordError(f"{self.path} ends within its header; nothing was recorded")
        # A batch of step n makes version n + 1, and is kept with it.
        batches = {b.record.version.step: b for b in found_batches if branches.keeps(b.record.version, made=1)}
        self.abandoned = len(found_batches) - len(batches)
        """Number of batches on branches that were abandoned."""
        if not batches:
            raise RecordError(f"{self.path} contains no batch; the run that wrote it made no step")
        self.header = header
        self.batches: Sequence[KeptBatch] = tuple(batches[step] for step in sorted(batches))
        """Batches in the order of their steps."""

    def expect_top_k(self, needed_for: Callable[[str], str]) -> None:
        """Raise RecordError if the file has no top-k sets of a pool that needs them. `needed_for`: pool -> key and
        value that need them, or an empty text."""
        sent: dict[str, bool] = {}
        seen: set[str] = set()
        for batch in self.batches:
            for index, item in enumerate(one.item for one in batch.record.items):
                sent, at = dict.fromkeys(item.teachers, False) | sent, 0
                for piece in item.top_k:
                    if piece.teacher >= 0 and (pool := item.teachers[piece.teacher]) not in seen:
                        seen.add(pool)
                        payload = self.rollout(batch, index).arrays[-1][at : at + piece.n_bytes]
                        sent[pool] = kind_of_bytes(payload.data).distributions
                    at += piece.n_bytes
        for pool in [pool for pool, has_sets in (sent or {"": False}).items() if not has_sets]:
            if why := needed_for(pool):
                raise RecordError(
                    f"{self.path} holds no top-k sets of the pool {pool!r}, which {why} needs; expected the file of a "
                    "run with teacher.top_k, e.g. 256, or a divergence of sampled tokens (k1, k2, k3, seq_kd)"
                )

    @property
    def first_step(self) -> int:
        """Number of optimizer steps before the first batch."""
        return self.batches[0].record.version.step

    @property
    def missing(self) -> int:
        """Number of steps between the first and the last batch that could not be recorded."""
        steps = [kept.record.version.step for kept in self.batches]
        return steps[-1] - steps[0] + 1 - len(steps)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the header and of all batches, without the bytes of their frames."""
        whole = hashlib.sha256(msgspec.msgpack.encode(self.header))
        for kept in self.batches:
            whole.update(msgspec.msgpack.encode(kept.record))
        return whole.hexdigest()

    def expect_vocabulary(self, fingerprint: str) -> None:
        """Raise RecordError unless the file's token ids belong to this vocabulary."""
        if self.header.vocab_fingerprint != fingerprint:
            raise RecordError(
                f"{self.path} was recorded with another vocabulary (fingerprint {self.header.vocab_fingerprint[:12]}, "
                f"expected {fingerprint[:12]}); its token ids mean nothing to this student: use one with the same "
                "token-to-id map"
            )

    def rollouts(self, batch: KeptBatch) -> list[RecordedRollout]:
        """All items of a batch with their frames."""
        items = batch.record.items
        if not items:
            return []
        self._stream.seek(batch.blob_at)
        blob = self._stream.read(items[-1].start + items[-1].stored_bytes)
        return [_rollout(record, blob[record.start : record.start + record.stored_bytes]) for record in items]

    def rollout(self, batch: KeptBatch, index: int) -> RecordedRollout:
        """One item of a batch."""
        record = batch.record.items[index]
        self._stream.seek(batch.blob_at + record.start)
        return _rollout(record, self._stream.read(record.stored_bytes))

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_header(path: Path) -> RecordHeader:
    """Read the header of a file, and nothing else. Raises RecordError."""
    path = record_path(path)
    if not path.is_file():
        raise RecordError(f"no file {str(path)!r}; expected one that a run wrote with learner.record")
    with path.open("rb") as stream:
        first = next(scan(stream, path.stat().st_size, str(path)), None)
    if first is None or not isinstance(first.kept, RecordHeader):
        raise RecordError(f"{path} ends within its header; nothing was recorded")
    return first.kept


def _rollout(record: ItemRecord, stored: bytes) -> RecordedRollout:
    return RecordedRollout(record.item, decode_frames(record, stored), record.offline)
