"""The control channel of the weight group: who gets in with keys, and what garbage does to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from engines.weight_control import ControlHost, ControlMember, FromMember, Go, Joined, Waker
from protocol.keys import load_client_keys, load_server_keys, make_keys
from protocol.messages import Role, WeightVersion
from protocol.sockets import new_socket

JOINED = Joined(1, 1, WeightVersion(0, 3))
POLLS = 500
"""Of 20 ms: how long a test waits for what must come."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def poll_until(host: ControlHost, true: Callable[[list[FromMember]], bool]) -> list[FromMember]:
    heard: list[FromMember] = []
    for _ in range(POLLS):
        heard += host.poll(0.02)
        if true(heard):
            return heard
    raise AssertionError(f"it never came: {heard}, {host.refused}")


def test_an_actor_with_its_key_joins_and_is_answered(keys: Path) -> None:
    host = ControlHost("127.0.0.1", 0, load_server_keys(keys, "learner", ("actor",)))
    waker = Waker()
    host.begin(1)
    with ControlMember(host.endpoint, load_client_keys(keys, "actor", "learner")) as member:
        member.send(JOINED)
        assert poll_until(host, bool) == [JOINED]
        host.send(Go(1, 5.0))
        assert member.recv(10.0, waker) == Go(1, 5.0)
    waker.close()
    host.close()


@pytest.mark.parametrize("role", [None, "teacher", "launcher"])
def test_nobody_else_does_and_is_counted(keys: Path, role: Role | None) -> None:
    host = ControlHost("127.0.0.1", 0, load_server_keys(keys, "learner", ("actor",)))
    host.begin(1)
    own = None if role is None else load_client_keys(keys, role, "learner")
    with ControlMember(host.endpoint, own) as member:
        member.send(JOINED)
        assert poll_until(host, lambda _: bool(host.refused)) == []
    assert set(host.refused) == {"no_key" if role is None else "wrong_key"}
    host.close()


@pytest.mark.parametrize(
    "garbage", [b"", b"\xff", b"\x91" * 5000, b"\x81\xa4type\xa6Joined", b"\x81\xa4type\xa2\xff\xfe"]
)
def test_garbage_is_counted_and_harms_nobody(garbage: bytes) -> None:
    host = ControlHost("127.0.0.1", 0)
    host.begin(1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = new_socket(context, zmq.DEALER)
    stranger.connect(host.endpoint)
    stranger.send(garbage)
    assert poll_until(host, lambda _: host.unreadable_total == 1) == []
    with ControlMember(host.endpoint) as member:
        member.send(JOINED)
        assert poll_until(host, bool) == [JOINED]
    context.destroy(linger=0)
    host.close()
