"""Messages to frames and back: frame 0 is MessagePack of the tagged Struct, the others are raw little-endian arrays.

Nothing is copied: `encode` returns memoryviews of C-contiguous arrays, `decode` read-only views of the frames. A
message's fields determine its frames (`FRAMES`). Both sides check them, so that every array has the dtype and length
its message promises. The values in the arrays are checked later, by the buffer.

For other languages: any MessagePack library reads a header. `Batch.staleness` and `Snapshot.staleness_hist` have
integer keys (in Python: `msgpack.unpackb(header, strict_map_key=False)`).
"""

# Why it is so: docs/decisions/messagepack.md

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from stillhouse.protocol import messages as m
from stillhouse.protocol.errors import EncodeError, MalformedMessage, MessageTooLarge

Array: TypeAlias = npt.NDArray[Any]
Frame: TypeAlias = bytes | memoryview

MAX_ITEMS = 16_384
"""Rollouts, tickets or leases in one message: eight times the largest batch of published recipes (2,048 rollouts)."""
MAX_FRAMES = 1 + 5 * MAX_ITEMS
"""A Batch has up to five arrays per rollout, the most of all messages."""
MAX_HEADER_BYTES = 512 * MAX_ITEMS
"""8 MiB. A BatchItem takes some 200 bytes, and 12 more per version span. The whole header is parsed before anything
can be checked, so this bounds the work that a stranger can cause."""
MAX_SMALL_BYTES = 256 << 10
"""A heartbeat has some thousand numbers with their names at most. The buffer keeps the newest of each peer, and
journals most of what it gets."""
MAX_FRAME_BYTES = 64 << 20
"""The largest useful array is a rollout's teacher log-probs: a million tokens x 16 teachers x float32. ZeroMQ gets a
limit derived from this, and drops a connection before it takes memory for a larger frame."""
MAX_MESSAGE_BYTES = 1 << 30
"""1,024 rollouts x 64k tokens x 13 bytes (ids, two kinds of log-probs, mask) is 0.8 GiB. Top-k payloads come on top
(launch.config.consistency)."""
MAX_TO_BUFFER_BYTES = 256 << 20
"""The same for messages to the buffer, which come from many peers and are smaller: 64 prompts of a million tokens."""

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_UINT8 = np.dtype("u1")


class Received(NamedTuple):
    """A message and its arrays: read-only, of the dtype and length that `protocol.messages` states."""

    message: m.Message
    arrays: tuple[Array, ...]


class FrameSpec(NamedTuple):
    """The requirements on one array frame. `shape` None: one-dimensional, of any length from 1 on."""

    what: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None


# ------------------------------------------------------------------------------------- which frames a message has


def _prompt_per_ticket(message: m.Tickets) -> Iterator[FrameSpec]:
    for ticket in message.tickets:
        yield FrameSpec(f"prompt ids of {ticket.rollout_id}", _INT32, None)


def _prompt_per_task(message: m.TasksOffered) -> Iterator[FrameSpec]:
    for task in message.tasks:
        yield FrameSpec(f"prompt ids of task {task.task_id}", _INT32, None)


def _segment_arrays(message: m.Segment) -> Sequence[FrameSpec]:
    return _arrays_of(message.end - message.start, message.top_ids, message.experts)


@lru_cache(maxsize=4096)
def _arrays_of(n_tokens: int, top_ids: bool, experts: bool) -> Sequence[FrameSpec]:
    """The arrays of a segment. The answers are kept, because segments are the most frequent messages and small."""
    own = (("token ids", _INT32), ("behaviour log-probs", _FLOAT32), ("loss mask", _UINT8))
    further = [what for what, there in (("likeliest ids", top_ids), ("expert ids", experts)) if there]
    return [
        *(FrameSpec(what, dtype, (n_tokens,)) for what, dtype in own),
        *(FrameSpec(what, _UINT8, None) for what in further),
    ]


def _context_per_item(message: m.ScoreWork) -> Iterator[FrameSpec]:
    for item in message.items:
        yield FrameSpec(f"token ids of lease {item.lease_id}", _INT32, (item.context_tokens,))
        if item.top_ids:
            yield FrameSpec(f"likeliest ids of lease {item.lease_id}", _UINT8, None)


