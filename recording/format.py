"""File format of recorded batches: the learner's training data as it came off the wire. No torch, no pickle.

    MAGIC, then records:    head (kind, sizes, CRC)    MessagePack header    blob
    begin      RecordHeader: describes the recorded run; always the first record
    resumed    Resumed: a learner resumed from a checkpoint; earlier batches on the branch that it left do not count
    batch      BatchRecord: one optimizer step; the blob contains the frames of its items, compressed item by item

Frames are stored generically, as dtype, shape and bytes, so that frames that a later version adds are kept. A record is
either complete or ignored: its CRC covers head, header and blob.
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

from stillhouse.protocol.codec import MAX_MESSAGE_BYTES
from stillhouse.protocol.messages import BatchItem, Settled, WeightVersion

FORMAT: Final = 1
MAGIC: Final = b"stillhouse batches\n"
HEAD: Final = struct.Struct("<BIQI")
"""Head of a record: kind, bytes of the header, bytes of the blob, CRC-32 of everything but itself."""
MAX_HEADER_BYTES: Final = 64 << 20
"""Longest header. A larger size means damage, and would be read into memory."""
COMPRESSION_LEVEL: Final = 1
"""zlib's fastest level. It saves a third; higher levels take longer and save hardly more (log-probs are noise)."""
_BEGIN, _RESUMED, _BATCH = 0, 1, 2

Array: TypeAlias = npt.NDArray[Any]
Writer: TypeAlias = Literal["student", "teacher", "data"]


class RecordError(ValueError):
    """The file cannot be used as a recording. The message says why and what to do."""


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First record: describes the run whose batches the file contains."""

    format: int
    run: str
    """Name of the run. A learner that resumes appends only to the file of its own run."""
    vocab_fingerprint: str
    """Fingerprint of the vocabulary, without which token ids mean nothing."""
    writer: Writer
    """`teacher`: written by the teachers' checkpoint, which was never trained (`stillhouse write`). `data`: text
    that was there (`tools.write.given`); who sampled it is not known, so its behaviour log-probs are 0."""
    config_digest: str
    config: dict[str, Any]
    """The run's configuration as plain values, from which a replay starts."""


class ResumedRun(msgspec.Struct, frozen=True):
    """A learner resumed from a checkpoint. Batches on the branch that it left do not count."""

    version: WeightVersion
    """Version with which it started, in a new epoch."""
    parent: WeightVersion | None = None
    """Version of that checkpoint. None: recorded by a release that did not store it."""


class ItemRecord(msgspec.Struct, frozen=True):
    """One item of a batch, and the location of its frames in the blob."""

    item: BatchItem
    offline: bool
    """True if it was mixed in from another recording (`learner.offline`)."""
    frames: tuple[tuple[str, tuple[int, ...]], ...]
    """dtype and shape of each frame."""
    start: int
    stored_bytes: int
    compressed: bool


class BatchRecord(msgspec.Struct, frozen=True):
    """The batch of one step, without the buffer's snapshot."""

    batch_id: int
    version: WeightVersion
    """Version of the weights that the step started from."""
    staleness: dict[int, int]
    tasks_done: tuple[int, ...]
    """Tasks whose last sample is settled with this step."""
    items: tuple[ItemRecord, ...]
    settled: tuple[Settled, ...] = ()
    """Samples that are settled with this step."""
    masked: tuple[str, ...] = ()
    """Ids of rollouts in the batch that the step left out."""


class RecordedRollout(NamedTuple):
    """One item and its frames, in the order of protocol.messages.BatchItem."""

    item: BatchItem
    arrays: tuple[Array, ...]
    offline: bool = False


Kept: TypeAlias = RecordHeader | ResumedRun | BatchRecord
_KINDS: Final[tuple[type[Kept], ...]] = (RecordHeader, ResumedRun, BatchRecord)


class FoundRecord(NamedTuple):
    """One complete record of a file."""

    kept: Kept
    blob_at: int
    """Offset of its blob in the file."""
    end: int


class Branches:
    """The branch of versions that a run kept, according to its files: the path from the first epoch to the newest one,
    through the checkpoints from which later epochs started. Forks are entered in the order of the file."""

    def __init__(self) -> None:
        self._newest = 0
        self._parents: dict[int, WeightVersion] = {}

    def fork(self, version: WeightVersion, parent: WeightVersion | None) -> None:
        """Enter a learner that started at `version`, in a new epoch, from the checkpoint `parent`; None: one of the
        epoch before."""
        self._parents[version.epoch] = parent or WeightVersion(self._newest, version.step)
        self._newest = version.epoch

    def keeps(self, version: WeightVersion, *, made: int = 0) -> bool:
        """Return True if the weights `made` steps after `version`, in its epoch, are on the branch that was kept."""
        epoch, last_step = self._newest, math.inf
        while epoch != version.epoch:
            parent = self._parents.get(epoch)
            if parent is None or parent.epoch >= epoch:
                return False
            epoch, last_step = parent.epoch, min(last_step, parent.step)
        return version.step + made <= last_step

    def distance(self, sampled: WeightVersion, now: WeightVersion) -> int | None:
        """Optimizer steps between two versions: back to where their branches meet, and on from there. None if the file
        does not say where one of their epochs began."""
        a, b = sampled, now
        while a.epoch != b.epoch:
            younger = max(a, b, key=lambda version: version.epoch)
            parent = self._parents.get(younger.epoch)
            if parent is None or parent.epoch >= younger.epoch:
                return None
            a, b = (parent, b) if younger is a else (a, parent)
        meet = min(a.step, b.step)
        return sampled.step - meet + now.step - meet


