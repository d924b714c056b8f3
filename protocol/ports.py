"""Ports that stay ours while nobody listens there.

A process that is started again listens where it did before. If its port is one that the system also gives to outgoing
connections (Linux: ip_local_port_range, 32768 to 60999), any of them may have it by then, and a peer that tries to
reach it on the same machine may even be connected to itself.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

OUTGOING: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
OUTGOING_ELSEWHERE: Final = (32768, 65535)
"""Of all systems together that do not say."""
LOWEST: Final = 10240
"""Below are the ports of services that people know by number."""
HIGHEST: Final = 65535


def lasting_ports(tries: int = 32) -> Iterator[int]:
    """Random ports that no outgoing connection is given; none where the system gives nearly all of them. Somebody may
    listen there."""
    low, high = outgoing_ports()
    ports = [*range(LOWEST, low), *range(max(LOWEST, high + 1), HIGHEST + 1)]
    yield from random.sample(ports, min(tries, len(ports)))


def outgoing_ports() -> tuple[int, int]:
    """(first, last) of the ports that the system gives to outgoing connections."""
    try:
        low, high = map(int, OUTGOING.read_text().split())
    except (OSError, ValueError):
        return OUTGOING_ELSEWHERE
    return low, high


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this address that nobody uses now, if possible a lasting one. Raises OSError where the address is not
    ours."""
    for port in lasting_ports():
        with contextlib.suppress(OSError):
            return _bound_once(host, port)
    return _bound_once(host, 0)


def _bound_once(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, port))
        return int(probe.getsockname()[1])