def _scores_per_lease(message: m.Scores) -> Iterator[FrameSpec]:
    for lease_id in message.leases:
        yield FrameSpec(f"log-probs of lease {lease_id}", _FLOAT32, None)
        if message.top_k:
            yield FrameSpec(f"top-k payload of lease {lease_id}", _UINT8, None)


def _four_or_five_per_item(message: m.Batch | m.EvalResult) -> Iterator[FrameSpec]:
    for item in message.items:
        yield FrameSpec(f"token ids of {item.rollout_id}", _INT32, (item.end,))
        yield FrameSpec(f"behaviour log-probs of {item.rollout_id}", _FLOAT32, (item.end,))
        yield FrameSpec(f"train mask of {item.rollout_id}", _UINT8, (item.end,))
        yield FrameSpec(f"teacher log-probs of {item.rollout_id}", _FLOAT32, (len(item.teachers), item.end))
        if item.top_k:
            sizes = [piece.n_bytes for piece in item.top_k]
            if min(sizes) < 1:
                raise ValueError(f"a top-k payload of {min(sizes)} bytes in {item.rollout_id}")
            yield FrameSpec(f"top-k payloads of {item.rollout_id}", _UINT8, (sum(sizes),))


FRAMES: dict[type[Any], Callable[[Any], Iterable[FrameSpec]]] = {
    m.Tickets: _prompt_per_ticket,
    m.Segment: _segment_arrays,
    m.ScoreWork: _context_per_item,
    m.Scores: _scores_per_lease,
    m.TasksOffered: _prompt_per_task,
    m.Batch: _four_or_five_per_item,
    m.EvalResult: _four_or_five_per_item,
}
"""Messages with array frames. All others consist of the header only."""

PARALLEL: dict[type[Any], tuple[str, ...]] = {
    m.ScoresAck: ("leases", "statuses", "reasons"),
    m.Membership: ("actors", "incarnations"),
}
"""Fields that must have the same length, because they are read side by side."""


def frame_specs(message: m.Message) -> list[FrameSpec]:
    """The array frames that follow `message`, in order. Raises ValueError when its fields contradict one another."""
    kind = type(message)
    for first, *others in (PARALLEL[kind],) if kind in PARALLEL else ():
        for other in others:
            n_first, n_other = len(getattr(message, first)), len(getattr(message, other))
            if n_first != n_other:
                raise ValueError(f"{n_other} {other} for {n_first} {first}")
    if kind not in FRAMES:
        return []
    specs = list(FRAMES[kind](message))
    for spec in specs:
        # 0 is valid: no teachers, or a final segment that only reports the end of the rollout.
        if spec.shape is not None and min(spec.shape) < 0:
            raise ValueError(f"{spec.what} of {spec.shape[-1]} tokens")
    return specs


# ------------------------------------------------------------------------------------------------ encode and decode

_SMALL: Final = (m.Heartbeat, m.Goodbye, m.TicketCredit, m.ScoreCredit, m.SnapshotWanted)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[m.Message] = msgspec.msgpack.Decoder(m.Message)


def encode(message: m.Message, arrays: Sequence[Array] = (), *, max_bytes: int = MAX_MESSAGE_BYTES) -> list[Frame]:
    """Frames of one multipart. The array frames are views: do not change the arrays until the message is sent.

    Raises EncodeError when the arrays are not those that `protocol.messages` states, or a limit is exceeded.
    """
    name = type(message).__name__
    try:
        specs = frame_specs(message)
    except ValueError as error:
        raise EncodeError(f"{name} contradicts itself: {error}") from None
    if len(arrays) != len(specs):
        raise EncodeError(f"{name}: got {len(arrays)} arrays, expected {len(specs)}")
    try:
        frames: list[Frame] = [_encoder.encode(message)]
    except (TypeError, ValueError, OverflowError) as error:  # a NumPy number, a lone surrogate, an int above 64 bits
        raise EncodeError(f"{name} holds a value that MessagePack cannot encode: {error}") from error
    for array, spec in zip(arrays, specs, strict=True):
        fits = array.ndim == 1 and array.shape[0] > 0 if spec.shape is None else array.shape == spec.shape
        if not fits or array.dtype != spec.dtype:
            expected = f"{spec.dtype} {'[n >= 1]' if spec.shape is None else list(spec.shape)}"
            raise EncodeError(f"{name}, {spec.what}: got {array.dtype} {list(array.shape)}, expected {expected}")
        frames.append(_raw_bytes(array))
    excess = _excess(frames, max_bytes)
    if excess is not None:
        raise EncodeError(f"{name}: got {excess[0]}, expected at most {excess[1]}; send it in smaller parts")
    return frames