def config_digest(config: dict[str, Any]) -> str:
    """SHA-256 (hex) of a configuration as plain values, whatever the order of its keys."""
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()


def encode_header(header: RecordHeader) -> bytes:
    return MAGIC + _record(_BEGIN, header, b"")


def encode_resumed(version: WeightVersion, parent: WeightVersion | None) -> bytes:
    return _record(_RESUMED, ResumedRun(version, parent), b"")


def encode_batch(
    batch_id: int,
    version: WeightVersion,
    rollouts: Sequence[RecordedRollout],
    *,
    staleness: dict[int, int],
    tasks_done: tuple[int, ...],
    settled: tuple[Settled, ...] = (),
    masked: tuple[str, ...] = (),
) -> bytes:
    """Encode one batch record. The arguments are those of BatchRecord."""
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
    """Decode an item's frames, as read-only arrays, from its part of the blob. Unpacks at most what the header claims,
    and that must be what an item can have. Raises RecordError."""
    who = f"the frames of {record.item.rollout_id}"
    dtypes, sizes = _claimed(record)
    try:
        raw = unpack_at_most(stored, sum(sizes)) if record.compressed else stored
    except zlib.error as error:
        raise RecordError(f"{who} cannot be read: {error}") from error
    if len(raw) != sum(sizes):
        got = f"more than {sum(sizes)}" if len(raw) > sum(sizes) else str(len(raw))
        raise RecordError(f"{who} have {got} bytes, expected {sum(sizes)} for {record.frames}")
    starts = np.cumsum([0, *sizes[:-1]])
    return tuple(
        np.frombuffer(raw, dtype, count=math.prod(shape), offset=int(start)).reshape(shape)
        for dtype, start, (_, shape) in zip(dtypes, starts, record.frames, strict=True)
    )


def _claimed(record: ItemRecord) -> tuple[list[np.dtype[Any]], list[int]]:
    """dtypes and bytes of an item's frames, as its header has them. Raises RecordError unless an item can have them."""
    who = f"the frames of {record.item.rollout_id}"
    try:
        dtypes = [np.dtype(name) for name, _ in record.frames]
    except TypeError as error:
        raise RecordError(f"{who} cannot be read: {error}") from error
    if any(dtype.kind not in "iuf" for dtype in dtypes) or any(n < 0 for _, shape in record.frames for n in shape):
        raise RecordError(f"{who} are {record.frames}, expected plain numbers")
    sizes = [d.itemsize * math.prod(shape) for d, (_, shape) in zip(dtypes, record.frames, strict=True)]
    if sum(sizes) > MAX_MESSAGE_BYTES:
        raise RecordError(f"{who} claim {sum(sizes)} bytes, expected at most {MAX_MESSAGE_BYTES}: no batch is larger")
    return dtypes, sizes


def _expect_inside(record: BatchRecord, blob_bytes: int, name: str) -> None:
    """Raise RecordError for items whose bytes are not in the record, or that would unpack to more than a batch can
    have. One of that size may be mixed in from another recording."""
    for item in record.items:
        if not (item.start >= 0 and item.stored_bytes >= 0 and item.start + item.stored_bytes <= blob_bytes):
            raise RecordError(f"{name}: the frames of {item.item.rollout_id} lie outside their batch's {blob_bytes} B")
    if (total := sum(sum(_claimed(item)[1]) for item in record.items)) > 2 * MAX_MESSAGE_BYTES:
        raise RecordError(
            f"{name}: the items of batch {record.batch_id} claim {total} bytes, expected at most "
            f"{2 * MAX_MESSAGE_BYTES}: no batch is larger"
        )


def unpack_at_most(stored: bytes, n_bytes: int) -> bytes:
    """What zlib packed; of more than `n_bytes` only one byte more. Raises zlib.error."""
    return zlib.decompressobj().decompress(stored, n_bytes + 1)


def scan(stream: BinaryIO, size: int, name: str) -> Iterator[FoundRecord]:
    """Yield every complete record of a file, after checking its CRC. A torn last record (its writer was killed, or the
    power failed) is left out: the `end` of the one before it is less than `size`. Raises RecordError for other
    damage."""
    stream.seek(0)
    magic = stream.read(len(MAGIC))
    if magic != MAGIC:
        if MAGIC.startswith(magic):
            return  # torn within the magic
        raise RecordError(
            f"{name} is not a file of recorded batches: it begins with {magic[:16]!r}; expected {MAGIC!r}"
        )
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
                return  # the last record, incompletely written when the power failed
            raise RecordError(
                f"{name} is damaged at byte {at}, with {size - end} bytes after it; the part before it can be saved "
                f"by cutting the file there: truncate -s {at} FILE"
            )
        kept = _decode(kind, header, at, name)
        if isinstance(kept, BatchRecord):
            _expect_inside(kept, blob_bytes, name)
        yield FoundRecord(kept, end - blob_bytes, end)
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
        found = msgspec.msgpack.decode(header, type=_FormatOnly).format
        if found != FORMAT:
            raise RecordError(f"{name} has format {found}, this version reads {FORMAT}; record it again")
    try:
        return msgspec.msgpack.decode(header, type=_KINDS[kind])
    except msgspec.MsgspecError as error:
        raise RecordError(f"{name}, byte {at}: the header of a record cannot be read: {error}") from error


class _FormatOnly(msgspec.Struct):
    format: int
