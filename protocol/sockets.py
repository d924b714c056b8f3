"""What client and server have in common at the ZeroMQ level: socket options and reading one multipart."""

from __future__ import annotations

import zmq

from protocol.codec import MAX_FRAME_BYTES, Frame

SMALL_FRAME_BYTES = 8192
"""Up to this size a received frame is copied: libzmq hands out pieces of a shared 8 KiB read buffer, of any alignment,
and one kept piece would keep all of it. Larger frames have a block of their own, and are viewed in place."""

# As plain integers: combining pyzmq's enums costs more than a small send.
_NO_WAIT = int(zmq.NOBLOCK)
_NO_WAIT_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket with the limits of this protocol. Nothing is said after it is closed, unless closed with a linger."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket


def send_frames(socket: zmq.Socket[bytes], frames: list[Frame]) -> None:
    """Never blocks. Raises zmq.Again when the socket is full; then nothing was sent.

    Frames of 64 KiB and more (pyzmq's threshold) are not copied into the socket."""
    for frame in frames[:-1]:
        socket.send(frame, _NO_WAIT_MORE, copy=False)
    socket.send(frames[-1], _NO_WAIT, copy=False)


def receive_frames(socket: zmq.Socket[bytes]) -> list[Frame] | None:
    """One multipart, or None when none is waiting."""
    try:
        frame = socket.recv(_NO_WAIT, copy=False)
    except zmq.Again:
        return None
    frames: list[Frame] = [_contents(frame)]
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(_contents(frame))
    return frames


def _contents(frame: zmq.Frame) -> Frame:
    return frame.bytes if len(frame) <= SMALL_FRAME_BYTES else frame.buffer
