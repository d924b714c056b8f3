"""What client and server have in common at the ZeroMQ level: socket options, and one multipart with its checksum."""

from __future__ import annotations

from typing import Final, NamedTuple

import zmq

from protocol.checksum import checksum, damage
from protocol.codec import MAX_FRAME_BYTES, MAX_FRAMES, Frame
from protocol.errors import DamagedMessage

SMALL_FRAME_BYTES = 8192
"""Up to this size a received frame is copied: libzmq hands out pieces of a shared 8 KiB read buffer, of any alignment,
and one kept piece would keep all of it. Larger frames have a block of their own, and are viewed in place."""

HANDSHAKE_MS: Final = 10_000
"""A connection that has not finished ZeroMQ's handshake by then is closed."""

# As plain integers: combining pyzmq's enums costs more than a small send.
_NO_WAIT = int(zmq.NOBLOCK)
_NO_WAIT_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket with the limits of this protocol. Nothing is said after it is closed, unless closed with a linger."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.set(zmq.MAXMSGSIZE, 2 * MAX_FRAME_BYTES)  # up to there we can say why; beyond, ZeroMQ hangs up
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    return socket


def send_frames(socket: zmq.Socket[bytes], frames: list[Frame]) -> None:
    """A message and its checksum. Never blocks. Raises zmq.Again when the socket is full; then nothing was sent.

    Frames of 64 KiB and more (pyzmq's threshold) are not copied into the socket."""
    for frame in frames:
        socket.send(frame, _NO_WAIT_MORE, copy=False)
    socket.send(checksum(frames), _NO_WAIT)


def send_from_router(socket: zmq.Socket[bytes], identity: bytes, frames: list[Frame]) -> None:
    """The same to one connection. Raises zmq.ZMQError (EHOSTUNREACH) when it is gone."""
    socket.send(identity, _NO_WAIT_MORE)
    send_frames(socket, frames)


class FromRouter(NamedTuple):
    """What a ROUTER received."""

    identity: bytes
    source: zmq.Frame
    """Tells of the connection (`zmq.Frame.get`): its descriptor, the peer's address, the role of its key."""
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


def _first(socket: zmq.Socket[bytes]) -> zmq.Frame | None:
    try:
        return socket.recv(_NO_WAIT, copy=False)
    except zmq.Again:
        return None


def _rest(socket: zmq.Socket[bytes], frame: zmq.Frame, frames: list[Frame]) -> list[Frame]:
    """What follows `frame`; of more frames than a message may have only so many that it is seen."""
    while frame.more:
        frame = socket.recv(copy=False)
        if len(frames) <= MAX_FRAMES + 1:
            frames.append(_contents(frame))
    return frames


def _without_checksum(frames: list[Frame]) -> DamagedMessage | None:
    """Take the last frame off if it is the checksum of the others."""
    if len(frames) > MAX_FRAMES + 1:  # not all were kept, and the message is too large anyway
        return None
    found = damage(frames[:-1], frames[-1] if frames else b"")
    if found is None:
        frames.pop()
    return found


def _contents(frame: zmq.Frame) -> Frame:
    return frame.bytes if len(frame) <= SMALL_FRAME_BYTES else frame.buffer