def decode(frames: Sequence[Frame], *, max_bytes: int = MAX_MESSAGE_BYTES) -> Received:
    """The message of one multipart. The arrays are read-only views that keep their frames alive.

    Raises only MalformedMessage or MessageTooLarge, whatever the bytes are.
    """
    if not frames:
        raise MalformedMessage("no frames", got="an empty multipart", expected="a MessagePack header")
    header = frames[0]
    excess = _excess(frames, max_bytes)
    if excess is not None:
        raise MessageTooLarge("message too large", got=excess[0], expected=f"at most {excess[1]}")
    try:
        message = _decoder.decode(header)
    except (ValueError, OverflowError, RecursionError) as error:  # msgspec's own errors and UnicodeDecodeError included
        got = f"{len(header)} bytes ({str(error)[:200]})"
        raise MalformedMessage("unreadable header", got=got, expected="MessagePack of a protocol message") from error
    name = type(message).__name__
    if isinstance(message, _SMALL) and len(header) > MAX_SMALL_BYTES:
        raise MessageTooLarge(f"{name} too large", got=f"{len(header)} bytes", expected=f"at most {MAX_SMALL_BYTES}")
    try:
        specs = frame_specs(message)
    except ValueError as error:
        raise MalformedMessage(f"{name} contradicts itself", got=str(error), expected="consistent fields") from None
    if len(frames) - 1 != len(specs):
        raise MalformedMessage(f"{name}: frames", got=f"{len(frames) - 1} arrays", expected=f"{len(specs)} arrays")
    return Received(message, tuple(map(_read_array, frames[1:], specs)))


def _excess(frames: Sequence[Frame], max_bytes: int) -> tuple[str, str] | None:
    """The exceeded size and its limit; None if all sizes are within the limits."""
    lengths = [len(frame) for frame in frames]
    if sum(lengths) <= min(MAX_HEADER_BYTES, MAX_FRAME_BYTES, max_bytes) and len(frames) <= MAX_FRAMES:
        return None  # nearly always
    if lengths[0] > MAX_HEADER_BYTES:
        return f"a header of {lengths[0]} bytes", f"{MAX_HEADER_BYTES}"
    if len(frames) > MAX_FRAMES:
        return f"{len(frames)} frames", f"{MAX_FRAMES}"
    if max(lengths) > MAX_FRAME_BYTES:
        return f"a frame of {max(lengths)} bytes", f"{MAX_FRAME_BYTES}"
    if sum(lengths) > max_bytes:
        return f"{sum(lengths)} bytes in total", f"{max_bytes}"
    return None


def _raw_bytes(array: Array) -> Frame:
    if array.nbytes == 0:  # memoryview cannot cast a shape with a zero in it
        return b""
    return np.ascontiguousarray(array).data.cast("B")


def _read_array(frame: Frame, spec: FrameSpec) -> Array:
    n_bytes = len(frame)
    item_bytes = spec.dtype.itemsize
    if spec.shape is None:
        if n_bytes == 0 or n_bytes % item_bytes:
            raise MalformedMessage(
                f"length of {spec.what}", got=f"{n_bytes} bytes", expected=f"a multiple of {item_bytes} bytes above 0"
            )
    elif n_bytes != (spec.shape[0] if len(spec.shape) == 1 else math.prod(spec.shape)) * item_bytes:
        expected = f"{math.prod(spec.shape) * item_bytes} bytes ({spec.dtype} {list(spec.shape)})"
        raise MalformedMessage(f"length of {spec.what}", got=f"{n_bytes} bytes", expected=expected)
    array = np.frombuffer(frame, dtype=spec.dtype)
    if not isinstance(frame, bytes):  # arrays of bytes are read-only anyway
        array.flags.writeable = False
    return array if spec.shape is None or len(spec.shape) == 1 else array.reshape(spec.shape)


class _HelloOfAnyVersion(msgspec.Struct, tag="Hello"):
    protocol_version: int


def claimed_version(header: Frame) -> int | None:
    """The protocol version in a Hello that cannot be decoded, because other versions may have other fields."""
    try:
        return msgspec.msgpack.decode(header, type=_HelloOfAnyVersion).protocol_version
    except (ValueError, OverflowError, RecursionError):
        return None
