"""A file of recorded batches: what the learner was given to train, as it came off the wire. No torch, no pickle.

    MAGIC, then records:    head (kind, sizes, CRC)    MessagePack header    blob
    begin      RecordHeader: what the file is a record of; always the first
    resumed    Resumed: a learner went on from a checkpoint; batches above of the branch that it left do not count
    batch      BatchRecord: one optimizer step; the blob holds the frames of its items, compressed item by item

Frames are kept generically, as dtype, shape and bytes: what a later version sends beside an item is carried along. A
record is whole or it is not there: its CRC covers head, header and blob.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from protocol.messages import BatchItem, Settled, WeightVersion

FORMAT: Final = 1
MAGIC: Final = b"stillhouse batches\n"
HEAD: Final = struct.Struct("<BIQI")
"""Kind, bytes of the header, bytes of the blob, CRC-32 of all but itself."""
MAX_HEADER_BYTES: Final = 64 << 20
"""More is not a header but damage: it would be read into memory."""
COMPRESSION_LEVEL: Final = 1
"""zlib's fastest. Saves a third; higher levels take longer and save hardly more (log-probs are noise)."""
_BEGIN, _RESUMED, _BATCH = 0, 1, 2

Array: TypeAlias = npt.NDArray[Any]
Writer: TypeAlias = Literal["student", "teacher"]


class RecordError(ValueError):
    """This file cannot be used as a record; the message says why and what to do."""


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a file is a record of."""

    format: int
    run: str
    """Name of the run; a learner that goes on adds to the file of its own run only."""
    vocab_fingerprint: str
    """Token ids mean nothing under another vocabulary."""
    writer: Writer
    """teacher: of the teachers' checkpoint, which was never trained (`python -m launch.write`)."""
    config_digest: str
    config: dict[str, Any]
    """The run's configuration as plain values: what a replay begins with."""


class Resumed(msgspec.Struct, frozen=True):
    """A learner went on from a checkpoint. Batches of the branch that it left do not count."""

    version: WeightVersion
    """What it began with: a new epoch."""
    parent: WeightVersion | None = None
    """The version of that checkpoint. None: written by a release that did not say."""


class ItemRecord(msgspec.Struct, frozen=True):
    """One item of a batch, and where its frames lie in the blob."""

    item: BatchItem
    offline: bool
    """Mixed in from another recording (`learner.offline`), not from the buffer."""
    frames: tuple[tuple[str, tuple[int, ...]], ...]
    """dtype and shape of each."""
    start: int
    stored_bytes: int
    compressed: bool


class BatchRecord(msgspec.Struct, frozen=True):
    """One step's batch, but for the buffer's snapshot."""

    batch_id: int
    version: WeightVersion
    """Of the weights that it was trained against."""
    staleness: dict[int, int]
    tasks_done: tuple[int, ...]
    """Tasks all of whose samples are settled with this step."""
    items: tuple[ItemRecord, ...]
    settled: tuple[Settled, ...] = ()
    """Samples that are settled with this step, and were not before."""
    masked: tuple[str, ...] = ()
    """Rollouts of the batch that the step left out."""


class Rollout(NamedTuple):
    """One item and its frames, in the order of protocol.messages.BatchItem."""

    item: BatchItem
    arrays: tuple[Array, ...]
    offline: bool = False


Kept: TypeAlias = RecordHeader | Resumed | BatchRecord
_KINDS: Final[tuple[type[Kept], ...]] = (RecordHeader, Resumed, BatchRecord)


class Found(NamedTuple):
    """One whole record of a file."""

    kept: Kept
    blob_at: int
    """Offset of its blob in the file."""
    end: int


class Branches:
    """Forks are entered in the order of the file. A learner's first epoch has none."""

    def __init__(self) -> None:
        self._newest = 0
        self._parents: dict[int, WeightVersion] = {}

    def fork(self, version: WeightVersion, parent: WeightVersion | None) -> None:
        """A learner began with `version`, of a new epoch, from the checkpoint `parent`; None: of the epoch before."""
        self._parents[version.epoch] = parent or WeightVersion(self._newest, version.step)
        self._newest = version.epoch

    def keeps(self, version: WeightVersion, *, made: int = 0) -> bool:
        """Are the weights of so many steps after `version`, in its epoch, those of the branch that was gone on with?"""
        epoch, last_step = self._newest, math.inf
        while epoch != version.epoch:
            parent = self._parents.get(epoch)
            if parent is None or parent.epoch >= epoch:
                return False
            epoch, last_step = parent.epoch, min(last_step, parent.step)
        return version.step + made <= last_step


def config_digest(config: dict[str, Any]) -> str:
    """SHA-256 (hex) of a configuration as plain values, whatever the order of its keys."""
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()


def encode_header(header: RecordHeader) -> bytes:
    return MAGIC + _record(_BEGIN, header, b"")


def encode_resumed(version: WeightVersion, parent: WeightVersion | None) -> bytes:
    return _record(_RESUMED, Resumed(version, parent), b"")


