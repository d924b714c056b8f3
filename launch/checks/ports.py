"""Check of the addresses that the run listens on: they can be bound, and a connection arrives."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Final, NamedTuple

import psutil

from stillhouse.launch.checks.finding import Case, Finding
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.servers.plan import launched_groups, reachable_host
from stillhouse.protocol.addresses import free_port

CONNECT_TIMEOUT_S: Final = 3.0


class Listen(NamedTuple):
    """An address that a part of the run listens on."""

    key: str
    """The configuration key that sets it."""
    host: str
    port: int
    """0: the system chooses."""


def listens(config: RunConfig) -> Iterator[Listen]:
    """All of them. Links within a machine that are no TCP are left out."""
    scheme, _, rest = config.buffer.bind.partition("://")
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        host = host.strip("[]")
        yield Listen("buffer.bind", _address(host), int(port) if port.isdecimal() else 0)
    yield Listen("weights.store_port", config.weights.host, config.weights.store_port)
    yield Listen("weights.control_port", config.weights.host, config.weights.control_port)
    for group in launched_groups(config):
        server = group.settings.server
        for index in range(group.n if server.port else 1):
            yield Listen(f"{group.key}.server.port", server.host, server.port + index if server.port else 0)


def _address(host: str) -> str:
    """ZeroMQ also takes `*` and names of interfaces."""
    interface = psutil.net_if_addrs().get(host, [])
    found = [entry.address for entry in interface if entry.family == socket.AF_INET]
    return "0.0.0.0" if host == "*" else found[0] if found else host


def ports(case: Case) -> Iterator[Finding]:
    """Bind each, and connect to it from here."""
    for listen in listens(case.config):
        yield _tried(listen)


def _tried(listen: Listen) -> Finding:
    at = f"{listen.host}:{listen.port or 'any port'}"
    try:
        connected = _connects(listen.host, listen.port or free_port(listen.host))
    except OSError as error:
        holder = _holder(listen.port)
        return Finding(
            check="ports",
            subject=listen.key,
            status="failed",
            measured=f"cannot listen on {at}: {error.strerror or error}{f', {holder} does' if holder else ''}",
            normal="a free port of this machine",
            advice=f"end that process, or set another {listen.key} (0: the system chooses)"
            if listen.port
            else "an address that this machine has",
        )
    return Finding(
        check="ports",
        subject=listen.key,
        status="ok" if connected else "warning",
        measured=f"{at} can be listened on, " + ("and a connection arrives" if connected else "but nothing connects"),
        normal="both",
        advice=f"let the firewall pass connections to {listen.host}",
    )


def _connects(host: str, port: int) -> bool:
    """Raises OSError when the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(1)
        server.settimeout(CONNECT_TIMEOUT_S)
        try:
            with socket.create_connection((reachable_host(host), port), CONNECT_TIMEOUT_S):
                server.accept()[0].close()
        except OSError:
            return False
    return True


def _holder(port: int) -> str:
    """The process that listens on the port; empty where the system does not say."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,) and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""
