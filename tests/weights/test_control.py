"""The control channel of the weight group: who gets in, for which rank, and what garbage and floods do to it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import zmq

from stillhouse.protocol.keys import ClientKeys, encrypt_client, load_client_keys, load_server_keys, make_keys
from stillhouse.protocol.messages import Role, WeightPlan, WeightVersion
from stillhouse.protocol.sockets import new_socket
from stillhouse.weights.control import (
    LONGEST_WORDS,
    MESSAGES_PER_MEMBER,
    ControlHost,
    ControlMember,
    Waker,
    member_keys,
)
from stillhouse.weights.control_messages import FromMember, Go, MemberAnswer, MemberJoined, MemberReady, Want
from tests.patience import PATIENCE_S

JOINED = MemberJoined(1, 1, WeightVersion(0, 3))
MEMBERS = ("actor-0", "actor-host-0")
POLLS = int(PATIENCE_S / 0.02)
"""Of 20 ms: how long a test waits for what must come."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", MEMBERS)
    return tmp_path / "keys"


def plan_keys(host: ControlHost) -> ClientKeys:
    """As a member has them from the plan."""
    plan = WeightPlan(1, "127.0.0.1", 1, "gloo", MEMBERS, 3, 1.0, host.endpoint, host.plan_keys)
    keys = member_keys(plan, None)
    assert keys is not None
    return keys


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(POLLS):
        if true():
            return
        time.sleep(0.02)
    raise AssertionError("it never came")


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
    host.begin(1, MEMBERS)
    with ControlMember(host.endpoint, load_client_keys(keys, "actor-0", "learner")) as member:
        member.send(JOINED)
        assert poll_until(host, bool) == [JOINED]
        host.send(Go(1, 5.0))
        assert member.recv(PATIENCE_S, waker) == Go(1, 5.0)
    waker.close()
    host.close()


@pytest.mark.parametrize("role", [None, "teacher", "launcher"])
def test_nobody_else_does_and_is_counted(keys: Path, role: Role | None) -> None:
    host = ControlHost("127.0.0.1", 0, load_server_keys(keys, "learner", ("actor",)))
    host.begin(1, MEMBERS)
    own = None if role is None else load_client_keys(keys, role, "learner")
    with ControlMember(host.endpoint, own) as member:
        member.send(JOINED)
        assert poll_until(host, lambda _: bool(host.refused)) == []
    assert set(host.refused) == {"no_key" if role is None else "wrong_key"}
    host.close()


@pytest.mark.parametrize(("owner", "rank"), [("actor-0", 2), ("actor", 1), ("actor-0", 3), ("actor-0", 0)])
def test_nobody_speaks_for_another_rank(keys: Path, owner: str, rank: int) -> None:
    host = ControlHost("127.0.0.1", 0, load_server_keys(keys, "learner", ("actor",)))
    host.begin(1, MEMBERS)
    with ControlMember(host.endpoint, load_client_keys(keys, owner, "learner")) as member:
        member.send(MemberJoined(1, rank, None))
        assert poll_until(host, lambda _: host.unreadable_total == 1) == []
        own = MemberJoined(1, 1 + MEMBERS.index({"actor": "actor-host-0"}.get(owner, owner)), None)
        member.send(own)
        assert poll_until(host, bool) == [own]
    host.close()


@pytest.mark.parametrize(("owner", "rank"), [("actor-0", 2), ("actor", 1), ("actor-0", 0)])
def test_nobody_gets_weights_as_another_rank(keys: Path, owner: str, rank: int) -> None:
    host = ControlHost("127.0.0.1", 0, load_server_keys(keys, "learner", ("actor",)))
    host.begin(1, MEMBERS)
    with ControlMember(host.endpoint, load_client_keys(keys, owner, "learner")) as member:
        member.send(cast("Any", Want(1, rank, 1, 0, 8)))
        wait_until(lambda: host.unreadable_total == 1)
        assert host.requests(0.0) == []
        own = Want(1, 1 + MEMBERS.index({"actor": "actor-host-0"}.get(owner, owner)), 1, 0, 8)
        member.send(cast("Any", own))
        assert [request.want for request in host.requests(PATIENCE_S)] == [own]
    host.close()


