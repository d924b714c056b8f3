"""Addresses that other machines can reach, and ports that remain available for a restarted process.

A restarted process listens where it did before. If its port is one that the system also gives to outgoing connections
(Linux: ip_local_port_range, 32768 to 60999), such a connection may hold it by then, and a peer on the same machine that
tries to reach the port may even be connected to itself. Lasting ports are outside that range.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

OUTGOING: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
OUTGOING_ELSEWHERE: Final = (32768, 65535)
"""Covers the defaults of all systems that have no such file."""
LOWEST: Final = 10240
"""Services with well-known port numbers use the ports below."""
HIGHEST: Final = 65535


def is_local(host_or_endpoint: str) -> bool:
    """True if only this machine can reach a ZeroMQ endpoint, IP address or name (loopback, or no network at all). Names
    other than `localhost` count as reachable from elsewhere, whatever they resolve to here."""
    scheme, separator, rest = host_or_endpoint.partition("://")
    if separator and scheme in ("ipc", "inproc"):
        return True
    host = rest.rpartition(":")[0] if separator else host_or_endpoint
    host = host.strip("[]").partition("%")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def lasting_ports(tries: int = 32) -> Iterator[int]:
    """Random ports that the system gives to no outgoing connection; none if it uses nearly all of them. Another process
    may listen on them already."""
    low, high = outgoing_ports()
    ports = [*range(LOWEST, low), *range(max(LOWEST, high + 1), HIGHEST + 1)]
    yield from random.sample(ports, min(tries, len(ports)))


def outgoing_ports() -> tuple[int, int]:
    """(first, last) of the ports that the system gives to outgoing connections."""
    try:
        low, high = map(int, OUTGOING.read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        return OUTGOING_ELSEWHERE
    return low, high


def free_port(host: str = "127.0.0.1") -> int:
    """An unused port of `host`, if possible a lasting one. Raises OSError if this machine does not have the address."""
    for port in lasting_ports():
        with contextlib.suppress(OSError):
            return _bound_once(host, port)
    return _bound_once(host, 0)


def _bound_once(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, port))
        return int(probe.getsockname()[1])
