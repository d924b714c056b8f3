"""Which addresses count as reachable from elsewhere (in doubt, all of them), and ports that last."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from stillhouse.protocol import addresses
from stillhouse.protocol.addresses import free_port, is_local, lasting_ports, outgoing_ports

LOCAL = (
    *("tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://127.8.8.8:5555", "tcp://[::1]:5555", "tcp://localhost:1"),
    *("ipc:///tmp/x", "inproc://x", "127.0.0.1", "::1", "[::1]", "localhost"),
)
REACHABLE = (
    *("tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.1:5555", "tcp://eth0:5555", "tcp://host.example:1"),
    *("tcp://[::]:1", "tcp://[fe80::1%eth0]:1", "tcp://127.0.0.1.example.com:1", "tcp://lo:1"),
    *("10.0.0.1", "::", "learner-host", ""),
)


@pytest.mark.parametrize("address", LOCAL)
def test_loopback_and_no_network_are_local(address: str) -> None:
    assert is_local(address)


@pytest.mark.parametrize("address", REACHABLE)
def test_all_else_is_not(address: str) -> None:
    assert not is_local(address)


def test_no_outgoing_connection_is_given_a_lasting_port() -> None:
    low, high = outgoing_ports()
    found = list(lasting_ports(1000))
    assert len(set(found)) == 1000
    assert not [port for port in found if low <= port <= high]
    with socket.socket() as listener, socket.socket() as outgoing:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        outgoing.connect(listener.getsockname())
        assert low <= outgoing.getsockname()[1] <= high, "the range is the one that the system uses"


def test_a_free_port_is_a_lasting_one_that_can_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        held = taken.getsockname()[1]
        monkeypatch.setattr(addresses, "lasting_ports", lambda: iter([held, 20111, 20112, 20113]))
        assert free_port() in (20111, 20112, 20113)


@pytest.mark.parametrize(("content", "expected"), [("1024\t65535\n", (1024, 65535)), ("nonsense", (32768, 65535))])
def test_where_the_system_gives_all_ports_away_any_free_one_has_to_do(
    content: str, expected: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "range"
    file.write_text(content)
    monkeypatch.setattr(addresses, "OUTGOING", file)
    assert outgoing_ports() == expected
    if expected[0] <= addresses.LOWEST:
        assert list(lasting_ports()) == []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="Cannot assign"):
        free_port("192.0.2.1")