def test_in_a_run_without_keys_nobody_comes_in_but_who_was_told_the_plan() -> None:
    host = ControlHost("127.0.0.1", 0)
    host.begin(1, MEMBERS)
    other = ControlHost("127.0.0.1", 0)
    for keys, fault in ((None, "no_key"), (plan_keys(other), "wrong_key")):
        with ControlMember(host.endpoint, keys) as stranger:
            stranger.send(JOINED)
            assert poll_until(host, lambda _, fault=fault: fault in host.refused) == []
    with ControlMember(host.endpoint, plan_keys(host)) as member:
        member.send(JOINED)
        assert poll_until(host, bool) == [JOINED]
    host.close()
    other.close()


FLOOD = """
import sys, zmq
from stillhouse.protocol.sockets import new_socket
endpoint, n, n_bytes, *keys = sys.argv[1:]
peer = new_socket(zmq.Context(), zmq.DEALER)
if keys:
    peer.curve_publickey, peer.curve_secretkey, peer.curve_serverkey = (key.encode() for key in keys)
peer.set(zmq.SNDHWM, 1)
peer.set(zmq.SNDTIMEO, 1000)
peer.set(zmq.LINGER, 1000)
peer.connect(endpoint)
try:
    for _ in range(int(n)):
        peer.send(bytes(int(n_bytes)))
except zmq.Again:
    pass
"""
"""Messages that no member sends, as fast as they go; gives up when none goes any more."""


@pytest.mark.parametrize("who", ["stranger", "member"])
def test_floods_take_no_memory_while_rank_0_is_at_something_else(who: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody polls: between two versions rank 0 looks at this channel for minutes not once."""
    host = ControlHost("127.0.0.1", 0)
    host.begin(1, MEMBERS)
    keys = host.plan_keys if who == "member" else None
    before_bytes = psutil.Process().memory_info().rss
    most_bytes = 0
    command = [sys.executable, "-c", FLOOD, host.endpoint, "3", str(64 << 20), *(keys or ())]
    with subprocess.Popen(command) as flood:
        while flood.poll() is None:
            most_bytes = max(most_bytes, psutil.Process().memory_info().rss - before_bytes)
            time.sleep(0.02)
        assert flood.returncode == 0
    assert most_bytes < 100 << 20, f"{most_bytes >> 20} MiB"
    if who == "stranger":
        assert host.refused.get("no_key", 0) >= 1
        assert "refused (no_key) a connection from" in caplog.text
    with ControlMember(host.endpoint, plan_keys(host)) as member:
        member.send(JOINED)
        assert poll_until(host, bool) == [JOINED]
    host.close()


def test_what_one_member_may_say_unasked_is_bounded_and_the_rest_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    host = ControlHost("127.0.0.1", 0)
    host.begin(1, MEMBERS)
    with ControlMember(host.endpoint, plan_keys(host)) as member:
        for _ in range(500):
            member.send(JOINED)
        limit = len(MEMBERS) * MESSAGES_PER_MEMBER
        wait_until(lambda: host.unreadable_total == 500 - limit)
        assert host.poll(0.0) == [JOINED] * limit
    assert "more messages than a group sends" in caplog.text
    host.close()


def test_long_words_are_cut_before_they_cut_the_connection() -> None:
    host = ControlHost("127.0.0.1", 0)
    host.begin(1, MEMBERS)
    with ControlMember(host.endpoint, plan_keys(host)) as member:
        member.send(MemberAnswer(1, 1, 1, "refused", "\n" + "x" * 1_000_000))
        member.send(MemberReady(1, 1, "y" * 1_000_000))
        answer, ready = poll_until(host, lambda heard: len(heard) == 2)
    assert isinstance(answer, MemberAnswer) and answer.reason == "\\n" + "x" * (LONGEST_WORDS - 1)
    assert isinstance(ready, MemberReady) and ready.error == "y" * LONGEST_WORDS
    host.close()


@pytest.mark.parametrize(
    "garbage", [b"", b"\xff", b"\x91" * 5000, b"\x81\xa4type\xa6Joined", b"\x81\xa4type\xa2\xff\xfe"]
)
def test_garbage_is_counted_and_harms_nobody(garbage: bytes) -> None:
    host = ControlHost("127.0.0.1", 0)
    host.begin(1, MEMBERS)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = new_socket(context, zmq.DEALER)
    encrypt_client(stranger, plan_keys(host))
    stranger.connect(host.endpoint)
    stranger.send(garbage)
    assert poll_until(host, lambda _: host.unreadable_total == 1) == []
    with ControlMember(host.endpoint, plan_keys(host)) as member:
        member.send(JOINED)
        assert poll_until(host, bool) == [JOINED]
    context.destroy(linger=0)
    host.close()