def encode_batch(
    batch_id: int,
    version: WeightVersion,
    rollouts: Sequence[Rollout],
    *,
    staleness: dict[int, int],
    tasks_done: tuple[int, ...],
    settled: tuple[Settled, ...] = (),
    masked: tuple[str, ...] = (),
) -> bytes:
    """The bytes of one batch record; for the arguments see BatchRecord."""
    items: list[ItemRecord] = []
    blobs: list[bytes] = []
    at = 0
    for rollout in rollouts:
        raw = b"".join(np.ascontiguousarray(array).tobytes() for array in rollout.arrays)
        packed = zlib.compress(raw, COMPRESSION_LEVEL)
        compressed = len(packed) < len(raw)
        blobs.append(packed if compressed else raw)
        frames = tuple((array.dtype.str, tuple(array.shape)) for array in rollout.arrays)
        items.append(ItemRecord(rollout.item, rollout.offline, frames, at, len(blobs[-1]), compressed))
        at += len(blobs[-1])
    record = BatchRecord(batch_id, version, staleness, tasks_done, tuple(items), settled, masked)
    return _record(_BATCH, record, b"".join(blobs))


def decode_frames(record: ItemRecord, stored: bytes) -> tuple[Array, ...]:
    """The read-only arrays of an item from its part of the blob. Raises RecordError."""
    try:
        raw = zlib.decompress(stored) if record.compressed else stored
        dtypes = [np.dtype(name) for name, _ in record.frames]
    except (zlib.error, TypeError) as error:
        raise RecordError(f"the frames of {record.item.rollout_id} cannot be read: {error}") from error
    sizes = [d.itemsize * math.prod(shape) for d, (_, shape) in zip(dtypes, record.frames, strict=True)]
    if sum(sizes) != len(raw) or any(dtype.kind not in "iuf" for dtype in dtypes):
        raise RecordError(
            f"the frames of {record.item.rollout_id} have {len(raw)} bytes, expected {sum(sizes)} of plain numbers for "
            f"{record.frames}"
        )
    starts = np.cumsum([0, *sizes[:-1]])
    return tuple(
        np.frombuffer(raw, dtype, count=math.prod(shape), offset=int(start)).reshape(shape)
        for dtype, start, (_, shape) in zip(dtypes, starts, record.frames, strict=True)
    )


def scan(stream: BinaryIO, size: int, name: str) -> Iterator[Found]:
    """Every whole record of a file, its CRC checked. A last one that is torn (its writer was killed, or the power
    failed) is left out: the `end` of the one before it is less than `size`. Raises RecordError for anything else."""
    stream.seek(0)
    magic = stream.read(len(MAGIC))
    if magic != MAGIC:
        if MAGIC.startswith(magic):
            return  # torn in its first bytes
        raise RecordError(f"{name} is no file of recorded batches: it begins with {magic[:16]!r}; expected {MAGIC!r}")
    at = len(MAGIC)
    while size - at >= HEAD.size:
        head = stream.read(HEAD.size)
        kind, header_bytes, blob_bytes, crc = HEAD.unpack(head)
        end = at + HEAD.size + header_bytes + blob_bytes
        if end > size:
            return
        whole = kind < len(_KINDS) and header_bytes <= MAX_HEADER_BYTES
        header = stream.read(header_bytes) if whole else b""
        if not whole or _checksum(stream, blob_bytes, zlib.crc32(header, zlib.crc32(head[:-4]))) != crc:
            if end == size:
                return  # the last one: what the disk made of it when the power failed
            raise RecordError(
                f"{name} is damaged at byte {at}, with {size - end} bytes behind it; what stands before can be saved "
                f"by cutting the file there: truncate -s {at} FILE"
            )
        yield Found(_decode(kind, header, at, name), end - blob_bytes, end)
        at = end


def _record(kind: int, header: Kept, blob: bytes) -> bytes:
    body = msgspec.msgpack.encode(header)
    head = HEAD.pack(kind, len(body), len(blob), 0)[:-4]
    crc = zlib.crc32(blob, zlib.crc32(body, zlib.crc32(head)))
    return b"".join((head, crc.to_bytes(4, "little"), body, blob))


def _checksum(stream: BinaryIO, n_bytes: int, crc: int) -> int:
    while n_bytes > 0 and (block := stream.read(min(n_bytes, 1 << 20))):
        crc = zlib.crc32(block, crc)
        n_bytes -= len(block)
    return crc


def _decode(kind: int, header: bytes, at: int, name: str) -> Kept:
    if kind == _BEGIN:
        told = msgspec.msgpack.decode(header, type=_FormatOnly).format
        if told != FORMAT:
            raise RecordError(f"{name} has format {told}, this version reads {FORMAT}; record it again")
    try:
        return msgspec.msgpack.decode(header, type=_KINDS[kind])
    except msgspec.MsgspecError as error:
        raise RecordError(f"{name}, byte {at}: the header of a record cannot be read: {error}") from error


class _FormatOnly(msgspec.Struct):
    format: int
