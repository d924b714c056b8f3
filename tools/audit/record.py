"""Reads the file that `learner.record` names: MAGIC, then records of head (kind, sizes, CRC), MessagePack header, blob.

Headers are unpacked with msgpack, not with msgspec, which wrote them: this shows if only the writer's library can read
them. Structs here hold only what is counted, and ignore other fields.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeAlias

import msgpack
import msgspec
import numpy as np

MAGIC: Final = b"stillhouse batches\n"
FORMAT: Final = 1
_HEAD: Final = struct.Struct("<BIQI")
_READ_BYTES: Final = 1 << 20
_MOST_BYTES: Final = 1 << 30
"""Largest batch, and so largest item."""
_TRAIN_MASK: Final = 2
"""Index among the frames of an item: token ids, behaviour log-probs, train mask, teacher log-probs."""


class AuditError(Exception):
    """The run cannot be audited; the message says why and what to do."""


class Version(NamedTuple):
    """Weights after `step` optimizer steps; `epoch` numbers the learner processes that trained them."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"


class Span(NamedTuple):
    """The weight version that sampled the sampled tokens in [start, end)."""

    version: Version
    start: int
    end: int


class SampledRollout(msgspec.Struct, frozen=True):
    """A rollout in a batch."""

    rollout_id: str
    task_id: int
    sample_index: int
    group_size: int
    spans: tuple[Span, ...]
    finish_reason: str | None = None
    reward: float | None = None

    @property
    def sample(self) -> tuple[int, int]:
        return (self.task_id, self.sample_index)


class Item(msgspec.Struct, frozen=True):
    """A rollout in a batch, and the position of its frames in the blob."""

    item: SampledRollout
    offline: bool
    frames: tuple[tuple[str, tuple[int, ...]], ...]
    start: int
    stored_bytes: int
    compressed: bool


class Settled(NamedTuple):
    """A sample to which nothing more will happen on this branch."""

    task_id: int
    sample_index: int
    fate: str
    """trained, masked or dropped."""
    reason: str = ""


class Begin(msgspec.Struct, frozen=True):
    """The first record."""

    format: int
    run: str
    config: dict[str, Any]


class Resumed(msgspec.Struct, frozen=True):
    """A learner continued the run under a new epoch."""

    version: Version
    parent: Version | None = None
    """The version whose weights it continued from."""


class RecordedBatch(msgspec.Struct, frozen=True):
    """The optimizer step that took `version` to the next one."""

    batch_id: int
    version: Version
    items: tuple[Item, ...]
    settled: tuple[Settled, ...] = ()
    """Samples settled since the step before."""
    masked: tuple[str, ...] = ()
    """Rollouts that the step left out."""

    @property
    def trained_items(self) -> list[Item]:
        """The items without those mixed in from another file and those left out."""
        return [item for item in self.items if not item.offline and item.item.rollout_id not in self.masked]


Record: TypeAlias = Begin | Resumed | RecordedBatch
_KINDS: Final[tuple[type[Record], ...]] = (Begin, Resumed, RecordedBatch)


class RecordPlace(NamedTuple):
    """A record and its position in the file."""

    record: Record
    header_at: int
    header_bytes: int
    blob_at: int


class RecordFile:
    """An open record file; a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises AuditError if the file cannot be opened."""
        self.path = path
        self.torn_bytes = 0
        """Bytes after the last complete record, known when `places` has ended: the learner was killed while writing."""
        try:
            self._size = path.stat().st_size
            self._stream = path.open("rb")
        except OSError as error:
            raise AuditError(f"the record {path} cannot be read: {error.strerror}") from error

    def places(self) -> Iterator[RecordPlace]:
        """Yield all complete records. Raises AuditError if the file is damaged or not a record file."""
        stream, at = self._stream, len(MAGIC)
        stream.seek(0)
        if (magic := stream.read(at)) != MAGIC:
            raise AuditError(f"{self.path} is not a record: it begins with {magic[:16]!r}, expected {MAGIC!r}")
        while self._size - at >= _HEAD.size:
            stream.seek(at)
            head = stream.read(_HEAD.size)
            kind, header_bytes, blob_bytes, crc = _HEAD.unpack(head)
            header_at = at + _HEAD.size
            blob_at = header_at + header_bytes
            end = blob_at + blob_bytes
            if end > self._size:
                break
            if kind >= len(_KINDS) or self._crc(header_at, end, zlib.crc32(head[:-4])) != crc:
                if end == self._size:
                    break  # a power failure may leave the last record incomplete
                raise AuditError(f"{self.path} is damaged at byte {at}: a checksum is wrong; nothing can be counted")
            yield RecordPlace(self._decode(kind, header_at, header_bytes), header_at, header_bytes, blob_at)
            at = end
        self.torn_bytes = self._size - at

    def batch(self, place: RecordPlace) -> RecordedBatch:
        """Read the batch at a place that `places` gave."""
        record = self._decode(_KINDS.index(RecordedBatch), place.header_at, place.header_bytes)
        assert isinstance(record, RecordedBatch)
        return record

    def runs(self, item: Item, blob_at: int) -> list[tuple[int, int]]:
        """Ranges [start, end) of the tokens of one item that the batch trained. Raises AuditError."""
        try:
            sizes = [np.dtype(name).itemsize * prod(shape) for name, shape in item.frames]
            name, shape = item.frames[_TRAIN_MASK]
            if not 0 <= sum(sizes) <= _MOST_BYTES or not 0 <= item.stored_bytes <= _MOST_BYTES:
                raise TypeError(f"{sum(sizes)} bytes of frames, {item.stored_bytes} stored; a batch has fewer")
            raw = self._read(blob_at + item.start, item.stored_bytes)
            if item.compressed:  # one byte more than claimed shows that the claim is wrong
                raw = zlib.decompressobj().decompress(raw, sum(sizes) + 1)
        except (zlib.error, TypeError, IndexError) as error:
            raise AuditError(f"{self.path}: the frames of {item.item.rollout_id} cannot be read: {error}") from error
        if np.dtype(name) != np.uint8 or len(shape) != 1 or sum(sizes) != len(raw):
            raise AuditError(
                f"{self.path}: the frames of {item.item.rollout_id} are {item.frames} in {len(raw)} bytes, expected a "
                "train mask of bytes in the third place"
            )
        mask = np.frombuffer(raw, np.uint8, count=shape[0], offset=sum(sizes[:_TRAIN_MASK]))
        edges = np.flatnonzero(np.diff(np.concatenate(([0], mask != 0, [0]))))
        return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, at: int, n_bytes: int) -> bytes:
        self._stream.seek(at)
        return self._stream.read(n_bytes)

    def _crc(self, at: int, end: int, crc: int) -> int:
        self._stream.seek(at)
        while at < end and (block := self._stream.read(min(_READ_BYTES, end - at))):
            crc = zlib.crc32(block, crc)
            at += len(block)
        return crc

    def _decode(self, kind: int, at: int, n_bytes: int) -> Record:
        try:
            plain: object = msgpack.unpackb(self._read(at, n_bytes), strict_map_key=False)
            record = msgspec.convert(plain, type=_KINDS[kind])
        except (ValueError, msgpack.UnpackException, msgspec.MsgspecError) as error:
            raise AuditError(f"{self.path}, byte {at}: the header of a record cannot be read: {error}") from error
        if isinstance(record, Begin) and record.format != FORMAT:
            raise AuditError(f"{self.path} has format {record.format}, expected {FORMAT}")
        return record
