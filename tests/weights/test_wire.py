"""Versions over encrypted connections to the learner's control port: real processes, and strangers at the port."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final, Self

import msgspec
import pytest
import torch
import zmq
from torch import Tensor
from xxhash import xxh3_64_digest

from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.wire import PIECE_BYTES, WINDOW
from tests.patience import PATIENCE_S, eventually
from tests.sim.weights.weight_actors import ActorFleet
from tests.weights.fleet_learner import FleetLearner, version

NAMES = ("actor-0", "actor-1", "actor-2")
MANY, FEW = WINDOW + 3, 3
"""Full pieces of a version: more than a member may ask for at a time. A last one is smaller."""


def weights_of(pieces: int, step: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        ("half", torch.randn(61, generator=generator).half()),
        ("w", torch.randn(pieces * PIECE_BYTES // (4 * 256) + 1, 256, generator=generator)),
        ("one", torch.randn(1, generator=generator)),
    ]


many, weights = partial(weights_of, MANY), partial(weights_of, FEW)


@pytest.fixture
def learner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FleetLearner]:
    """Of versions of a few pieces, or `large`."""
    named = many if getattr(request, "param", "") == "large" else weights
    with ActorFleet() as fleet, closing(FleetLearner(fleet, tmp_path / "weights", "wire", named)) as learner:
        yield learner


large: Final = pytest.mark.parametrize("learner", ["large"], indirect=True)


@large
def test_every_version_reaches_every_member_by_one_port_without_a_file_or_a_process_group(
    learner: FleetLearner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_store(*_: object) -> None:
        raise AssertionError("this way needs no store")

    monkeypatch.setattr("stillhouse.weights.transports.collective.host_store", no_store)
    with learner.start(every_version=True) as publisher:
        learner.fleet.start(NAMES)
        publisher.membership(learner.fleet.membership())
        for step in range(1, 4):
            publisher.publish(version(step), many(step))
        assert publisher.wait_idle(PATIENCE_S)
        learner.delivered(3)
        stats = publisher.stats
    assert learner.announced == [version(step) for step in range(1, 4)]
    assert (stats.members, stats.skipped_versions_total, stats.dropped_total) == (3, 0, {})
    assert {(plan.backend, plan.port) for plan in learner.plans} == {("wire", 0)}
    assert stats.snapshots_total == 0 and not (tmp_path / "weights").exists()
    assert stats.control_refused_total == stats.control_unreadable_total == 0


def test_a_member_that_dies_is_left_out_and_the_others_have_the_version(learner: FleetLearner) -> None:
    with learner.start(broadcast_timeout_s=2.0, rejoin_delay_s=60.0) as publisher:
        learner.begin(NAMES)
        learner.fleet.signal(NAMES[0], signal.SIGKILL)
        publisher.publish(version(2), weights(2))
        learner.delivered(2, *NAMES[1:])
        assert publisher.wait_idle(PATIENCE_S)
        assert publisher.stats.dropped_total == {"no_answer": 1}


FAST: Final = 1 << 30
"""Bytes per second of a link that only passes on."""
HALF: Final = 6 << 20
"""Bytes of a version of about 11 MiB."""


@large
def test_a_connection_that_breaks_in_the_middle_of_a_version_costs_what_was_under_way(learner: FleetLearner) -> None:
    """It comes from another connection, within the round, and nobody is left out."""
    learner.through = {NAMES[0]: FAST}
    with learner.start(broadcast_timeout_s=10 * PATIENCE_S) as publisher:
        learner.begin(NAMES)
        link = learner.links[NAMES[0]]
        before, connections, link.bytes_per_s = link.passed_bytes, link.accepted, 8 << 20
        publisher.publish(version(2), many(2))
        eventually(lambda: link.passed_bytes - before > HALF, "half a version")
        link.cut()
        link.bytes_per_s = FAST
        learner.delivered(2)
        assert publisher.wait_idle(PATIENCE_S)
        stats, passed = publisher.stats, link.passed_bytes - before
        assert (stats.dropped_total, stats.failed_groups_total, stats.rebuilds_total, stats.members) == ({}, 0, 1, 3)
        assert link.accepted - connections == 2, "one for weights, one for the control channel"
        total = len(some_weights(many(2)))
        assert total < passed < total + WINDOW * PIECE_BYTES + HALF // 2, "what had arrived was not sent again"
        assert learner.fleet.report(NAMES[0]).stats["weight_reconnects_total"] == 2
        assert learner.fleet.report(NAMES[1]).stats["weight_reconnects_total"] == 0


def test_a_connection_that_breaks_at_another_time_loses_no_version(learner: FleetLearner) -> None:
    """Its last pieces, or its answer, come by another connection; and so does a version after it broke between two."""
    learner.through = {NAMES[0]: FAST}
    with learner.start(broadcast_timeout_s=10 * PATIENCE_S) as publisher:
        learner.fleet.start(NAMES)
        publisher.membership(learner.fleet.membership())
        for step in range(1, 6):
            before = learner.links[NAMES[0]].passed_bytes if step > 1 else 0
            publisher.publish(version(step), weights(step))
            if step in (2, 4):
                link, most_bytes = learner.links[NAMES[0]], before + len(some_weights(weights(1))) - PIECE_BYTES
                eventually(lambda one=link, most=most_bytes: one.passed_bytes > most, "most of it")
                link.cut()
            learner.delivered(step)
            assert publisher.wait_idle(PATIENCE_S)
            learner.links[NAMES[0]].cut()
        stats = publisher.stats
        assert (stats.dropped_total, stats.failed_groups_total, stats.rebuilds_total, stats.members) == ({}, 0, 1, 3)


def test_the_kernel_watches_over_the_connections_of_a_member(learner: FleetLearner) -> None:
    """In the kernel's own table: a connection that is silent, with the timer of its keepalive (2)."""

    def timers() -> list[str]:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]]
        return [row[5][:2] for row in rows if row[2].endswith(f":{learner.port:04X}") and row[3] == "01"]

    with learner.start():
        learner.begin(NAMES)
        eventually(lambda: timers() == ["02"] * 6, "two of each member, of which nothing is on its way (1)")


