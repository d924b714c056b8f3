"""ZeroMQ as client and server both use it: socket options, and one multipart message ending in a checksum.

The last frame of every message is a checksum of all frames before it, so that damage on the way is noticed. TCP's own
sum has 16 bits and is recomputed by every middlebox; a flipped bit that it misses in a log-prob would be trained on. An
encrypted link notices damage by itself and breaks; it carries the frame too, so that there is only one format.

The checksum is XXH3, 64 bits, seed 0, big-endian (`XXH64_canonicalFromHash`), over the concatenated frames; it takes
0.3 us for a segment of 512 tokens. It guards against accidents, not against people: see SECURITY.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import zmq
from xxhash import xxh3_64

from stillhouse.protocol.codec import MAX_FRAME_BYTES, MAX_FRAMES, Frame
from stillhouse.protocol.errors import DamagedMessage

CHECKSUM_BYTES: Final = 8
SMALL_FRAME_BYTES = 8192
"""A received frame of up to this size is copied: libzmq returns slices, at any alignment, of a shared 8 KiB read
buffer, and one slice kept would keep all of the buffer. Larger frames own their block and are viewed in place."""

COPIED_BELOW_BYTES: Final = 1 << 16
"""pyzmq's own threshold, below which it copies even when asked not to."""
HANDSHAKE_MS: Final = 10_000
"""A connection that has not finished ZeroMQ's handshake by then is closed."""

# As plain integers: combining pyzmq's enums costs more than a small send.
_NO_WAIT = int(zmq.NOBLOCK)
NO_WAIT_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


def new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket with the limits of this protocol. Unsent messages are dropped at close, unless a linger is given."""
    socket = context.socket(kind)
    socket.linger = 0
    # Twice our limit: for frames between the two we can answer with the reason; above it, ZeroMQ just hangs up.
    socket.set(zmq.MAXMSGSIZE, 2 * MAX_FRAME_BYTES)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    return socket


def send_frames(socket: zmq.Socket[bytes], frames: list[Frame]) -> None:
    """Send a message and its checksum. Never blocks. Raises zmq.Again when the socket is full; then nothing was sent.

    Frames of 64 KiB and more are not copied into the socket. For smaller ones a copy costs less than what keeps the
    original alive."""
    for frame in frames:
        socket.send(frame, NO_WAIT_MORE, copy=len(frame) < COPIED_BELOW_BYTES)
    socket.send(checksum(frames), _NO_WAIT)


class FromRouter(NamedTuple):
    """A message that a ROUTER received."""

    identity: bytes
    source: zmq.Frame
    """Carries metadata of the connection (`zmq.Frame.get`): descriptor, peer address, owner of its key."""
    frames: list[Frame]
    damage: DamagedMessage | None


def receive_from_router(socket: zmq.Socket[bytes]) -> FromRouter | None:
    """One message, or None when none is waiting."""
    source = _first(socket)
    if source is None:
        return None
    frames = _rest(socket, source, [])
    return FromRouter(source.bytes, source, frames, _without_checksum(frames))


def receive_frames(socket: zmq.Socket[bytes]) -> list[Frame] | None:
    """One message, or None when none is waiting. Raises DamagedMessage."""
    first = _first(socket)
    if first is None:
        return None
    frames = _rest(socket, first, [_contents(first)])
    found = _without_checksum(frames)
    if found is not None:
        raise found
    return frames


def checksum(frames: Sequence[bytes | memoryview]) -> bytes:
    """The checksum of at least one frame."""
    digest = xxh3_64(frames[0])
    for frame in frames[1:]:
        digest.update(frame)
    return digest.digest()


def damage(frames: Sequence[bytes | memoryview], sent: bytes | memoryview) -> DamagedMessage | None:
    """The error for `frames` that do not match `sent`, the frame that came behind them; None if they match."""
    found = checksum(frames) if frames else b""
    if frames and found == sent:
        return None
    got = f"{len(sent)} bytes" if len(sent) != CHECKSUM_BYTES else bytes(sent).hex()
    expected = f"{found.hex() or 'a message'}, the XXH3 sum of the {len(frames)} frames before it"
    return DamagedMessage("the last frame is not the checksum of the others", got=got, expected=expected)


def _first(socket: zmq.Socket[bytes]) -> zmq.Frame | None:
    try:
        return socket.recv(_NO_WAIT, copy=False)
    except zmq.Again:
        return None


def _rest(socket: zmq.Socket[bytes], frame: zmq.Frame, frames: list[Frame]) -> list[Frame]:
    """Append the frames that follow `frame`. Of a message with too many, only enough to see that it has too many."""
    while frame.more:
        frame = socket.recv(copy=False)
        if len(frames) <= MAX_FRAMES + 1:
            frames.append(_contents(frame))
    return frames


def _without_checksum(frames: list[Frame]) -> DamagedMessage | None:
    """Remove the last frame if it is the checksum of the others."""
    if len(frames) > MAX_FRAMES + 1:  # not all were kept, and the message is too large anyway
        return None
    found = damage(frames[:-1], frames[-1] if frames else b"")
    if found is None:
        frames.pop()
    return found


def _contents(frame: zmq.Frame) -> Frame:
    return frame.bytes if len(frame) <= SMALL_FRAME_BYTES else frame.buffer
