"""Ports for who is started again at the same address."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from protocol import ports
from protocol.ports import free_port, lasting_ports, outgoing_ports


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
        monkeypatch.setattr(ports, "lasting_ports", lambda: iter([held, 20111, 20112, 20113]))
        assert free_port() in (20111, 20112, 20113)


@pytest.mark.parametrize(("told", "expected"), [("1024\t65535\n", (1024, 65535)), ("nonsense", (32768, 65535))])
def test_where_the_system_gives_all_ports_away_any_free_one_has_to_do(
    told: str, expected: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "range"
    file.write_text(told)
    monkeypatch.setattr(ports, "OUTGOING", file)
    assert outgoing_ports() == expected
    if expected[0] <= ports.LOWEST:
        assert list(lasting_ports()) == []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="Cannot assign"):
        free_port("192.0.2.1")