def test_a_newcomer_gets_the_newest_version_and_the_others_do_not_fetch_it_again(learner: FleetLearner) -> None:
    learner.through = {NAMES[0]: FAST}
    with learner.start() as publisher:
        learner.begin(NAMES[:1])
        link, total = learner.links[NAMES[0]], len(some_weights(weights(1)))
        before = link.passed_bytes
        assert before > total
        learner.fleet.start(NAMES[1:])
        publisher.membership(learner.fleet.membership())
        learner.delivered(1, *NAMES)
        assert publisher.wait_idle(PATIENCE_S) and publisher.stats.members == 3
        assert link.passed_bytes - before < PIECE_BYTES
        publisher.publish(version(2), weights(2))
        learner.delivered(2)
        assert publisher.wait_idle(PATIENCE_S) and publisher.stats.dropped_total == {}
        assert link.passed_bytes - before > total


def test_strangers_at_the_port_get_nothing_are_counted_and_disturb_nobody(
    learner: FleetLearner, caplog: pytest.LogCaptureFixture
) -> None:
    """While a version is being sent. The strangers are made from a plain socket and from ZeroMQ itself, and share no
    code with the members; the same client with a member's keys does get weights."""
    with learner.start() as publisher:
        learner.publish_past(publisher, NAMES, NAMES[2])  # and the learner waits for the third

        talk_tcp(learner.port)
        plan = learner.plans[-1]
        assert plan.control_keys is not None
        public, secret, server = (key.encode() for key in plan.control_keys)
        want = msgspec.msgpack.encode(
            {"type": "Want", "group_epoch": plan.group_epoch, "rank": 3, "number": 2, "first": 0, "count": 1}
        )
        for before, keys in ((1, None), (2, zmq.curve_keypair())):  # without encryption; a pair that nobody knows
            eventually(lambda n=before: publisher.stats.control_refused_total == n, f"refusal {before}")
            with Stranger(plan.control, keys, server, want) as stranger:
                eventually(lambda n=before: publisher.stats.control_refused_total > n, "the next refusal")
                assert stranger.heard() == []
        with Stranger(plan.control, (public, secret), server, want) as member:
            eventually(lambda: some_bytes(2) in b"".join(member.heard()), "weights, for a member's keys")
        assert publisher.stats.control_refused_total == 3
        assert "no_key" in caplog.text and "wrong_key" in caplog.text

        learner.fleet.signal(NAMES[2], signal.SIGCONT)
        learner.delivered(2)
        assert publisher.stats.dropped_total == {} and publisher.stats.members == 3


