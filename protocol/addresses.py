"""Which addresses other machines can reach."""

from __future__ import annotations

import ipaddress


def is_local(host_or_endpoint: str) -> bool:
    """Whether only this machine reaches it: loopback, or no network at all. A ZeroMQ endpoint, an IP address or a name;
    names other than `localhost` count as reachable from elsewhere, whatever they resolve to here."""
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
