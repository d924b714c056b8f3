"""What client and server have in common at the ZeroMQ level: socket options and reading one multipart."""

from __future__ import annotations

import zmq

from protocol.codec import MAX_FRAME_BYTES, Frame

SMALL_FRAME_BYTES = 8192
"""Up to this size a received frame is copied: libzmq hands out pieces of a shared 8 KiB read buffer, of any alignment,
and one kept piece would keep all of it. Larger frames have a block of their own, and are viewed in place."""

COPY_BELOW_BYTES = 16_384
"""Outgoing frames below this size are copied into the socket: sharing them costs more than the copy (bench/wire.py)."""


def new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket with the limits of this protocol. Nothing is said after it is closed, unless closed with a linger."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.copy_threshold = COPY_BELOW_BYTES
    return socket


def send_frames(socket: zmq.Socket[bytes], frames: list[Frame]) -> None:
    """Never blocks. Raises zmq.Again when the socket is full; then nothing was sent."""
    socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)


def receive_frames(socket: zmq.Socket[bytes]) -> list[Frame] | None:
    """One multipart, or None when none is waiting."""
    try:
        frames: list[Frame] = [socket.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return None
    while socket.get(zmq.RCVMORE):
        frame = socket.recv(copy=False)
        frames.append(frame.bytes if len(frame) <= SMALL_FRAME_BYTES else frame.buffer)
    return frames
