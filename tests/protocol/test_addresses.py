"""Which addresses count as reachable from elsewhere: when in doubt, all."""

from __future__ import annotations

import pytest

from protocol.addresses import is_local

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
