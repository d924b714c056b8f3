"""What the kernel says of the TCP connections that ZeroMQ holds."""

from __future__ import annotations

import contextlib
import os
import socket as stdlib_socket
import struct
from collections.abc import Generator
from typing import Final

_BYTES_RECEIVED_AT: Final = 128
"""Offset of tcpi_bytes_received (u64) in struct tcp_info, part of Linux's stable interface."""


def bytes_received(tcp: stdlib_socket.socket) -> int:
    """All that the connection has brought so far, read by ZeroMQ or not. Linux only."""
    info = tcp.getsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_INFO, 256)
    (n_bytes,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)
    return n_bytes


@contextlib.contextmanager
def tcp_socket(fd: int) -> Generator[stdlib_socket.socket | None]:
    """A second handle on one of ZeroMQ's sockets; None when it is closed, its peer is gone, or it is not TCP."""
    try:
        handle = stdlib_socket.socket(fileno=os.dup(fd))
    except OSError:
        yield None
        return
    with handle:
        yield handle if _is_connected_tcp(handle) else None


def _is_connected_tcp(handle: stdlib_socket.socket) -> bool:
    try:
        handle.getpeername()
    except OSError:
        return False
    return handle.family in (stdlib_socket.AF_INET, stdlib_socket.AF_INET6)