def test_a_member_that_asks_again_and_again_gets_each_piece_once(learner: FleetLearner) -> None:
    """All that waits for a connection is in the learner's memory: nobody may make it wait there any number of times."""
    with learner.start() as publisher:
        learner.publish_past(publisher, NAMES, NAMES[2])  # and the learner waits for the third

        plan = learner.plans[-1]
        assert plan.control_keys is not None
        public, secret, server = (key.encode() for key in plan.control_keys)

        def want(first: int, count: int) -> bytes:
            fields = {"group_epoch": plan.group_epoch, "rank": 3, "number": 2, "first": first, "count": count}
            return msgspec.msgpack.encode({"type": "Want", **fields})

        with Stranger(plan.control, (public, secret), server, want(0, 2)) as member:
            for _ in range(20):
                member.say(want(0, 2))
            for first, count in ((0, 2**63), (2**63, 2**63), (-1, 2), (2, -1)):
                member.say(want(first, count))
            member.say(want(2, 1))
            eventually(lambda: 2 in pieces_in(member.heard()), "the piece asked for last")
            assert pieces_in(member.heard()) == [0, 1, 2]
        learner.fleet.signal(NAMES[2], signal.SIGCONT)
        learner.delivered(2)
        assert publisher.wait_idle(PATIENCE_S)
        assert publisher.stats.dropped_total == {} and publisher.stats.members == 3


def pieces_in(frames: list[bytes]) -> list[int]:
    """Indices of the pieces: a message is a head, the piece and a checksum."""
    return [msgspec.msgpack.decode(head)["index"] for head in frames[::3]]


def some_weights(named: list[tuple[str, Tensor]]) -> bytes:
    return b"".join(tensor.numpy().tobytes() for _, tensor in named)


def some_bytes(step: int) -> bytes:
    return weights(step)[1][1].numpy().tobytes()[:64]


def talk_tcp(port: int) -> bytes:
    """What the port says to somebody who does not speak ZeroMQ."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: learner\r\n\r\n")
        stranger.settimeout(PATIENCE_S)
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := stranger.recv(1 << 16):
                heard += piece
        return heard


class Stranger:
    """Connects once, says a message, and keeps what comes back."""

    def __init__(self, endpoint: str, keys: tuple[bytes, bytes] | None, server: bytes, message: bytes) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.reconnect_ivl = -1
        if keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys
            self._socket.curve_serverkey = server
        self._socket.connect(endpoint)
        self.say(message)
        self._heard: list[bytes] = []

    def say(self, message: bytes) -> None:
        self._socket.send_multipart([message, xxh3_64_digest(message)])

    def heard(self) -> list[bytes]:
        while self._socket.poll(100):
            self._heard += self._socket.recv_multipart()
        return self._heard

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()


def test_a_transport_of_another_package_or_of_the_working_directory_is_found_by_its_name(
    learner: FleetLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines, environments and divergences are: the launcher starts Python without the directory on its path."""
    with learner.start(transport="stillhouse.weights.transports.wire:WireTransport"):
        pass
    with pytest.raises(ValueError, match=r"weights\.transport: got 'carrier_pigeon', expected one of auto, collective"):
        learner.start(transport="carrier_pigeon")
    (tmp_path / "my_own_transport.py").write_text(
        "from stillhouse.weights.transports.wire import WireTransport\nSLOW = 'not a transport'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path not in ("", str(tmp_path))])
    with learner.start(transport="my_own_transport:WireTransport"):
        pass
    with pytest.raises(ValueError, match="'my_own_transport:SLOW' is a str, expected a function"):
        learner.start(transport="my_own_transport:SLOW")


@pytest.mark.parametrize(("field", "value"), [("backend", "nccl"), ("verify", "reload")])
def test_what_it_cannot_do_is_refused(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{field} = {value} with transport = wire"):
        msgspec.convert({"transport": "wire", field: value}, WeightsConfig)
